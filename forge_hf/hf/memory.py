"""A memory line in the Trainer's logs: peak, gradients held between backward and step, moments; in bytes."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch
from transformers import TrainerCallback

from ..optim import ForgeOptimizer
from ..state import state_bytes

__all__ = ["ForgeMemoryCallback", "peak_bytes"]


def peak_bytes() -> int:
    """Most bytes in use so far: of tensors on the current GPU, or of the whole process without one."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


class ForgeMemoryCallback(TrainerCallback):
    """Adds `forge/peak_bytes`, `forge/pairs_bytes` and `forge/state_bytes` to every training log.

    `forge/peak_bytes` is the most memory so far, `forge/pairs_bytes` the most bytes of gradients that the
    optimizer held before a step since the last log (0 with another optimizer), `forge/state_bytes` its
    moments. `ForgeTrainer` brings the callback; a stock Trainer takes it in `callbacks`.
    """

    def __init__(self) -> None:
        self._pairs_bytes = 0

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Measure at the seam between backward and step, where most gradients are alive."""
        optimizer = unwrapped(optimizer)
        if isinstance(optimizer, ForgeOptimizer):
            self._pairs_bytes = max(self._pairs_bytes, optimizer.pending_bytes())

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Extend the logs of training steps, and their entry in the history; evaluation metrics stay."""
        if logs is None or "loss" not in logs:
            return
        optimizer = unwrapped(optimizer)
        line = {
            "forge/peak_bytes": peak_bytes(),
            "forge/pairs_bytes": self._pairs_bytes,
            "forge/state_bytes": state_bytes(getattr(optimizer, "state", {})),
        }
        if isinstance(optimizer, ForgeOptimizer) and optimizer.config.nonfinite == "skip":
            line["forge/skipped_steps"] = optimizer.skipped_steps
        self._pairs_bytes = 0
        logs.update(line)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(line)
