"""Random bits by a counter-based hash, and storage of fp32 values in 16 bits, with or without their low bits.

The plain-torch twin of `kernels/rounding.py`: both draw the same bits for (key, stream, element).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["join_low_bits", "next_bits", "random_bits", "round_stochastic", "split_low_bits_", "store_"]

_MASK32 = 0xFFFFFFFF


def random_bits(
    count: int, rng_key: int, stream: int, start_index: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Hash (key, stream, element index) to 32 bits, the same ones as the kernels draw.

    Args:
        count: Number of consecutive elements.
        rng_key: Key of this update, in [0, 2**32).
        stream: 0 for the weight, 1 and 2 for the moments.
        start_index: Flat index of the first element.
        device: Where to compute.

    Returns:
        int64 tensor of shape (count,), values in [0, 2**32).
    """
    index = torch.arange(start_index, start_index + count, dtype=torch.int64, device=device)
    bits = (index & _MASK32) * 0x9E3779B1 + (index >> 32) * 0x85EBCA77 + (rng_key + stream * 0xC2B2AE3D)
    bits &= _MASK32
    bits ^= bits >> 16
    bits = (bits * 0x7FEB352D) & _MASK32
    bits ^= bits >> 15
    bits = (bits * 0x846CA68B) & _MASK32
    return bits ^ (bits >> 16)


def next_bits(bits: Tensor) -> Tensor:
    """32 more random bits from those of `random_bits` (int64 in [0, 2**32))."""
    bits = (bits * 0x9E3779B1) & _MASK32
    return bits ^ (bits >> 16)


def round_stochastic(
    values: Tensor, dtype: torch.dtype, rng_key: int, stream: int, start_index: int = 0
) -> Tensor:
    """Round fp32 `values` to bf16 or fp16 up or down at random, so that the expectation is the value itself.

    Args:
        values: fp32 tensor; its elements are numbered row by row from `start_index`.
        dtype: torch.bfloat16 or torch.float16.
        rng_key: See `random_bits`.
        stream: See `random_bits`.
        start_index: Flat index of the first element.

    Returns:
        Tensor of `dtype`. Non-finite values pass through.
    """
    flat = values.reshape(-1)
    noise = random_bits(flat.numel(), rng_key, stream, start_index, flat.device)
    drop = 16 if dtype == torch.bfloat16 else 13
    noise = (noise & ((1 << drop) - 1)).to(torch.int32)
    bits = (flat.view(torch.int32) + noise) & -(1 << drop)
    rounded = bits.view(torch.float32)
    if dtype == torch.float16:
        # fp16's spacing is constant (2**-24) below its smallest normal number.
        tiny = torch.floor(flat * 2.0**24 + noise.to(torch.float32) / 8192.0) * 2.0**-24
        rounded = torch.where(flat.abs() < 2.0**-14, tiny, rounded)
    rounded = torch.where(torch.isfinite(flat), rounded, flat)
    return rounded.to(dtype).reshape(values.shape)


def store_(target: Tensor, values: Tensor, rng_key: int | None, stream: int, start_index: int) -> None:
    """Store `values` in `target`, rounding 16-bit storage stochastically if there is a key."""
    if target.data_ptr() == values.data_ptr():
        return
    if rng_key is not None and target.dtype in (torch.bfloat16, torch.float16):
        values = round_stochastic(values, target.dtype, rng_key, stream, start_index)
    target.copy_(values)


def join_low_bits(weight: Tensor, low: Tensor) -> Tensor:
    """fp32 values of a bf16 weight and the low bits that `split_low_bits` kept.

    Args:
        weight: bf16, the nearest to the value.
        low: int16, what the value's 32 bits are above those of `weight`; or int8, the upper half of that. It
            does not count where the weight is 0, which somebody else made it: below 0 it would give NaN.
    """
    below = low.to(torch.int32) << (8 if low.dtype == torch.int8 else 0)
    below = torch.where(weight == 0, 0, below)
    return ((weight.view(torch.int16).to(torch.int32) << 16) + below).view(torch.float32)


def split_low_bits_(weight: Tensor, low: Tensor, values: Tensor, noise: Tensor | None = None) -> None:
    """Store fp32 `values` as the nearest bf16 (halves away from 0) and the remaining 16 bits, or 8 of them.

    Args:
        weight: bf16, written in place.
        low: int16 keeps fp32 exactly, int8 keeps 24 bits; written in place.
        values: fp32, of the same shape.
        noise: Random bits that round the 24 bits stochastically (`random_bits`), or None: to nearest even.
    """
    values = torch.where(values.isnan(), float("nan"), values)
    bits = values.view(torch.int32).to(torch.int64) & _MASK32
    if low.dtype == torch.int8:
        extra = 0x7F + ((bits >> 8) & 1) if noise is None else noise.reshape(values.shape) & 0xFF
        bits = (bits + extra) & 0xFFFFFF00
    upper = (bits + 0x8000) >> 16
    below = bits - (upper << 16)
    weight.copy_(_as_int16(upper).view(torch.bfloat16))
    low.copy_(below >> 8 if low.dtype == torch.int8 else below)


def _as_int16(bits: Tensor) -> Tensor:
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16)
