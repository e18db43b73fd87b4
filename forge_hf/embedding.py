"""Embeddings that hand over (ids, dY) instead of building the gradient of the whole table.

    forward    Y = W[ids]                                        as nn.Embedding
    backward   receiver.receive_lookup(ids, dY);                 no dW

The gradient is G = sum_t e_{ids_t} dY_t^T: that of a linear layer whose inputs are one-hot. `layers.py`
explains when the layer behaves as nn.Embedding does; so it does with `max_norm`, `scale_grad_by_freq` and
`sparse` too.
"""

from __future__ import annotations

import dis
import itertools
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Receiver, Swapped, deliver, register_swap

__all__ = ["ForgeEmbedding", "reads_through_super", "why_not_plain"]


class _ForgeEmbeddingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None, receiver: Receiver) -> Tensor:
        ctx.receiver = receiver
        ctx.padding_idx = -1 if padding_idx is None else padding_idx % weight.shape[0]
        # Without grad an undefined dY would become zeros, and zeros are a gradient: decay, moments, a step.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[None, Tensor | None, None, None]:
        receiver: Receiver = ctx.receiver
        if dy is None:
            receiver.receive_elsewhere()
            return None, None, None, None
        receiver.open_backward()
        (ids,) = ctx.saved_tensors
        rows, columns = receiver.parameter.shape
        dw = deliver(
            ctx,
            receiver,
            lambda: receiver.receive_lookup(_own_ids(ids, ctx.padding_idx), dy.reshape(-1, columns)),
            lambda: torch.ops.aten.embedding_dense_backward(dy, ids, rows, ctx.padding_idx, False),
        )
        return None, dw, None, None


def _own_ids(ids: Tensor, padding_idx: int) -> Tensor:
    """A copy (T,) int32 that nobody else writes to, -1 where the padding row was read."""
    ids_T = ids.reshape(-1).to(torch.int32, copy=True)
    return ids_T if padding_idx < 0 else ids_T.masked_fill_(ids_T == padding_idx, -1)


class ForgeEmbedding(Swapped, nn.Embedding):
    """nn.Embedding whose weight gradient goes to a receiver as (ids, dY).

    Made by `layers.swap_class_` from an existing layer; not meant to be constructed.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Y = W[ids] for an input of integer ids (...); returns (..., K)."""
        receiver = self._open_forward() if why_not_plain(self) is None else None
        if receiver is None:
            return super().forward(input)
        return _ForgeEmbeddingFunction.apply(input, receiver.parameter, self.padding_idx, receiver)


def why_not_plain(module: nn.Embedding) -> str | None:
    """The option because of which this embedding's gradient is left to autograd, in words; or None."""
    if module.max_norm is not None:
        return "max_norm rewrites rows in forward"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq divides by counts of each batch"
    if module.sparse:
        return "sparse=True asks for sparse gradients"
    if module.num_embeddings >= 2**31:
        return "more rows than 32 bits count"
    return None


def reads_through_super(cls: type[nn.Embedding]) -> bool:
    """Whether a subclass with a forward of its own reads its rows by `super().forward(...)` and no other way.

    Scaled word embeddings (Gemma) and positions with an offset (BART, OPT) do; swapped, they stay before
    `ForgeEmbedding` in the order of classes. Asking the weight for its dtype or device is no reading.
    """
    parents = cls.__mro__[: cls.__mro__.index(nn.Embedding)]
    forwards = [parent.__dict__["forward"] for parent in parents if "forward" in parent.__dict__]
    return all(_calls_super(getattr(forward, "__code__", None)) for forward in forwards)


def _calls_super(code: CodeType | None) -> bool:
    if code is None or "super" not in code.co_names:
        return False
    names = [instruction.argval for instruction in dis.get_instructions(code)]
    reads = [after for name, after in itertools.pairwise(names) if name == "weight"]
    return all(after in ("dtype", "device") for after in reads)


register_swap(nn.Embedding, ForgeEmbedding)
