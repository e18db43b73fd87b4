"""One training run of `forge-hf demo`: `python -m forge_hf.hf.demo_worker SPEC.json`.

The run is a process of its own, because only then is peak memory that of this run. It reports on stdout, one
JSON object per line: `{"event": "step"}` while it trains, `{"event": "done"}` with the figures. It writes its
weights before and after to `start.pt` and `end.pt` in the directory that the spec names.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments, set_seed

from .generated import sentences, small_roberta, word_tokenizer
from .memory import unwrapped

__all__ = ["MemoryMeter", "SeamCallback", "train"]

#: RoBERTa's own epsilon. With Adam's usual 1e-8, weights whose gradient is rounding noise (the key biases,
#: which softmax cancels) would still move at full speed, each run in its own direction.
EPSILON = 1e-6


class MemoryMeter:
    """Peak bytes above the level at which it was made: GPU tensors, else resident memory of the process."""

    def __init__(self) -> None:
        """Start to measure."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        try:
            # Linux then forgets the peak of the imports, so that only the training counts.
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pass
        self._before = _resident_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """The peak so far."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() - self._before
        return max(0, _resident_bytes("VmHWM") - self._before)


def _resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process; where the system does not tell, the peak for both."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class SeamCallback(TrainerCallback):
    """Measures each step: its time, and the gradient bytes held at the seam between backward and step."""

    def __init__(self, report: bool = True) -> None:
        """Start with nothing measured; `report` tells the parent process of each step."""
        self.seam_bytes: list[int] = []
        self.step_seconds: list[float] = []
        self._report = report
        self._begin = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._begin = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Count dense gradients and, if the optimizer holds gradients in another form, those."""
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        pending = getattr(unwrapped(optimizer), "pending_bytes", int)()
        self.seam_bytes.append(sum(grad.numel() * grad.element_size() for grad in grads) + pending)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock and tell the parent."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.step_seconds.append(time.perf_counter() - self._begin)
        if self._report:
            _tell({"event": "step", "step": state.global_step})


def _tell(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


def _rows(tokenizer: Any, count: int, seed: int) -> list[dict[str, Any]]:
    texts, labels = sentences(count, seed)
    encoded = tokenizer(texts)
    columns = zip(encoded["input_ids"], encoded["attention_mask"], labels, strict=True)
    return [{"input_ids": ids, "attention_mask": mask, "labels": label} for ids, mask, label in columns]


def _accuracy(output: Any) -> dict[str, float]:
    logits, labels = output
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def _trainer(spec: dict[str, Any], hidden: int, steps: int, callback: SeamCallback) -> Trainer:
    """The stock Trainer; nothing here depends on the optimizer but its name."""
    tokenizer = word_tokenizer()
    set_seed(spec["seed"])
    every = max(1, steps // 20)
    args = TrainingArguments(
        output_dir=str(Path(spec["directory"]) / "trainer"),
        optim=spec["optim"],
        learning_rate=spec["learning_rate"],
        adam_epsilon=EPSILON,
        weight_decay=0.01,
        max_grad_norm=1.0,
        max_steps=steps,
        warmup_steps=max(1, steps // 10),
        per_device_train_batch_size=spec["batch_size"],
        per_device_eval_batch_size=4 * spec["batch_size"],
        logging_steps=every,
        eval_strategy="steps",
        eval_steps=4 * every,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=spec["seed"],
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
    )
    return Trainer(
        model=small_roberta(len(tokenizer), hidden, spec["layers"]),
        args=args,
        train_dataset=_rows(tokenizer, steps * spec["batch_size"], spec["seed"] + 1),
        eval_dataset=_rows(tokenizer, spec["eval_rows"], spec["seed"] + 2),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=_accuracy,
        callbacks=[callback],
    )


def _save_weights(model: torch.nn.Module, path: Path) -> None:
    torch.save({name: value.detach().cpu().clone() for name, value in model.named_parameters()}, path)


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Train as `spec` says and return the figures.

    Args:
        spec: `optim`, `learning_rate`, `steps`, `seed`, `hidden`, `layers`, `batch_size`, `eval_rows`,
            `directory`.
    """
    directory = Path(spec["directory"])
    # A tiny run first loads every module and starts every thread pool, which are not the model's memory.
    _trainer(spec | {"eval_rows": spec["batch_size"]}, 16, 2, SeamCallback(report=False)).train()
    callback = SeamCallback()
    trainer = _trainer(spec, spec["hidden"], spec["steps"], callback)
    _save_weights(trainer.model, directory / "start.pt")
    meter = MemoryMeter()
    begin = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begin
    peak_bytes = meter.peak_bytes()
    accuracy = trainer.evaluate()["eval_accuracy"]
    _save_weights(trainer.model, directory / "end.pt")
    history = trainer.state.log_history
    labels = [row["labels"] for row in trainer.eval_dataset]
    return {
        "optim": spec["optim"],
        "loss": [[entry["step"], entry["loss"]] for entry in history if "loss" in entry],
        "grad_norm": [[entry["step"], entry["grad_norm"]] for entry in history if "grad_norm" in entry],
        "accuracy_curve": [
            [entry["step"], entry["eval_accuracy"]] for entry in history if "eval_accuracy" in entry
        ],
        "accuracy": accuracy,
        "majority": max(sum(labels), len(labels) - sum(labels)) / len(labels),
        "peak_bytes": peak_bytes,
        "seam_bytes": callback.seam_bytes,
        "step_ms": 1000 * median(callback.step_seconds),
        "seconds": seconds,
        "weights": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    }


if __name__ == "__main__":
    _tell({"event": "done", "result": train(json.loads(Path(sys.argv[1]).read_text()))})
