"""Linear layers that hand their weight gradient's factors to a receiver instead of building it.

What every swapped layer shares is here too; `embedding.py` holds the other kind.

    forward    Y = X W^T + b                        as nn.Linear
    backward   dX = dY W  (first, from the old W);  receiver.receive(dY, X);  db = sum_t dY;  no dW

A layer with a weight (K, N), as transformers' Conv1D, computes Y = X W + b; its gradient X^T dY is the same
with the pair's two sides exchanged.

The layer keeps its Parameter, its state_dict keys and its stock class name in pickles; only `forward`
differs. It knows no optimizer: a `Receiver` decides what becomes of the pair. Whenever the pair path would
not be exact (gradient hooks on the weight, functional calls, tracing, `torch.autograd.grad` for the weight)
the layer behaves as nn.Linear does.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import refuse

__all__ = [
    "ForgeLinear",
    "Receiver",
    "Swapped",
    "SwappedLinear",
    "deliver",
    "in_backward",
    "plain_kinds",
    "receiver_of",
    "register_swap",
    "restore_class_",
    "stock_class",
    "swap_class_",
]

_RECEIVER = "_forge_receiver"


class Receiver(Protocol):
    """What a layer needs from whoever consumes its gradient."""

    parameter: nn.Parameter

    def active(self) -> bool:
        """Whether pairs are still wanted."""

    def expect(self) -> None:
        """A use of the weight was seen whose backward may follow."""

    def open_forward(self) -> None:
        """Called in every forward before the weight is read.

        Raises:
            ForgeRefusal: the weight was already updated in this step.
        """

    def open_backward(self) -> None:
        """Called in backward before the weight is read.

        Raises:
            ForgeRefusal: the weight was already updated in this step.
        """

    def receive(self, dy_TN: Tensor, x_TK: Tensor, borrowed: bool, exchanged: bool) -> None:
        """Take the pair; the weight may be updated now.

        Args:
            dy_TN: Gradient of the output.
            x_TK: The input.
            borrowed: x belongs to the caller of the model.
            exchanged: The gradient is X^T dY, of a weight (K, N).
        """

    def receive_lookup(self, ids_T: Tensor, dy_TK: Tensor) -> None:
        """Take what an embedding's rows `ids_T` (its own copy, -1: none) are owed; as `receive` otherwise."""

    def receive_elsewhere(self) -> None:
        """An expected use gave its gradient to autograd instead, or has none."""

    def hand_over(self) -> None:
        """Put what is held into `.grad`, where a hook will look for the whole gradient."""


def in_backward() -> bool:
    """Whether this thread runs inside autograd's backward, as a checkpoint's recomputation does."""
    return torch._C._current_graph_task_id() != -1


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    if not torch._C._is_any_autocast_enabled():
        return None
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return None


def _weight_gradient_goes_to(ctx: Any) -> str:
    """Who wants dW in this backward: "grad", "nobody", or "caller" (`torch.autograd.grad`)."""
    accumulator = ctx.next_functions[1][0]
    if accumulator is None:
        return "nobody"
    try:
        return "grad" if torch._C._will_engine_execute_node(accumulator) else "nobody"
    except RuntimeError:  # torch refuses to say for a leaf whose gradient autograd.grad() captures
        return "caller"


class _ForgeLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, receiver: Receiver, exchanged: bool
    ) -> Tensor:
        ctx.receiver = receiver
        ctx.exchanged = exchanged
        ctx.compute_dtype = _autocast_dtype(x)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.x_dtype = x.dtype
        # No operation made x, so its owner may fill it anew, past the version counter (numpy, `.data`).
        ctx.borrowed = x.is_leaf and ctx.compute_dtype in (None, x.dtype)
        # Without grad an undefined dY would become zeros, and zeros are a gradient: decay, moments, a step.
        ctx.set_materialize_grads(False)
        if ctx.compute_dtype is not None:
            # Cast here, past autocast's weight cache: a cached copy made without grad would cut off other
            # users of W.
            x = x.to(ctx.compute_dtype)
            bias = None if bias is None else bias.to(ctx.compute_dtype)
        # As torch: W is needed, and its version checked, for dX only.
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        weight = weight if ctx.compute_dtype is None else weight.to(ctx.compute_dtype)
        y = F.linear(x, weight.t() if exchanged else weight, bias)
        # Of a batch F.linear returns a view; autograd forbids in-place operations (a ReLU) on views made in
        # here.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        receiver: Receiver = ctx.receiver
        if dy is None:
            receiver.receive_elsewhere()
            return None, None, None, None, None
        receiver.open_backward()
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled() and ctx.compute_dtype is not None:
            raise refuse("double_backward")
        dy_TN = _flat(dy)
        dx = db = None
        needs_dx, _, needs_db, _, _ = ctx.needs_input_grad
        if needs_dx:
            weight = weight if ctx.compute_dtype is None else weight.to(ctx.compute_dtype)
            dx = dy_TN @ (weight.t() if ctx.exchanged else weight)
            if x.ndim != 2:
                dx = dx.reshape(x.shape)
            if dx.dtype != ctx.x_dtype:
                dx = dx.to(ctx.x_dtype)
        if needs_db:
            db = dy_TN.sum(0, dtype=torch.float32 if dy.dtype != torch.float64 else None).to(ctx.bias_dtype)
        x_TK = _flat(x)
        dw = deliver(
            ctx,
            receiver,
            lambda: receiver.receive(dy_TN, x_TK, ctx.borrowed, ctx.exchanged),
            lambda: (x_TK.t() @ dy_TN if ctx.exchanged else dy_TN.t() @ x_TK).to(receiver.parameter.dtype),
        )
        return dx, dw, db, None, None


