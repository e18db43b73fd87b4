"""Random bits by a counter-based hash, and rounding of fp32 to 16-bit storage with or without them.

    x = idx_lo * 0x9E3779B1 + idx_hi * 0x85EBCA77 + rng_key + stream * 0xC2B2AE3D       (mod 2^32)
    x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16

`idx` is the flat element index, so the bits depend on (key, stream, element) and not on tile sizes: the
reference backend draws the same ones. Stochastic rounding adds r in [0, 1) units of the last kept place, then
truncates, so its mean is the fp32 value. A hash instead of Philox, which was four times slower here.

Source of the mixing constants: Wellons, "Prospecting for hash functions" (lowbias32), 2018.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["random_bits", "store_rounded"]


@triton.jit
def random_bits(offset, rng_key, STREAM: tl.constexpr):
    """32 random bits for each int64 element offset; `rng_key` is the key's int32 bit pattern."""
    x = offset.to(tl.uint32) * 0x9E3779B1 + (offset >> 32).to(tl.uint32) * 0x85EBCA77
    x += rng_key.to(tl.uint32) + ((STREAM * 0xC2B2AE3D) & 0xFFFFFFFF)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _bf16_from_bits(value, bits):
    """The upper half of `bits` as bf16, except where `value` is infinite or NaN: those stay so."""
    bits = tl.where(tl.abs(value) < float("inf"), bits, value.to(tl.uint32, bitcast=True))
    # A NaN whose payload sits in the lower half would be truncated to an infinity.
    bits = tl.where(value != value, 0x7FC00000, bits)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _nearest_bf16(value, INTERPRET: tl.constexpr):
    if INTERPRET:  # whose cast to bf16 truncates
        bits = value.to(tl.uint32, bitcast=True)
        return _bf16_from_bits(value, bits + 0x7FFF + ((bits >> 16) & 1))
    return value.to(tl.bfloat16)


@triton.jit
def _stochastic_bf16(value, random):
    return _bf16_from_bits(value, value.to(tl.uint32, bitcast=True) + (random & 0xFFFF))


@triton.jit
def _stochastic_fp16(value, random):
    """fp16 keeps 10 of fp32's 23 mantissa bits in its normal range and a fixed unit of 2^-24 below it."""
    random = random & 0x1FFF
    normal = ((value.to(tl.uint32, bitcast=True) + random) & 0xFFFFE000).to(tl.float32, bitcast=True)
    # Both factors are powers of two, so a fused multiply-add gives the same result.
    small = tl.floor(value * 16777216.0 + random.to(tl.float32) * 0.0001220703125) * 5.9604644775390625e-08
    rounded = tl.where(tl.abs(value) >= 6.103515625e-05, normal, small)
    return tl.where(tl.abs(value) < float("inf"), rounded, value).to(tl.float16)


@triton.jit
def store_rounded(
    ptr, offset, value, mask, rng_key, STREAM: tl.constexpr, STOCHASTIC: tl.constexpr, INTERPRET: tl.constexpr
):
    """Store fp32 `value` at `ptr + offset` in the pointer's dtype, rounded at random or to nearest even."""
    if ptr.dtype.element_ty == tl.bfloat16:
        if STOCHASTIC:
            tl.store(ptr + offset, _stochastic_bf16(value, random_bits(offset, rng_key, STREAM)), mask=mask)
        else:
            tl.store(ptr + offset, _nearest_bf16(value, INTERPRET), mask=mask)
    elif ptr.dtype.element_ty == tl.float16:
        if STOCHASTIC:
            tl.store(ptr + offset, _stochastic_fp16(value, random_bits(offset, rng_key, STREAM)), mask=mask)
        else:
            tl.store(ptr + offset, value.to(tl.float16), mask=mask)
    else:
        tl.store(ptr + offset, value, mask=mask)
