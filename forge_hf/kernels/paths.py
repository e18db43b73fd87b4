"""Which kernel an update gets, in one place for single weights and for groups."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from ..quantized import BLOCK, Moment, QuantizedMoment
from .plan import uses_chunks
from .wgrad_chunks import chunk_rows
from .wgrad_hopper import HopperUpdate, hopper_update
from .wgrad_update import FusedUpdate, fused_update

__all__ = ["choose", "chunk_of", "on_device_of"]


def choose(
    weight: torch.Tensor,
    dy_TN: torch.Tensor,
    x_TK: torch.Tensor,
    moments: Sequence[Moment],
    constants: tuple[str, bool, bool],
    low: torch.Tensor | None,
) -> FusedUpdate | HopperUpdate:
    """The kernel for one pair: Hopper's where it fits and was found faster, else the one for every card."""
    return hopper_update(weight, dy_TN, x_TK, moments, constants, low) or fused_update(
        weight, dy_TN, x_TK, moments, constants
    )


def chunk_of(weight: torch.Tensor, dy_TN: torch.Tensor, moments: Sequence[Moment]) -> int:
    """Rows per chunk where the update goes in chunks, else 0."""
    N, K = weight.shape
    quantized = any(isinstance(moment, QuantizedMoment) for moment in moments)
    if (quantized and K % BLOCK) or not uses_chunks(
        dy_TN.shape[0], N, K, dy_TN.dtype, weight.device, quantized
    ):
        return 0
    return chunk_rows(N, K)


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
