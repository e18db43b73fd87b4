"""What the Trainer says about a forge optimizer: a block when training begins, and memory in its logs."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from ..config import refuse
from ..optim import ForgeOptimizer
from ..state import state_bytes
from .registration import forge_name

__all__ = ["ForgeMemoryCallback", "follow", "peak_bytes"]

_logger = logging.get_logger("transformers.forge_hf")


def peak_bytes() -> int:
    """Most bytes in use so far: of tensors on the current GPU, or of the whole process without one.

    0 where neither can be had (Windows without a GPU).
    """
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ImportError:
        return 0
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
    moments, and with `nonfinite="skip"` `forge/skipped_steps` the steps left out. Trainers with an `optim` of
    ours have it by themselves (`log_memory=False` in `optim_args` keeps the keys out); others take it in
    `callbacks`.

    When training begins it says what is fused, and refuses a Trainer that trains with another optimizer than
    the `optim` that was asked for.
    """

    def __init__(self, trainer: str = "") -> None:
        self._pairs_bytes = 0
        # Class that is to make the optimizer of `args.optim`; none where somebody brought one.
        self._trainer = trainer

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Check whose optimizer it is, and say what it does.

        Raises:
            ForgeRefusal: `args.optim` is one of ours and the optimizer is not.
        """
        optimizer = unwrapped(optimizer)
        if isinstance(optimizer, ForgeOptimizer):
            if state.is_world_process_zero:
                _logger.info("***** forge_hf *****\n%s", optimizer.explain())
        elif self._trainer and forge_name(args.optim):
            name = str(getattr(args.optim, "value", args.optim))
            raise refuse("other_optimizer", optim=name, found=type(optimizer).__name__, trainer=self._trainer)

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
        if isinstance(optimizer, ForgeOptimizer) and not optimizer.config.log_memory:
            return
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


def follow(trainer: Any) -> None:
    """Give a Trainer the callback, unless it has one."""
    handler = getattr(trainer, "callback_handler", None)
    if handler is None:  # a Trainer of another kind
        return
    callbacks = handler.callbacks
    if not any(isinstance(callback, ForgeMemoryCallback) for callback in callbacks):
        # First, so that every reporter that comes after it sees the line.
        makes_it = trainer.optimizer is None
        callbacks.insert(0, ForgeMemoryCallback(type(trainer).__name__ if makes_it else ""))
