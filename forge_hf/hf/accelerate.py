"""What accelerate has to know: which micro-batch is the last, who trains a weight, and what cannot be exact.

`Accelerator.clip_grad_norm_` needs nothing here: it calls torch.nn.utils.clip_grad_norm_, which `guards.py`
makes exact.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ..config import refuse
from .autoload import deferred_hook

__all__ = ["connect_engine", "extend_accelerator", "last_micro_batch"]

#: DistributedType -> refusal. Megatron-LM always means several processes.
_REFUSED_TYPES = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp", "XLA": "xla", "MEGATRON_LM": "ddp"}


def last_micro_batch() -> bool:
    """Whether the running micro-batch is the last of its accumulation group, as accelerate knows it."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return True if state is None else bool(state().sync_gradients)


def connect_engine(optim: Any) -> None:
    """Post-import hook of `forge_hf.optim`: introduce the engine and accelerate to each other."""
    optim.set_last_micro_batch_probe(last_micro_batch)
    from wrapt import register_post_import_hook

    register_post_import_hook(deferred_hook(__name__, "extend_accelerator"), "accelerate.accelerator")


def extend_accelerator(module: Any) -> None:
    """Post-import hook of `accelerate.accelerator`: look at every optimizer before it is prepared.

    A changed layout leaves accelerate as it is: an engine without this still refuses FSDP and DDP by itself.
    """
    accelerator = getattr(module, "Accelerator", None)
    for name in ("prepare", "prepare_optimizer"):
        original = getattr(accelerator, name, None)
        if original is not None and not hasattr(original, "_forge_hf"):
            setattr(accelerator, name, _looking_first(original))


def _looking_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        from torch.optim import Optimizer

        for value in (*args, *kwargs.values()):
            if isinstance(value, Optimizer):
                _look_at(self, value)
        return original(self, *args, **kwargs)

    wrapper._forge_hf = True  # type: ignore[attr-defined]
    return wrapper


def _look_at(accelerator: Any, optimizer: Any) -> None:
    """Refuse what one of ours cannot do exactly; give any other optimizer's weights their gradients back."""
    from ..attach import release
    from ..optim import ForgeOptimizer

    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, ForgeOptimizer):
        release(parameter for group in getattr(inner, "param_groups", ()) for parameter in group["params"])
        return
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if kind in _REFUSED_TYPES or accelerator.num_processes > 1:
        raise refuse(_REFUSED_TYPES.get(kind, "ddp"), world_size=accelerator.num_processes)
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    if getattr(getattr(plugin, "backend", None), "value", "NO") != "NO":
        raise refuse("torch_compile")
    if accelerator.mixed_precision == "fp16" and inner.update_mode == "backward":
        raise refuse("scaler_in_backward")
