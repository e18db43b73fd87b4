"""LoRA with forge_adamw: only the adapters train, and their weight gradients are never stored either.

    python examples/lora.py --model_name_or_path HuggingFaceTB/SmolLM2-135M --train_file text.txt \
        --optim forge_adamw --max_steps 100 --learning_rate 2e-4 --output_dir out/lora

Expect a falling loss, the report of which parameter takes which path, and the adapter in out/lora. It is peft
as always; `--optim` is all that differs.
"""

import sys
from dataclasses import dataclass, field

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

import forge_hf


@dataclass
class Arguments:
    """Model, data and adapter."""

    model_name_or_path: str = "HuggingFaceTB/SmolLM2-135M"
    train_file: str = field(default="", metadata={"help": "A text file; each line is an example."})
    rank: int = 16
    target_modules: str = "all-linear"
    max_length: int = 256


def main(argv: list[str]) -> Trainer:
    """Train the adapters and save them; returns the trainer."""
    arguments, training = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses(argv)
    if not arguments.train_file:
        raise SystemExit("Give --train_file.")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)
    config = LoraConfig(r=arguments.rank, target_modules=arguments.target_modules, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    data = load_dataset("text", data_files=arguments.train_file, split="train")
    data = data.filter(lambda row: row["text"].strip() != "").map(
        lambda rows: tokenizer(rows["text"], truncation=True, max_length=arguments.max_length),
        batched=True,
        remove_columns=["text"],
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(model, training, train_dataset=data, data_collator=collator)
    trainer.train()
    if training.optim != "adamw_torch":
        print(forge_hf.explain(trainer.optimizer))
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
