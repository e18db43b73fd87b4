#!/usr/bin/env python
r"""Fine-tune a sequence classifier on a GLUE task, or on your own file, with the stock Trainer.

    python examples/run_glue.py --model_name_or_path FacebookAI/roberta-base --task_name sst2 \
        --do_train --do_eval --max_seq_length 128 --per_device_train_batch_size 32 --learning_rate 2e-5 \
        --num_train_epochs 3 --warmup_steps 0.06 --optim forge_adamw --output_dir out/sst2

What to expect: the loss, the gradient norm and the learning rate every `--logging_steps` steps, then the
metrics of the task on the development set, printed and saved as `out/sst2/eval_results.json`. The run is the
one that `--optim adamw_torch` gives, up to the order of summation, in less memory.

The data comes from the Hub (`nyu-mll/glue`), or from `--train_file`, `--validation_file` and `--test_file`
(TSV, CSV, JSON or JSON lines, each also .gz). All arguments may also come from one .json or .yaml file, which
is then the only argument.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from glue_data import load_files, load_hub, pick
from glue_tasks import TASKS, DataError, Task, compute_metrics_for, order_labels, task_by_name
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    """Which model to start from."""

    model_name_or_path: str = field(metadata={"help": "Model directory, or model id on the Hub."})
    config_name: str | None = field(default=None, metadata={"help": "Configuration, if not the model's."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer, if not the model's."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloads are kept."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model."})
    token: str | None = field(default=None, metadata={"help": "Access token for private models."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Make a new head if the checkpoint's has other classes."}
    )
    dtype: str = field(
        default="float32",
        metadata={
            "help": "Storage of the weights; bfloat16 trains a pure 16-bit model.",
            "choices": ["auto", "float32", "bfloat16", "float16"],
        },
    )


@dataclass
class DataArguments:
    """Which data to train and evaluate on."""

    task_name: str | None = field(default=None, metadata={"help": f"A GLUE task: {', '.join(TASKS)}."})
    train_file: str | None = field(default=None, metadata={"help": "Local training data."})
    validation_file: str | None = field(default=None, metadata={"help": "Local development data."})
    validation_mismatched_file: str | None = field(
        default=None, metadata={"help": "MNLI's second development set, evaluated besides."}
    )
    test_file: str | None = field(default=None, metadata={"help": "Local data to predict."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer inputs are cut to this many tokens."})
    pad_to_max_length: bool = field(default=False, metadata={"help": "Pad all inputs to max_seq_length."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first rows only."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first rows only."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Predict only the first rows."})

    @property
    def files(self) -> dict[str, str]:
        """The local files by split, the training split first."""
        files = {
            "train": self.train_file,
            "validation": self.validation_file,
            "validation_mismatched": self.validation_mismatched_file,
            "test": self.test_file,
        }
        return {split: path for split, path in files.items() if path}


def parse(argv: list[str] | None) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    """Read the arguments from the command line, or from the one .json or .yaml file that it names."""
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) == 1 and Path(argv[0]).suffix in (".json", ".yaml", ".yml"):
        if not Path(argv[0]).is_file():
            raise DataError(f"{argv[0]}: no such file.")
        read = parser.parse_json_file if argv[0].endswith(".json") else parser.parse_yaml_file
        return read(argv[0])
    return parser.parse_args_into_dataclasses(argv)


def load_data(data_args: DataArguments, model_args: ModelArguments) -> tuple[DatasetDict, Task]:
    """All splits and their task, from the local files if any are given, else from the Hub."""
    task = task_by_name(data_args.task_name) if data_args.task_name else None
    if data_args.files:
        return load_files(data_args.files, task, cache_dir=model_args.cache_dir)
    if task is None:
        raise DataError("Nothing to train on. Give --task_name, or --train_file and --validation_file.")
    return load_hub(task, cache_dir=model_args.cache_dir, token=model_args.token), task


def load_model(model_args: ModelArguments, task: Task) -> tuple[Any, Any, Task, list[str]]:
    """Tokenizer, model, task (labels known now), and the class names in the order of the outputs."""
    hub = {
        "cache_dir": model_args.cache_dir,
        "revision": model_args.model_revision,
        "token": model_args.token,
        "trust_remote_code": model_args.trust_remote_code,
    }
    name = model_args.model_name_or_path
    config = AutoConfig.from_pretrained(model_args.config_name or name, **hub)
    task, labels = order_labels(task, [label for _, label in sorted(config.id2label.items())])
    config.num_labels = len(labels) or 1
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
    config.problem_type = "regression" if task.is_regression else "single_label_classification"
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or name, **hub)
    model = AutoModelForSequenceClassification.from_pretrained(
        name,
        config=config,
        dtype=model_args.dtype,
        ignore_mismatched_sizes=model_args.ignore_mismatched_sizes,
        **hub,
    )
    return tokenizer, model, task, labels


def tokenize(splits: dict[str, Dataset], tokenizer: Any, args: DataArguments) -> dict[str, Dataset]:
    """Replace the texts by token ids; without --pad_to_max_length each batch is padded by the collator."""
    length = min(args.max_seq_length, tokenizer.model_max_length)
    if length < args.max_seq_length:
        logger.warning(
            "max_seq_length %d is more than the model takes; using %d.", args.max_seq_length, length
        )

    def encode(batch):
        texts = [batch[name] for name in ("sentence1", "sentence2") if name in batch]
        padding = "max_length" if args.pad_to_max_length else False
        return tokenizer(*texts, padding=padding, max_length=length, truncation=True)

    return {
        split: rows.map(
            encode, batched=True, remove_columns=[name for name in rows.column_names if name != "label"]
        )
        for split, rows in splits.items()
    }


def checkpoint_to_resume(training_args: TrainingArguments) -> str | None:
    """The checkpoint to resume from; `--resume_from_checkpoint True` means the last one in output_dir."""
    wanted = str(training_args.resume_from_checkpoint or "")
    if wanted.lower() in ("", "false"):
        return None
    found: str | None = wanted
    if wanted.lower() == "true":
        output_dir = training_args.output_dir
        found = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
    if not found or not Path(found).is_dir():
        where = found or training_args.output_dir
        raise DataError(f"--resume_from_checkpoint {wanted}: there is no checkpoint in {where}.")
    return found


def evaluate(trainer: Trainer, splits: dict[str, Dataset]) -> dict[str, float]:
    """Metrics of every development set; those of MNLI's mismatched one end in `_mm`."""
    metrics: dict[str, float] = {}
    for name, rows in splits.items():
        suffix = "_mm" if name.endswith("mismatched") else ""
        result = trainer.evaluate(rows) | {"eval_samples": len(rows)}
        metrics |= {key if key == "epoch" else key + suffix: value for key, value in result.items()}
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    return metrics


