"""Stop a run in the middle and resume it: the end is the same to the bit, in every mode and format.

    python examples/resume.py --optim forge_adamw_8bit --max_grad_norm 0

Expect "equal to the bit". Nothing is downloaded; any argument of TrainingArguments may be given.
"""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

STEPS, HALF = 12, 6


class Counting(Dataset):
    """Sequences that count from a random start."""

    def __len__(self) -> int:
        """Sequences in a pass."""
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sequence."""
        ids = torch.arange(24) + index % 16
        return {"input_ids": ids, "labels": ids}


def model() -> LlamaForCausalLM:
    """A small Llama with dropout, so that a resumed run needs the random state too."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
        attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def end(argv: list[str], folder: str, resume: str | None) -> torch.Tensor:
    """Train to the end and return all weights as one vector."""
    settings = [
        "--output_dir",
        folder,
        "--max_steps",
        str(STEPS),
        "--save_steps",
        str(HALF),
        "--report_to",
        "none",
    ]
    settings += ["--learning_rate", "1e-3", "--logging_steps", "3", *argv]
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(settings)
    trainer = Trainer(model(), arguments, train_dataset=Counting())
    trainer.train(resume_from_checkpoint=resume)
    return torch.cat([parameter.detach().flatten().cpu() for parameter in trainer.model.parameters()])


def main(argv: list[str]) -> bool:
    """Train, resume from the middle, compare; returns whether both ends are equal."""
    argv = argv if any(entry.startswith("--optim") for entry in argv) else ["--optim", "forge_adamw", *argv]
    with tempfile.TemporaryDirectory() as folder:
        whole = end(argv, folder, None)
        again = end(argv, folder, f"{folder}/checkpoint-{HALF}")
    equal = torch.equal(whole, again)
    print("equal to the bit" if equal else f"apart by {(whole - again).abs().max():.3g}")
    return equal


if __name__ == "__main__":
    raise SystemExit(not main(sys.argv[1:]))
