"""Pre-train a Llama of the GaLore paper: any optimizer, perplexity on held-out text, tokens/s, memory.

    python examples/pretrain_llama.py --size 60m --train_files train.txt.gz --valid_files valid.txt.gz \
        --optim galore_adamw --optim_args rank=128,update_proj_gap=200,scale=0.25 --learning_rate 0.01 \
        --max_grad_norm 0 --max_steps 1000 --per_device_train_batch_size 64 --output_dir out/60m

Without files it streams allenai/c4. Expect "perplexity" and "tokens_per_second" at the end; every argument of
TrainingArguments works. A tokenizer is trained on the text first (32,000 pieces, fewer for small text).
"""

import gzip
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.utils.data import IterableDataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

# hidden size, MLP, heads, layers: table of appendix C of arXiv 2403.03507
SIZES = {
    "60m": (512, 1376, 8, 8),
    "130m": (768, 2048, 12, 12),
    "350m": (1024, 2736, 16, 24),
    "1b": (2048, 5461, 32, 24),
    "7b": (4096, 11008, 32, 32),
    "tiny": (64, 176, 4, 2),
}


@dataclass
class Arguments:
    """What is trained on what."""

    size: str = field(default="60m", metadata={"help": f"One of {', '.join(SIZES)}."})
    train_files: list[str] = field(default_factory=list, metadata={"help": "Text, also .gz; none: c4."})
    valid_files: list[str] = field(default_factory=list, metadata={"help": "Held-out text."})
    length: int = field(default=256, metadata={"help": "Tokens per sequence."})
    vocabulary: int = field(default=32000, metadata={"help": "Pieces of the tokenizer, at most."})
    valid_sequences: int = 256


def lines(files: list[str], split: str) -> Iterator[str]:
    """Documents or lines of text."""
    if not files:
        from datasets import load_dataset

        yield from (row["text"] for row in load_dataset("allenai/c4", "en", split=split, streaming=True))
    for name in files:
        opener = gzip.open if name.endswith(".gz") else open
        with opener(name, "rt", encoding="utf-8") as file:
            yield from file


@dataclass(eq=False)
class Sequences(IterableDataset):
    """Packed token sequences of one length: `most` of them, or (0) without end."""

    files: list[str]
    split: str
    tokenizer: ByteLevelBPETokenizer
    length: int
    most: int = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Start from the first line."""
        yield from itertools.islice(self._sequences(), self.most or None)

    def _sequences(self) -> Iterator[dict[str, torch.Tensor]]:
        tokens, found = [], 0
        while not (self.most and found):
            for line in lines(self.files, self.split):
                tokens += self.tokenizer.encode(line).ids
                while len(tokens) >= self.length:
                    ids, tokens = torch.tensor(tokens[: self.length]), tokens[self.length :]
                    found += 1
                    yield {"input_ids": ids, "labels": ids}
            if not found:
                raise ValueError(f"The {self.split} text has less than {self.length} tokens.")


def main(argv: list[str]) -> dict[str, float]:
    """Train and evaluate; returns the metrics."""
    parser = HfArgumentParser((Arguments, TrainingArguments))
    arguments, training = parser.parse_args_into_dataclasses(argv)
    if arguments.size not in SIZES:
        raise SystemExit(f"--size {arguments.size} is unknown. Valid: {', '.join(SIZES)}.")
    if training.max_steps <= 0:
        raise SystemExit("Text is streamed, so the run needs --max_steps.")
    tokenizer = ByteLevelBPETokenizer()
    sample = itertools.islice(lines(arguments.train_files, "train"), 200_000)
    tokenizer.train_from_iterator(sample, arguments.vocabulary, show_progress=not training.disable_tqdm)
    hidden, intermediate, heads, layers = SIZES[arguments.size]
    torch.manual_seed(training.seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=hidden, intermediate_size=intermediate,
        num_attention_heads=heads, num_hidden_layers=layers, max_position_embeddings=arguments.length,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    train = Sequences(arguments.train_files, "train", tokenizer, arguments.length)
    valid = (arguments.valid_files, "validation", tokenizer, arguments.length, arguments.valid_sequences)
    model = LlamaForCausalLM(config)
    trainer = Trainer(model, training, train_dataset=train, eval_dataset=Sequences(*valid))
    metrics = trainer.train(training.resume_from_checkpoint).metrics
    metrics["tokens_per_second"] = metrics["train_samples_per_second"] * arguments.length
    metrics |= trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    if torch.cuda.is_available():
        metrics["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    trainer.log_metrics("all", metrics)
    trainer.save_metrics("all", metrics)
    return metrics


if __name__ == "__main__":
    main(sys.argv[1:])
