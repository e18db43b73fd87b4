"""The optimizers by name, clipping and dense gradients: what users construct and call.

`ForgeAdamW`, `ForgeLion` and `ForgeSGD` differ in their rule and its settings only; `optimizer.py` holds what
they share.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .galore import ForgeGaLoreAdamW
from .optimizer import ForgeOptimizer
from .rules import ADAMW, LION, SGD
from .tape import set_last_micro_batch_probe

__all__ = [
    "ForgeAdamW",
    "ForgeGaLoreAdamW",
    "ForgeLion",
    "ForgeOptimizer",
    "ForgeSGD",
    "clip_grad_norm_",
    "dense_grad",
    "set_last_micro_batch_probe",
]


class ForgeAdamW(ForgeOptimizer):
    """AdamW (Loshchilov and Hutter 2019) on factored gradients; the update of torch.optim.AdamW.

    Args:
        params: The model, or param groups together with `attach_to`.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        attach_to: The model, when `params` are groups.
        **options: Fields of `ForgeConfig`: update, clip, state, rounding, seed.
    """

    rule = ADAMW

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        attach_to: nn.Module | None = None,
        **options: Any,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings, attach_to, options)


class ForgeLion(ForgeOptimizer):
    """Lion (Chen et al. 2023, Algorithm 2) on factored gradients.

    Args:
        params: The model, or param groups together with `attach_to`.
        lr: Learning rate; Lion wants one 3 to 10 times smaller than AdamW's.
        betas: Interpolation factors of the update and of the momentum.
        weight_decay: Decoupled weight decay.
        attach_to: The model, when `params` are groups.
        **options: Fields of `ForgeConfig`.
    """

    rule = LION

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        attach_to: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, attach_to, options)


class ForgeSGD(ForgeOptimizer):
    """SGD with optional momentum on factored gradients; the update of torch.optim.SGD with dampening 0.

    Args:
        params: The model, or param groups together with `attach_to`.
        lr: Learning rate.
        momentum: Momentum factor; 0 keeps no state.
        weight_decay: L2 penalty, added to the gradient as in torch.
        nesterov: Nesterov momentum.
        attach_to: The model, when `params` are groups.
        **options: Fields of `ForgeConfig`.
    """

    rule = SGD

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        attach_to: nn.Module | None = None,
        **options: Any,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, settings, attach_to, options)


def clip_grad_norm_(
    optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip all gradients of `optimizer`, pairs included, by their joint 2-norm.

    Equation: c = min(1, max_norm / (||g|| + 1e-6)), as in torch.nn.utils.clip_grad_norm_.

    Args:
        optimizer: A forge optimizer, or accelerate's wrapper around one.
        max_norm: Upper bound of the norm; `inf` only measures.
        norm_type: Must be 2.
        error_if_nonfinite: Raise when the norm is not finite.

    Returns:
        0-d fp32 tensor: the norm before clipping.

    Raises:
        ForgeRefusal: another norm type, or the updates already ran (`update="backward"`) and `max_norm` is
            finite.
        TypeError: `optimizer` is not a forge optimizer.
    """
    return _unwrapped(optimizer, "clip_grad_norm_").clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)


def dense_grad(optimizer: Any, parameter: Tensor) -> Tensor | None:
    """The gradient that `parameter.grad` would hold now, built from what is held; nothing is used up.

    Clipped if it was clipped, unscaled if it was unscaled.

    Args:
        optimizer: A forge optimizer, or accelerate's wrapper around one.
        parameter: One of its parameters.

    Returns:
        A new tensor of the parameter's shape and dtype, `parameter.grad` itself where the parameter is on the
        ordinary path, or None where there is no gradient.

    Raises:
        ForgeRefusal: the gradient was used up by the update (`update="backward"`, or after `step()`), only
            its projection is left (GaLore), or the parameter is not the optimizer's.
        TypeError: `optimizer` is not a forge optimizer.
    """
    return _unwrapped(optimizer, "dense_grad").dense_grad(parameter)


def _unwrapped(optimizer: Any, caller: str) -> ForgeOptimizer:
    while not isinstance(optimizer, ForgeOptimizer) and isinstance(
        getattr(optimizer, "optimizer", None), Optimizer
    ):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, ForgeOptimizer):
        raise TypeError(f"{caller} takes a forge optimizer, not {type(optimizer).__name__}.")
    return optimizer
