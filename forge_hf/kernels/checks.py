"""What the launchers accept: shapes, dtypes, strides and devices of an update's tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ..quantized import BLOCK, Moment, QuantizedMoment, rows_and_columns
from ..row_sums import Lookup

__all__ = ["FLOATS", "Lookup", "Segment", "check_lookups", "check_update", "merge"]

Segment = tuple[torch.Tensor, torch.Tensor]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MOMENTS = (torch.float32, torch.bfloat16)
# First moments are signed, second ones are not.
_CODES = (torch.int8, torch.uint8)
_MOMENT_COUNTS = {"adamw": (2,), "lion": (1,), "sgd": (0, 1)}


def merge(segments: Sequence[Segment], N: int, K: int, like: torch.Tensor) -> Segment:
    """One pair out of all segments that have tokens; an empty pair where none has.

    Raises:
        ValueError: a segment is not (dy (T, N), x (T, K)) of one float dtype on the device of `like`.
    """
    for dy, x in segments:
        if dy.ndim != 2 or dy.shape[1] != N or x.shape != (dy.shape[0], K):
            raise ValueError(f"segment {tuple(dy.shape)}, {tuple(x.shape)} is not (T, {N}), (T, {K})")
        if dy.dtype != x.dtype or dy.dtype not in FLOATS:
            raise ValueError(f"segment dtypes {dy.dtype}, {x.dtype} must be the same one of {FLOATS}")
        if dy.device != like.device or x.device != like.device:
            raise ValueError(f"segment on {dy.device} and {x.device}, expected {like.device}")
    held = [(dy, x) for dy, x in segments if dy.shape[0]]
    if not held:
        return like.new_empty((0, N)), like.new_empty((0, K))
    if len(held) == 1:
        return _addressable(held[0][0]), _addressable(held[0][1])
    dtype = functools.reduce(torch.promote_types, (dy.dtype for dy, _ in held))
    return torch.cat([dy.to(dtype) for dy, _ in held]), torch.cat([x.to(dtype) for _, x in held])


def _addressable(operand: torch.Tensor) -> torch.Tensor:
    """The operand with one unit stride; without, no load is wider than an element and a copy is cheaper."""
    return operand if 1 in operand.stride() else operand.contiguous()


def check_lookups(lookups: Sequence[Lookup], K: int, like: torch.Tensor) -> None:
    """Raise ValueError unless each lookup is (ids (T,), dy (T, K)) on the device of `like`."""
    for ids, dy in lookups:
        if ids.ndim != 1 or dy.shape != (ids.shape[0], K):
            raise ValueError(f"lookup {tuple(ids.shape)}, {tuple(dy.shape)} is not (T,), (T, {K})")
        if ids.dtype not in (torch.int32, torch.int64) or dy.dtype not in FLOATS:
            raise ValueError(f"lookup dtypes {ids.dtype}, {dy.dtype} must be integer and one of {FLOATS}")
        if ids.device != like.device or dy.device != like.device:
            raise ValueError(f"lookup on {ids.device} and {dy.device}, expected {like.device}")


def check_update(
    weight: torch.Tensor,
    moments: Sequence[Moment],
    rule: str,
    coefficient: torch.Tensor | None,
    rng_key: int | None,
    low: torch.Tensor | None,
) -> None:
    """Raise ValueError unless weight, moments and the rest are what `launch.wgrad_update_` describes."""
    if rule not in _MOMENT_COUNTS:
        raise ValueError(f"unknown rule {rule!r}; valid: {', '.join(_MOMENT_COUNTS)}")
    counts = _MOMENT_COUNTS[rule]
    if len(moments) not in counts:
        raise ValueError(f"{rule} takes {' or '.join(map(str, counts))} moments, got {len(moments)}")
    if weight.dtype not in FLOATS or not weight.is_contiguous():
        raise ValueError(
            f"weight must be contiguous and one of {FLOATS}, got {weight.dtype}, strides {weight.stride()}"
        )
    if len({isinstance(moment, QuantizedMoment) for moment in moments}) > 1:
        raise ValueError("either all moments of a weight are 8-bit or none is")
    for index, moment in enumerate(moments):
        if isinstance(moment, QuantizedMoment):
            _check_like("codes of a moment", moment.codes, weight, (_CODES[index],))
            rows, columns = rows_and_columns(weight.shape)
            _check_like(
                "scale of a moment", moment.scale, weight, (torch.uint8,), (rows, -(-columns // BLOCK))
            )
        else:
            _check_like("moment", moment, weight, _MOMENTS)
    if low is not None:
        if weight.dtype != torch.bfloat16:
            raise ValueError(f"low bits belong to a bfloat16 weight, not {weight.dtype}")
        _check_like("low bits", low, weight, (torch.int8, torch.int16))
    if coefficient is not None and (
        coefficient.ndim or coefficient.dtype != torch.float32 or coefficient.device != weight.device
    ):
        raise ValueError(f"coefficient must be a 0-d float32 tensor on {weight.device}")
    if rng_key is not None and not 0 <= rng_key < 1 << 32:
        raise ValueError(f"rng_key must be in [0, 2**32), got {rng_key}")


def _check_like(
    what: str,
    tensor: torch.Tensor,
    weight: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...] | None = None,
) -> None:
    shape = weight.shape if shape is None else shape
    if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        raise ValueError(
            f"a {what} must be contiguous, of shape {tuple(shape)} and one of {dtypes}, "
            f"got {tuple(tensor.shape)}, {tensor.dtype}, {tensor.stride()}"
        )
    if tensor.device != weight.device:
        raise ValueError(f"{what} on {tensor.device}, weight on {weight.device}")
