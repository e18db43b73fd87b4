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

from .tiles import CUDA, to_fp32

__all__ = [
    "hash_seed",
    "lane_seed",
    "nearest_bf16",
    "next_bits",
    "random_bits",
    "root",
    "store_rounded",
    "store_weight",
    "weight_to_fp32",
]


@triton.jit
def hash_seed(offset, rng_key):
    """The part of the hash that is linear in the element index; `rng_key` is the key's int32 bit pattern.

    So a seed at int64 `offset` plus `lane_seed(n)` is the seed at `offset + n`, as long as the sum does not
    leave the 32-bit block of `offset`.
    """
    seed = offset.to(tl.uint32) * 0x9E3779B1 + (offset >> 32).to(tl.uint32) * 0x85EBCA77
    return seed + rng_key.to(tl.uint32)


@triton.jit
def lane_seed(lane):
    """What `lane` more elements add to a seed: one multiplication outside the loop over streams."""
    return lane.to(tl.uint32) * 0x9E3779B1


@triton.jit
def random_bits(seed, STREAM: tl.constexpr):
    """32 random bits for each element from its `hash_seed`."""
    x = seed + ((STREAM * 0xC2B2AE3D) & 0xFFFFFFFF)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def next_bits(x):
    """32 more random bits from those of `random_bits`, at a third of their cost."""
    x *= 0x9E3779B1
    return x ^ (x >> 16)


@triton.jit
def root(value):
    """The square root, off by 1 unit of the last place; below 2^-126 it is 0."""
    if CUDA:
        result = tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = tl.sqrt(value)
    return result


@triton.jit
def _upper_half(bits):
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def nearest_bf16(value, INTERPRET: tl.constexpr):
    """bf16 nearest to an fp32 value, halves to even."""
    if INTERPRET:  # whose cast to bf16 truncates
        bits = tl.where(value != value, 0x7FC00000, value.to(tl.uint32, bitcast=True))
        return _upper_half(bits + 0x7FFF + ((bits >> 16) & 1))
    return value.to(tl.bfloat16)


@triton.jit
def _stochastic_bf16(value, random):
    """Infinity stays: 16 random bits never carry out of its empty mantissa. A NaN's full mantissa would."""
    bits = tl.where(value != value, 0x7FC00000, value.to(tl.uint32, bitcast=True))
    return _upper_half(bits + (random & 0xFFFF))


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
    ptr, offset, value, mask, seed, STREAM: tl.constexpr, STOCHASTIC: tl.constexpr, INTERPRET: tl.constexpr
):
    """Store fp32 `value` at `ptr + offset` in the pointer's dtype, rounded at random or to nearest even."""
    if ptr.dtype.element_ty == tl.bfloat16:
        if STOCHASTIC:
            value = _stochastic_bf16(value, random_bits(seed, STREAM))
        else:
            value = nearest_bf16(value, INTERPRET)
    elif ptr.dtype.element_ty == tl.float16:
        value = _stochastic_fp16(value, random_bits(seed, STREAM)) if STOCHASTIC else value.to(tl.float16)
    tl.store(ptr + offset, value, mask=mask)


@triton.jit
def weight_to_fp32(value, low, low_ptr, INTERPRET: tl.constexpr):
    """The weight in fp32: as stored, or a bf16 weight put together with its low bits (see `reference.py`)."""
    if low_ptr is None:
        result = to_fp32(value, INTERPRET)
    else:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
        below = low.to(tl.int32)
        if low_ptr.dtype.element_ty == tl.int8:
            below = below << 8
        # Not at 0, which the update did not store with low bits; see `reference.py`.
        below = tl.where((bits & 0x7FFFFFFF) == 0, 0, below)
        result = (bits + below).to(tl.float32, bitcast=True)
    return result


@triton.jit
def store_weight(
    ptr, low_ptr, offset, value, mask, seed, STOCHASTIC: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    """Store an fp32 weight: whole, rounded to 16 bits, or as bf16 and 8 or 16 low bits."""
    if low_ptr is None:
        store_rounded(ptr, offset, value, mask, seed, 0, STOCHASTIC, INTERPRET)
    else:
        bits = tl.where(value != value, 0x7FC00000, value.to(tl.uint32, bitcast=True))
        if low_ptr.dtype.element_ty == tl.int8:
            # Infinity stays: 8 bits never carry out of its empty mantissa.
            extra = random_bits(seed, 0) & 0xFF if STOCHASTIC else 0x7F + ((bits >> 8) & 1)
            bits = (bits + extra) & 0xFFFFFF00
        upper = (bits + 0x8000) >> 16
        below = (bits - (upper << 16)).to(tl.int32, bitcast=True)
        if low_ptr.dtype.element_ty == tl.int8:
            below = below >> 8
        tl.store(ptr + offset, upper.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=mask)
        tl.store(low_ptr + offset, below.to(low_ptr.dtype.element_ty), mask=mask)