def _flat(tensor: Tensor) -> Tensor:
    """All tokens in one dimension: (..., F) as (T, F)."""
    return tensor if tensor.ndim == 2 else tensor.reshape(-1, tensor.shape[-1])


def deliver(
    ctx: Any, receiver: Receiver, give: Callable[[], None], build: Callable[[], Tensor]
) -> Tensor | None:
    """Give the factors to the receiver, or return dW where autograd itself must have it.

    Args:
        ctx: Of a function whose second tensor argument is the weight.
        receiver: Who owns the weight's gradient.
        give: Hands the factors to it.
        build: Makes dW.
    """
    wanted_by = _weight_gradient_goes_to(ctx)
    if wanted_by == "nobody":
        return None
    if (
        wanted_by == "caller"
        or torch.is_grad_enabled()
        or not (receiver.active() and _is_plain(receiver.parameter))
    ):
        if wanted_by == "grad":
            receiver.receive_elsewhere()
            _hand_over_to_hooks(receiver)
        return build()
    give()
    return None


class Swapped(nn.Module):
    """A layer whose weight gradient goes to a receiver; mixed into the stock layer's class."""

    weight: Tensor

    def _open_forward(self) -> Receiver | None:
        """Count this use of the weight; returns the receiver where the layer must run its own function."""
        receiver: Receiver | None = self.__dict__.get(_RECEIVER)
        if receiver is None:
            return None
        # Another tensor, or None, where something replaced the weight.
        weight = self._parameters.get("weight")
        if not _pair_path_is_exact(receiver, weight):
            if not torch.compiler.is_compiling() and weight is receiver.parameter:
                _hand_over_to_hooks(receiver)
            return None
        receiver.open_forward()
        if not torch.is_grad_enabled():
            # Reentrant checkpointing runs the forward without grad and comes back in backward.
            if self.training and not in_backward():
                receiver.expect()
            return None
        if not in_backward():
            receiver.expect()
        return receiver

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deep-copy as the stock layer: a copy has no optimizer, and loads without forge_hf."""
        state = {key: value for key, value in self.__dict__.items() if key != _RECEIVER}
        # pickle refuses __newobj__ for a class other than the object's own.
        return (copyreg._reconstructor, (stock_class(type(self)), object, None), state)  # type: ignore[attr-defined]


class SwappedLinear(Swapped):
    """A swapped layer that multiplies by its weight; `exchanged` says that the weight is (K, N)."""

    exchanged = False

    def forward(self, input: Tensor) -> Tensor:
        """Y = X W^T + b for an input X of shape (..., K), or X W + b; returns (..., N)."""
        receiver = self._open_forward() if input.layout is torch.strided else None
        if receiver is None:
            return super().forward(input)  # type: ignore[no-any-return, misc]
        bias = self._parameters["bias"] if "bias" in self._parameters else self.bias
        return _ForgeLinearFunction.apply(input, receiver.parameter, bias, receiver, self.exchanged)


class ForgeLinear(SwappedLinear, nn.Linear):
    """nn.Linear whose weight gradient goes to a receiver as the pair (dY, X).

    Made by `swap_class_` from an existing layer; not meant to be constructed.
    """


def _is_plain(weight: Tensor) -> bool:
    """Whether only the optimizer looks at the gradient; hooks may come after forward, too."""
    return weight.requires_grad and not weight._backward_hooks and not weight._post_accumulate_grad_hooks


def _hand_over_to_hooks(receiver: Receiver) -> None:
    # They see the sum of all micro-batches, of which some may be held since before the hook was registered.
    if receiver.parameter._post_accumulate_grad_hooks:
        receiver.hand_over()


def _pair_path_is_exact(receiver: Receiver, weight: Tensor | None) -> bool:
    return (
        weight is receiver.parameter
        and _is_plain(receiver.parameter)
        and receiver.active()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
    )


# Stock class -> the class that stands in for it; subclasses are added when they are first seen.
_SWAPPED: dict[type[nn.Module], type[nn.Module]] = {}
_KINDS: dict[type[nn.Module], type[Swapped]] = {}


def register_swap(stock: type[nn.Module], swapped: type[Swapped]) -> None:
    """Let `swap_class_` turn `stock` and its subclasses into `swapped`, a subclass of `stock`."""
    _SWAPPED[stock] = _KINDS[stock] = swapped


register_swap(nn.Linear, ForgeLinear)


def plain_kinds() -> tuple[type[nn.Module], ...]:
    """Stock layers that can be swapped."""
    return tuple(_KINDS)


def stock_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a swapped class stands for."""
    for stock, swapped in _SWAPPED.items():
        if swapped is cls:
            return stock
    return cls


def swap_class_(module: nn.Module, receiver: Receiver) -> None:
    """Make `module` hand its pairs to `receiver`; a second call replaces the receiver."""
    cls = stock_class(type(module))
    if cls not in _SWAPPED:
        stock, kind = next((stock, kind) for stock, kind in _KINDS.items() if issubclass(cls, stock))
        # A forward of its own runs first, and reaches ours where it calls super().forward().
        bases = (kind, cls) if cls.forward is stock.forward else (cls, kind)
        _SWAPPED[cls] = type(cls.__name__, bases, {"__module__": __name__, "__doc__": cls.__doc__})
    module.__class__ = _SWAPPED[cls]
    module.__dict__[_RECEIVER] = receiver


def restore_class_(module: nn.Module) -> None:
    """Undo `swap_class_`; does nothing to other modules."""
    module.__dict__.pop(_RECEIVER, None)
    cls = stock_class(type(module))
    if cls is not type(module):
        module.__class__ = cls


def receiver_of(module: nn.Module) -> Receiver | None:
    """The receiver of a swapped layer, or None."""
    return module.__dict__.get(_RECEIVER)
