"""ForgeTrainer: the Trainer with a forge optimizer, its report, and a memory line in the logs."""

from __future__ import annotations

import copy
import logging
from typing import Any

from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from ..config import ForgeConfigError
from ..optim import ForgeOptimizer
from .memory import follow, unwrapped
from .registration import FORGE_OPTIMIZERS, forge_name, require_layout

__all__ = ["ForgeTrainer"]

_logger = logging.getLogger("forge_hf")
_REPLACED = ("adamw_torch", "adamw_torch_fused")


class ForgeTrainer(Trainer):
    """The stock Trainer whose AdamW is `forge_adamw`; takes the same arguments.

    `optim` may be one of ours, or torch's AdamW (the default of TrainingArguments), which is replaced by
    `forge_adamw` on a copy of the arguments. A stock Trainer with `optim="forge_adamw"` does
    the same.

    Raises:
        ForgeConfigError: `optim` names, or `optimizers` holds, an optimizer of somebody else.
    """

    args: TrainingArguments

    def __init__(
        self, model: Any = None, args: TrainingArguments | None = None, *rest: Any, **kwargs: Any
    ) -> None:
        require_layout()
        super().__init__(model, args, *rest, **kwargs)
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            self.args = _with_forge_optimizer(self.args)
        elif not self._brings_a_forge_optimizer():
            raise ForgeConfigError(
                "ForgeTrainer trains with a forge optimizer. Leave `optimizers` out, or use Trainer."
            )
        follow(self)

    def _brings_a_forge_optimizer(self) -> bool:
        if self.optimizer is not None:
            return isinstance(unwrapped(self.optimizer), ForgeOptimizer)
        cls = self.optimizer_cls_and_kwargs[0]
        return isinstance(cls, type) and issubclass(cls, ForgeOptimizer)

    def explain(self) -> str:
        """Which parameter takes which path and why; creates the optimizer if there is none yet."""
        if self.optimizer is None:
            self.create_optimizer()
        return str(unwrapped(self.optimizer).explain())


def _with_forge_optimizer(args: TrainingArguments) -> TrainingArguments:
    name = str(getattr(args.optim, "value", args.optim))
    if forge_name(name):
        return args
    if name not in _REPLACED:
        valid = ", ".join([*FORGE_OPTIMIZERS, *_REPLACED])
        raise ForgeConfigError(f"ForgeTrainer cannot train with optim='{name}'. Valid: {valid}.")
    args = copy.copy(args)
    args.optim = OptimizerNames("forge_adamw")
    _logger.info("ForgeTrainer: optim='%s' is replaced by 'forge_adamw'.", name)
    return args
