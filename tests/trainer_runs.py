"""Whole runs through the stock Trainer on tiny models, and how far apart two of them end."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from tests.compatibility import measured

VOCABULARY, LENGTH = 64, 12


def tiny_llama(dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Two-layer Llama with grouped-query attention and an untied head."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=dropout,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(dtype)


def tiny_roberta(
    dropout: float = 0.0, dtype: torch.dtype = torch.float32
) -> RobertaForSequenceClassification:
    """Two-layer RoBERTa classifier with three labels."""
    torch.manual_seed(1)
    config = RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH + 4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=3,
    )
    return RobertaForSequenceClassification(config).to(dtype)


MODELS = {"llama": tiny_llama, "roberta": tiny_roberta}


class Tokens(Dataset):
    """Random token sequences of one length; labels fit the model."""

    def __init__(self, kind: str, count: int = 40) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(4, VOCABULARY, (count, LENGTH), generator=generator)
        self.classes = torch.randint(0, 3, (count,), generator=generator)
        self.kind = kind

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.ids[index] if self.kind == "llama" else self.classes[index]
        return {
            "input_ids": self.ids[index],
            "attention_mask": torch.ones(LENGTH, dtype=torch.long),
            "labels": labels,
        }


@dataclass
class Run:
    """End state and logs of one run."""

    start: torch.Tensor
    end: torch.Tensor
    logs: list[dict]
    trainer: Trainer
    evaluations: list[dict] = field(default_factory=list)

    def logged(self, key: str) -> list[float]:
        """Values of one key of the step logs."""
        return [entry[key] for entry in self.logs if key in entry]


def flat(model: torch.nn.Module) -> torch.Tensor:
    """All parameters as one float64 vector."""
    return torch.cat([parameter.detach().double().flatten().cpu() for parameter in model.parameters()])


def arguments(output_dir: str, optim: str, **changes: object) -> TrainingArguments:
    """Trainer defaults (clipping at 1.0, linear schedule) with a rate at which tiny models move."""
    settings: dict = {
        "per_device_train_batch_size": 4,
        "learning_rate": 2e-3,
        "max_steps": 8,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True,
        "seed": 7,
    }
    return TrainingArguments(output_dir=output_dir, optim=optim, **{**settings, **changes})


def train(
    output_dir: object,
    kind: str,
    optim: str,
    *,
    trainer_cls: type[Trainer] = Trainer,
    trainer_options: dict | None = None,
    model: torch.nn.Module | None = None,
    resume: object = None,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    **changes: object,
) -> Run:
    """Train a tiny model and return where it started, where it ended and what was logged."""
    model = MODELS[kind](dropout, dtype) if model is None else model
    start = flat(model)
    trainer = trainer_cls(
        model=model,
        args=arguments(str(output_dir), optim, **changes),
        train_dataset=Tokens(kind),
        eval_dataset=Tokens(kind, 8),
        **(trainer_options or {}),
    )
    trainer.train(resume_from_checkpoint=resume)
    logs = trainer.state.log_history
    return Run(
        start,
        flat(trainer.model),
        [e for e in logs if "loss" in e],
        trainer,
        [e for e in logs if "eval_loss" in e],
    )


def distance(run: Run, baseline: Run) -> float:
    """Distance of the end points as a fraction of the way that the baseline travelled."""
    way = (baseline.end - baseline.start).norm()
    assert way > 0, "the baseline did not move, so the comparison would be empty"
    return measured(float((run.end - baseline.end).norm() / way))
