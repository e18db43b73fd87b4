"""forge_hf: optimizers for Hugging Face that consume weight gradients instead of storing them.

`TrainingArguments(optim="forge_adamw")` is all that a Trainer script needs. For other loops:
`ForgeAdamW(model, lr=...)`. Importing this package imports neither transformers nor triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .hf import autoload as _autoload

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .attach import detach
    from .config import ForgeConfig, ForgeConfigError, ForgeRefusal
    from .gradient import FactoredGradient
    from .hf.memory import ForgeMemoryCallback
    from .hf.trainer import ForgeTrainer
    from .optim import (
        ForgeAdamW,
        ForgeGaLoreAdamW,
        ForgeLion,
        ForgeOptimizer,
        ForgeSGD,
        clip_grad_norm_,
        dense_grad,
    )
    from .report import explain

_HOMES = {
    "FactoredGradient": "gradient",
    "ForgeAdamW": "optim",
    "ForgeConfig": "config",
    "ForgeConfigError": "config",
    "ForgeGaLoreAdamW": "optim",
    "ForgeLion": "optim",
    "ForgeMemoryCallback": "hf.memory",
    "ForgeOptimizer": "optim",
    "ForgeRefusal": "config",
    "ForgeSGD": "optim",
    "ForgeTrainer": "hf.trainer",
    "clip_grad_norm_": "optim",
    "dense_grad": "optim",
    "detach": "attach",
    "explain": "report",
}

__all__ = [
    "FactoredGradient",
    "ForgeAdamW",
    "ForgeConfig",
    "ForgeConfigError",
    "ForgeGaLoreAdamW",
    "ForgeLion",
    "ForgeMemoryCallback",
    "ForgeOptimizer",
    "ForgeRefusal",
    "ForgeSGD",
    "ForgeTrainer",
    "clip_grad_norm_",
    "dense_grad",
    "detach",
    "explain",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forge_hf' has no attribute '{name}'")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


_autoload.install()
