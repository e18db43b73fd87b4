"""torch functions that look at `.grad`, made aware of gradients that have none.

Installed when the first model is attached. Each wrapper calls the original at once when no attached weight is
involved.

    torch.nn.utils.clip_grad_norm_      exact (also when called by accelerate and the Trainer)
    a copy of it imported earlier       raises where it would clip only part of the gradients
    torch.nn.utils.clip_grad_value_     raises
    nn.Module.zero_grad                 drops pending gradients of the module's weights
    GradScaler (unscale_, step)         unscales pending gradients and checks them for inf
    another optimizer's step()          raises when it would skip weights whose gradients are held here
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .config import refuse
from .gradient import FactoredGradient, norms_sq, scale_all_
from .slot import WeightSlot, live_slots, slot_of

__all__ = ["clip_slots_and_grads_", "install"]


def clip_slots_and_grads_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the gradients of `parameters`, held as pairs or in `.grad`, by their joint 2-norm.

    Args:
        parameters: Parameters; those without a gradient are skipped.
        max_norm: Upper bound of the norm; `inf` only measures.
        norm_type: Must be 2.
        error_if_nonfinite: Raise when the norm is not finite.

    Returns:
        0-d fp32 tensor: the norm before clipping; NaN for `inf` where a `measure_norm=False` gave it up.

    Raises:
        ForgeRefusal: another norm, or a finite `max_norm` where the norm was given up or the updates already
            ran (`update="backward"`), or `step()` used the gradients up.
        RuntimeError: the norm is not finite and `error_if_nonfinite`.
    """
    parameters = list(parameters)
    if float(norm_type) != 2.0:
        raise refuse("norm_type", norm_type=norm_type)
    slots = live_slots(parameters)
    for tape in {id(slot.tape): slot.tape for slot in slots}.values():
        tape.require_usable()
    used_up = [slot for slot in slots if slot.stale]
    if used_up:
        raise refuse("used_up", param=used_up[0].name)
    unmeasured = [slot for slot in slots if slot.unmeasured()]
    if unmeasured and max_norm == float("inf"):
        return torch.tensor(float("nan"), device=unmeasured[0].parameter.device)
    if unmeasured:
        raise refuse("norm_not_measured", param=unmeasured[0].name)
    squares, applied = _slot_norms(slots)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = list(torch._foreach_norm(grads, 2, dtype=torch.float32)) if grads else []
    if not squares and not norms:
        return torch.tensor(0.0)
    device = (squares or norms)[0].device
    parts = [vector.to(device) for vector in squares]
    parts += [_stacked(norms, device).square()] if norms else []
    total_norm = torch.cat(parts).sum().sqrt()
    if error_if_nonfinite and not torch.isfinite(total_norm):
        raise RuntimeError(
            f"The total norm of the gradients is {total_norm.item()}, so it cannot be clipped."
        )
    if max_norm == float("inf"):
        return total_norm
    if applied and not all(slot.tape.lagged for slot in applied):
        raise refuse("clip_in_backward", max_norm=max_norm)
    exact = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    lagged = {id(slot.tape): slot.tape for slot in slots if slot.tape.lagged}
    used = {key: tape.exchange_lagged(exact) for key, tape in lagged.items()}
    held: defaultdict[int, list[FactoredGradient]] = defaultdict(list)
    for slot in slots:
        if slot.gradient is not None:
            held[id(slot.tape)].append(slot.gradient)
    for tape_id, gradients in held.items():
        scale_all_(gradients, used.get(tape_id, exact))
    coefficient = next(iter(used.values()), exact)
    for grad in grads:
        grad.mul_(coefficient if coefficient.device == grad.device else coefficient.to(grad.device))
    return total_norm


def _stacked(scalars: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack([scalar if scalar.device == device else scalar.to(device) for scalar in scalars])


def _slot_norms(slots: list[WeightSlot]) -> tuple[list[Tensor], list[WeightSlot]]:
    """Squared norms of all gradients of this step, in vectors, and the slots that were already applied."""
    for slot in slots:
        slot.merge_dense()
    squares = norms_sq([slot.gradient for slot in slots if slot.gradient is not None])
    applied = [slot for slot in slots if slot.norm_sq is not None]
    consumed = [slot.norm_sq for slot in applied if slot.norm_sq is not None]
    squares += [square for square in consumed if square.ndim]
    single = [square for square in consumed if not square.ndim]
    if single:
        squares.append(_stacked(single, single[0].device))
    return squares, applied


def _involved(parameters: Any) -> list[WeightSlot]:
    tensors = [parameters] if isinstance(parameters, Tensor) else parameters
    return [slot for slot in live_slots(tensors) if slot.involved()]


def _wrap_clip_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not any(slot is not None and slot.involved() for slot in map(slot_of, tensors)):
            return original(tensors, max_norm, norm_type, error_if_nonfinite, foreach)
        with torch.no_grad():
            return clip_slots_and_grads_(tensors, max_norm, norm_type, error_if_nonfinite)

    return clip_grad_norm_


def _wrap_refusing(original: Callable[..., Any], key: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = parameters if isinstance(parameters, Tensor) else list(parameters)
        slots = _involved(tensors)
        if slots:
            raise refuse(key, count=len(slots))
        return original(tensors, *args, **kwargs)

    return wrapper


def _refuse_in_place(original: Callable[..., Any], key: str) -> None:
    """Guard a function that torch wraps in its no-grad decorator, copies imported earlier included.

    They are the same object, so the cell that holds the decorated function is replaced.
    """
    decorated: Any = getattr(original, "__wrapped__", None)
    for cell in original.__closure__ or ():
        if cell.cell_contents is decorated:
            cell.cell_contents = _wrap_refusing(decorated, key)


def _wrap_zero_grad(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        slots = live_slots(self.parameters())
        for tape in {id(slot.tape): slot.tape for slot in slots}.values():
            tape.zero_grad([slot for slot in slots if slot.tape is tape], set_to_none)

    return zero_grad


def _wrap_unscale(original: Callable[..., dict[Any, Tensor]]) -> Callable[..., dict[Any, Tensor]]:
    @functools.wraps(original)
    def _unscale_grads_(
        self: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[Any, Tensor]:
        unscale = getattr(optimizer, "unscale_held_", None)
        if unscale is None:
            return original(self, optimizer, inv_scale, found_inf, allow_fp16)
        # Each part on its own: what is in `.grad` joins the held gradient later, when both are unscaled.
        return unscale(inv_scale, original(self, optimizer, inv_scale, found_inf, allow_fp16))

    return _unscale_grads_


def _refuse_foreign_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "unscale_held_", None) is not None:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    slots = _involved(parameters)
    if slots:
        raise refuse("foreign_step", optimizer=type(optimizer).__name__, count=len(slots))


@functools.cache
def install() -> None:
    """Install the wrappers, once."""
    exact = _wrap_clip_norm(clip_grad.clip_grad_norm_)
    clip_grad.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ = exact
    _refuse_in_place(clip_grad.clip_grad_value_, "clip_value")
    # The half of clip_grad_norm_ that scales: a copy of the original, imported before this, looks it up here.
    scale = _wrap_refusing(clip_grad._clip_grads_with_norm_, "partial_clip")
    clip_grad._clip_grads_with_norm_ = torch.nn.utils.clip_grads_with_norm_ = scale
    nn.Module.zero_grad = _wrap_zero_grad(nn.Module.zero_grad)  # type: ignore[method-assign]
    torch.amp.GradScaler._unscale_grads_ = _wrap_unscale(torch.amp.GradScaler._unscale_grads_)  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(_refuse_foreign_step)