def predict(trainer: Trainer, splits: dict[str, Dataset], task: Task, labels: list[str]) -> None:
    """Write `predict_results_<split>.tsv` (index, prediction) for each test set."""
    for split, rows in splits.items():
        logits = trainer.predict(rows).predictions
        logits = logits[0] if isinstance(logits, tuple) else logits
        values = (
            [f"{score:.3f}" for score in logits.squeeze(-1)]
            if task.is_regression
            else ([labels[number] for number in logits.argmax(-1)])
        )
        if trainer.is_world_process_zero():
            lines = ["index\tprediction", *(f"{index}\t{value}" for index, value in enumerate(values))]
            path = Path(trainer.args.output_dir) / f"predict_results_{split}.tsv"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run what `--do_train`, `--do_eval` and `--do_predict` ask for; return the last metrics."""
    model_args, data_args, training_args = parse(argv)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    checkpoint = checkpoint_to_resume(training_args)
    set_seed(training_args.seed)

    with training_args.main_process_first(desc="loading the data"):
        data, task = load_data(data_args, model_args)
    splits: dict[str, Dataset] = {}
    if training_args.do_train:
        splits |= pick(data, "train", data_args.max_train_samples)
    if training_args.do_eval:
        splits |= pick(data, "validation", data_args.max_eval_samples)
    if training_args.do_predict:
        splits |= pick(data, "test", data_args.max_predict_samples)
    if not splits:
        raise DataError("Nothing to do. Give --do_train, --do_eval or --do_predict.")
    tokenizer, model, task, labels = load_model(model_args, task)
    reordered = labels != list(task.labels or ())
    if reordered:
        numbers = {label: index for index, label in enumerate(labels)}
        for split in splits.keys() - {name for name in splits if name.startswith("test")}:
            splits[split] = splits[split].align_labels_with_mapping(numbers, "label")
    with training_args.main_process_first(desc="tokenizing"):
        splits = tokenize(splits, tokenizer, data_args)
    evaluation = {name: rows for name, rows in splits.items() if name.startswith("validation")}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=splits.get("train"),
        eval_dataset=next(iter(evaluation.values()), None),
        processing_class=tokenizer,
        data_collator=default_data_collator
        if data_args.pad_to_max_length
        else DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics_for(task, labels if reordered else ()),
    )
    metrics: dict[str, float] = {}
    if training_args.do_train:
        metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics | {
            "train_samples": len(splits["train"])
        }
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = evaluate(trainer, evaluation)
    if training_args.do_predict:
        predict(trainer, {n: rows for n, rows in splits.items() if n.startswith("test")}, task, labels)
    return metrics


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(f"run_glue: error: {error}")
