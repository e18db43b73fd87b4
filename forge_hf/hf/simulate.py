"""Memory of one forward and backward, found by running them on fake tensors: no weights, no GPU.

Every operation runs with shapes only (torch's FakeTensorMode; autocast works as with real tensors). A
dispatch mode counts the bytes of each storage from the operation that makes it to the moment when nothing
refers to it any more, as the GPU's allocator would. Attention counts as a fused kernel: it saves its inputs,
its output and one fp32 number per query and head.

Not seen: what kernels allocate inside themselves (cuBLAS' 32 MiB and the like), and the allocator's rounding.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..attach import plain_layers
from ..embedding import ForgeEmbedding  # noqa: F401 - registers the layer
from ..gradient import FactoredGradient, Lookup
from ..layers import restore_class_, swap_class_

__all__ = ["Held", "Traffic", "fake_", "simulate"]


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are alive; those of `known` tensors are not counted."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # A question to the data ("is the mask all ones?"): answered as for unpadded text.
            return True if args[0].dtype == torch.bool else 0
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self.live_bytes -= nbytes
        self._known.discard(key)


class _FusedAttention(torch.autograd.Function):
    """Shapes of flash attention."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query[..., :1]).expand(*query.shape[:-1], value.shape[-1]).contiguous()
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _FusedAttention.apply(query, key, value)


@dataclass
class Held:
    """What a forge optimizer would hold of one weight; a receiver of `layers`.

    Attributes:
        parameter: The weight.
        mode: "step" (keep the pair), "backward" (use it up at once) or "galore" (keep its projection).
        rank: Of the projection.
        gradient: What is held.
    """

    parameter: nn.Parameter
    mode: str
    rank: int = 0

    def __post_init__(self) -> None:
        """Hold nothing yet."""
        self.gradient = FactoredGradient(self.parameter)

    def active(self) -> bool:
        """Pairs are wanted."""
        return True

    def expect(self) -> None:
        """A use was seen."""

    def open_forward(self) -> None:
        """A forward begins."""

    def open_backward(self) -> None:
        """A backward begins."""

    def receive_elsewhere(self) -> None:
        """Autograd has the gradient."""

    def hand_over(self) -> None:
        """A hook looks at the gradient."""

    def receive(self, dy_TN: Tensor, x_TK: Tensor, borrowed: bool, exchanged: bool) -> None:
        """Keep a pair as the optimizer would: itself, or summed into a dense buffer beyond the bound."""
        if self.mode != "backward":
            self.gradient.add_pair(*((x_TK, dy_TN) if exchanged else (dy_TN, x_TK)), exchanged=exchanged)
            self._reduce()

    def receive_lookup(self, ids_T: Tensor, dy_TK: Tensor) -> None:
        """Keep a lookup, or a dense buffer beyond the bound."""
        if self.mode == "backward":
            return
        gradient = self.gradient
        lookup = Lookup(ids_T, dy_TK.detach(), 0)
        if gradient.buffer is None and gradient._exceeds_dense([*gradient.looked_up, lookup]):
            gradient.segments.clear()
            gradient.looked_up.clear()
            gradient.buffer = torch.empty_like(self.parameter)
        elif gradient.buffer is None:
            gradient.looked_up.append(lookup)
        self._reduce()

    def _reduce(self) -> None:
        """GaLore keeps the projection of a pair or buffer where that is smaller."""
        rows, columns = self.parameter.shape
        low_rank_bytes = 4 * min(self.rank, rows, columns) * max(rows, columns)
        gradient = self.gradient
        held = gradient._factors() if gradient.buffer is None else [gradient.buffer]
        if self.mode == "galore" and self.rank and low_rank_bytes < sum(tensor.nbytes for tensor in held):
            gradient.segments.clear()
            gradient.looked_up.clear()
            gradient.buffer = self.parameter.new_empty(low_rank_bytes // 4, dtype=torch.float32)


@dataclass(frozen=True)
class Traffic:
    """Bytes beside weights and moments.

    Attributes:
        forward_bytes: Alive when the loss is known: activations, logits.
        peak_bytes: Most alive at any moment of forward and backward.
        gradient_bytes: Alive after backward: dense gradients, and what is held in their place.
    """

    forward_bytes: int
    peak_bytes: int
    gradient_bytes: int


@contextlib.contextmanager
def _receiving(model: nn.Module, mode: str | None, ranks: dict[int, int]) -> Iterator[None]:
    """Swap the layers that a forge optimizer would swap; None swaps nothing."""
    swapped: list[nn.Module] = []
    if mode is not None:
        held: dict[int, Held] = {}
        for parameter, modules in plain_layers(model):
            held[id(parameter)] = Held(parameter, mode, ranks.get(id(parameter), 0))
            for module in modules:
                swap_class_(module, held[id(parameter)])
                swapped.append(module)
    try:
        yield
    finally:
        for module in swapped:
            restore_class_(module)


def fake_(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Replace the parameters and buffers of a model on the meta device by fake CPU tensors; ties stay."""
    made: dict[int, Tensor] = {}
    with mode:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                        is_parameter = isinstance(tensor, nn.Parameter)
                        made[id(tensor)] = (
                            nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                        )
                    tensors[key] = made[id(tensor)]  # type: ignore[assignment]
    return model


def simulate(
    model: nn.Module,
    inputs: dict[str, Tensor],
    fake: FakeTensorMode,
    mode: str | None = None,
    ranks: dict[int, int] | None = None,
    autocast: bool = False,
) -> Traffic:
    """Run one forward and backward of a fake model.

    Args:
        model: From `fake_`, in training mode.
        inputs: Fake tensors for its forward; with labels, so that it returns a loss.
        fake: The mode that made both.
        mode: None (dense gradients), "step", "backward" or "galore".
        ranks: Rank by id(parameter), for "galore".
        autocast: Whether the forward runs under bf16 autocast.
    """
    live = _LiveBytes([*model.parameters(), *model.buffers(), *inputs.values()])
    patched = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = _attend  # type: ignore[assignment]
    try:
        with _receiving(model, mode, ranks or {}), fake, live:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**inputs).loss
            forward_bytes = live.live_bytes
            loss.backward()
            del loss
            gradient_bytes = live.live_bytes
    finally:
        nn.functional.scaled_dot_product_attention = patched  # type: ignore[assignment]
        for parameter in model.parameters():
            parameter.grad = None
    return Traffic(forward_bytes, live.peak_bytes, gradient_bytes)
