"""Full fine-tuning of a causal LM on a chat file, without storing weight gradients.

    python examples/finetune_chat.py --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \
        --train_file chat.jsonl --optim forge_adamw_8bit --bf16 True --max_steps 200 --output_dir out/chat

Each line of the file is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}.
Expect a falling loss and a model in out/chat. With TRL installed its SFTTrainer trains, else the Trainer on
the rendered chats; both take the same `--optim`.
"""

import importlib.util
import sys
from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

# For tokenizers of base models, which have no template of their own.
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"


@dataclass
class Arguments:
    """Model and data."""

    model_name_or_path: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    train_file: str = field(default="", metadata={"help": "JSON lines with `messages`."})
    max_length: int = 512


def main(argv: list[str]) -> Trainer:
    """Train and save; returns the trainer."""
    with_trl = importlib.util.find_spec("trl") is not None
    settings_class = TrainingArguments
    if with_trl:
        from trl import SFTConfig, SFTTrainer

        settings_class = SFTConfig
    parser = HfArgumentParser((Arguments, settings_class), conflict_handler="resolve")
    arguments, training = parser.parse_args_into_dataclasses(argv)
    if not arguments.train_file:
        raise SystemExit("Give --train_file.")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.chat_template = tokenizer.chat_template or TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)
    data = load_dataset("json", data_files=arguments.train_file, split="train")
    if "messages" not in data.column_names:
        raise SystemExit(f"{arguments.train_file} has no `messages`, but {', '.join(data.column_names)}.")
    if with_trl:
        training.max_length = arguments.max_length
        trainer = SFTTrainer(model, args=training, train_dataset=data, processing_class=tokenizer)
    else:
        texts = data.map(lambda row: {"text": tokenizer.apply_chat_template(row["messages"], tokenize=False)})
        tokens = texts.map(
            lambda rows: tokenizer(rows["text"], truncation=True, max_length=arguments.max_length),
            batched=True,
            remove_columns=texts.column_names,
        )
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        trainer = Trainer(
            model, training, train_dataset=tokens, data_collator=collator, processing_class=tokenizer
        )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
