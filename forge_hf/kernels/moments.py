"""Moments as stored, to fp32 and back: fp32, bf16, and 8-bit codes with a power-of-two unit per block.

A moment is `ptr` plus `scale_ptr`, which is None for fp32 and bf16; `update_elements` does not know the
format. The 8-bit formats, their bounds and their constants are described in `forge_hf/quantized.py`. Tiles
are 2-D here, and each of their rows is whole blocks of one row of the moment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import quantized
from .rounding import next_bits, random_bits, root, store_rounded
from .tiles import CUDA, to_fp32

__all__ = ["block_offsets", "blocks_inside", "load", "load_scale", "moment_to_fp32", "store_moment"]

BLOCK = tl.constexpr(quantized.BLOCK)
SIGNED_SHIFT, SIGNED_MARGIN = map(tl.constexpr, quantized.SIGNED)
UNSIGNED_SHIFT, UNSIGNED_MARGIN = map(tl.constexpr, quantized.UNSIGNED)


@triton.jit
def load(ptr, offset, mask):
    """Elements as stored, 0 where the mask is false; None masks nothing. Each is read once a step."""
    if mask is None:
        value = tl.load(ptr + offset, eviction_policy="evict_first")
    else:
        value = tl.load(ptr + offset, mask=mask, other=0, eviction_policy="evict_first")
    return value


@triton.jit
def block_offsets(row, column, columns, COLUMNS: tl.constexpr):
    """Offsets in the scale of the blocks of a tile with rows `row` that begins at `column`."""
    lane = column // BLOCK + tl.arange(0, COLUMNS // BLOCK)
    return row.to(tl.int64)[:, None] * tl.cdiv(columns, BLOCK) + lane[None, :]


@triton.jit
def blocks_inside(row_mask, column, columns, COLUMNS: tl.constexpr):
    """Which of these blocks have an element inside the moment."""
    return row_mask[:, None] & (column + tl.arange(0, COLUMNS // BLOCK) * BLOCK < columns)[None, :]


@triton.jit
def load_scale(scale_ptr, block, block_mask, otherwise):
    """Exponent fields of a tile's blocks, or `otherwise` for a format without."""
    if scale_ptr is not None:
        otherwise = load(scale_ptr, block, block_mask)
    return otherwise


@triton.jit
def _spread(per_block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(rows, blocks) to (rows, columns)."""
    wide = tl.broadcast_to(tl.expand_dims(per_block, 2), (ROWS, COLUMNS // BLOCK, BLOCK))
    return tl.reshape(wide, (ROWS, COLUMNS))


@triton.jit
def moment_to_fp32(value, scale, ptr, INTERPRET: tl.constexpr):
    """The moment's elements from what was loaded: `value` by `load`, `scale` by `load_scale`.

    A code becomes a number by its place in the mantissa of 2^23, as conversions take several times as long.
    """
    if ptr.dtype.element_ty == tl.int8:
        bits = value.to(tl.uint8, bitcast=True).to(tl.uint32) ^ 0x4B000080
        code = bits.to(tl.float32, bitcast=True) - 8388736.0  # 2^23 + 128
        result = code * tl.abs(code) * _unit(scale, value.shape[0], value.shape[1])
    elif ptr.dtype.element_ty == tl.uint8:
        code = (value.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        square = code * code
        result = square * square * _unit(scale, value.shape[0], value.shape[1])
    else:
        result = to_fp32(value, INTERPRET)
    return result


@triton.jit
def _unit(field, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """2^(field - 127), 0 for field 0 and infinity for field 255."""
    return _spread((field.to(tl.uint32) << 23).to(tl.float32, bitcast=True), ROWS, COLUMNS)


@triton.jit
def _unit_field(size, MARGIN: tl.constexpr, SHIFT: tl.constexpr):
    """Exponent field of each block's unit; 255 where an element is not finite, or too large to scale."""
    ROWS: tl.constexpr = size.shape[0]
    COLUMNS: tl.constexpr = size.shape[1]
    # As integers, since a maximum of floats drops NaN.
    bits = tl.reshape(size.to(tl.int32, bitcast=True), (ROWS, COLUMNS // BLOCK, BLOCK))
    top = tl.max(bits, axis=2).to(tl.float32, bitcast=True)
    top = tl.where(top < float("inf"), top * MARGIN, float("inf"))
    field = (top.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    return tl.where(top < float("inf"), tl.maximum(field - SHIFT, 1), 255)


@triton.jit
def _above_2_23(value):
    """2^23 + floor(value): an integer in the mantissa's last place, rounded down by the addition itself."""
    if CUDA:
        total = tl.inline_asm_elementwise(
            "add.rz.f32 $0, $1, 0f4B000000;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        total = 8388608.0 + tl.floor(value)
    return total


@triton.jit
def _encode(value, random, SIGNED: tl.constexpr):
    """Codes (int32, of which the low byte counts) and the blocks' fields; see `quantized.quantize_`.

    `random` is uniform in [1, 2). A root that comes out just below an integer is put right by the comparison.
    """
    size = tl.abs(value) if SIGNED else value
    if SIGNED:
        field = _unit_field(size, SIGNED_MARGIN, SIGNED_SHIFT)
    else:
        field = _unit_field(size, UNSIGNED_MARGIN, UNSIGNED_SHIFT)
    inverse = ((254 - tl.minimum(field, 254)) << 23).to(tl.float32, bitcast=True)
    scaled = size * _spread(inverse, value.shape[0], value.shape[1])
    shifted = _above_2_23(root(scaled) if SIGNED else root(root(scaled)))
    lower = shifted - 8388608.0
    if SIGNED:
        gap = 2.0 * lower + 1.0
        above = scaled - lower * lower
    else:
        square = lower * lower
        gap = ((4.0 * lower + 6.0) * lower + 4.0) * lower + 1.0
        above = scaled - square * square
    rounds_up = random * gap - gap < above
    if SIGNED:
        code = lower + tl.where(rounds_up, 1.0, 0.0)
        sign = value.to(tl.int32, bitcast=True) & -0x80000000
        code = (code.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True) + 12582912.0
    else:
        code = tl.maximum(shifted + tl.where(rounds_up, 1.0, 0.0), 8388609.0)
    return code.to(tl.int32, bitcast=True), field


@triton.jit
def _uniform(seed, UPPER: tl.constexpr):
    """16 random bits of an element as a number in [1, 2); both moments share what follows the weight's."""
    bits = next_bits(random_bits(seed, 0))
    if UPPER:
        bits = bits >> 9
    else:
        bits = bits << 7
    return ((bits & 0x7FFF80) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def store_moment(
    ptr, scale_ptr, offset, value, mask, block, block_mask, seed,
    STREAM: tl.constexpr, STOCHASTIC: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Store fp32 `value` in the format of the pointers, rounded at random or to the nearest."""
    if ptr.dtype.element_ty == tl.int8 or ptr.dtype.element_ty == tl.uint8:
        if STOCHASTIC:
            random = _uniform(seed, STREAM == 2)
        else:
            random = 1.5
        # Outside the weight all operands are 0, and every rule keeps 0, so no block's maximum rises.
        code, field = _encode(value, random, ptr.dtype.element_ty == tl.int8)
        tl.store(ptr + offset, code.to(ptr.dtype.element_ty), mask=mask)
        tl.store(scale_ptr + block, field.to(tl.uint8), mask=block_mask)
    else:
        store_rounded(ptr, offset, value, mask, seed, STREAM, STOCHASTIC, INTERPRET)
