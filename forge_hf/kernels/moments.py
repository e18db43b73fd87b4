"""Moments as stored, to fp32 and back: fp32, bf16, and 8-bit codes with a power-of-two unit per block.

A moment is `ptr` plus `scale_ptr`, which is None for fp32 and bf16; `update_elements` does not know the
format. The 8-bit formats, their bounds and their constants are described in `forge_hf/quantized.py`. Tiles
are 2-D here, and each of their rows is whole blocks of one row of the moment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import quantized
from .rounding import random_bits, store_rounded
from .tiles import to_fp32

__all__ = ["block_offsets", "blocks_inside", "load", "load_scale", "moment_to_fp32", "store_moment"]

BLOCK = tl.constexpr(quantized.BLOCK)
SIGNED_TOP, SIGNED_SHIFT, SIGNED_MARGIN = map(tl.constexpr, quantized.SIGNED)
UNSIGNED_TOP, UNSIGNED_SHIFT, UNSIGNED_MARGIN = map(tl.constexpr, quantized.UNSIGNED)


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
    """The moment's elements from what was loaded: `value` by `load`, `scale` by `load_scale`."""
    if ptr.dtype.element_ty == tl.int8 or ptr.dtype.element_ty == tl.uint8:
        code = value.to(tl.float32)
        unit = _spread(scale.to(tl.uint32) << 23, value.shape[0], value.shape[1]).to(tl.float32, bitcast=True)
        if ptr.dtype.element_ty == tl.int8:
            result = code * tl.abs(code) * unit
            special = tl.where(code == -SIGNED_TOP - 2, float("nan"), code * float("inf"))
            result = tl.where(tl.abs(code) > SIGNED_TOP, special, result)
        else:
            square = code * code
            result = square * square * unit
            special = tl.where(code > UNSIGNED_TOP + 1, float("nan"), float("inf"))
            result = tl.where(code > UNSIGNED_TOP, special, result)
    else:
        result = to_fp32(value, INTERPRET)
    return result


@triton.jit
def _unit_field(size, MARGIN: tl.constexpr, SHIFT: tl.constexpr):
    """Exponent field of each block's unit, from magnitudes that are 0 where not finite."""
    ROWS: tl.constexpr = size.shape[0]
    COLUMNS: tl.constexpr = size.shape[1]
    top = tl.max(tl.reshape(size, (ROWS, COLUMNS // BLOCK, BLOCK)), axis=2)
    field = ((top * MARGIN).to(tl.uint32, bitcast=True) + 0x7FFFFF) >> 23
    return tl.maximum(field, SHIFT + 1) - SHIFT


@triton.jit
def _encode(value, uniform, SIGNED: tl.constexpr):
    """Codes as fp32 numbers and the blocks' exponent fields; see `quantized.quantize_`."""
    TOP: tl.constexpr = SIGNED_TOP if SIGNED else UNSIGNED_TOP
    finite = tl.abs(value) < float("inf")
    if SIGNED:
        size = tl.where(finite, tl.abs(value), 0.0)
        field = _unit_field(size, SIGNED_MARGIN, SIGNED_SHIFT)
    else:
        size = tl.where(finite, tl.maximum(value, 0.0), 0.0)
        field = _unit_field(size, UNSIGNED_MARGIN, UNSIGNED_SHIFT)
    scaled = size * _spread((254 - field) << 23, value.shape[0], value.shape[1]).to(tl.float32, bitcast=True)
    if SIGNED:
        lower = tl.minimum(tl.floor(tl.sqrt(scaled)), TOP)
        base = lower * lower
        gap = 2.0 * lower + 1.0
    else:
        lower = tl.minimum(tl.floor(tl.sqrt(tl.sqrt(scaled))), TOP)
        base = lower * lower
        base *= base
        upper = (lower + 1.0) * (lower + 1.0)
        gap = upper * upper - base
    code = tl.minimum(lower + tl.where(uniform * gap < scaled - base, 1.0, 0.0), TOP)
    if SIGNED:
        code = tl.where(finite, code, TOP + 1.0)
        code = tl.where(value < 0, -code, code)
        code = tl.where(value != value, -(TOP + 2.0), code)
    else:
        code = tl.where(scaled > 0, tl.maximum(code, 1.0), code)
        code = tl.where(finite, code, tl.where(value > 0, TOP + 1.0, 0.0))
        code = tl.where(value != value, TOP + 2.0, code)
    return code, field


@triton.jit
def store_moment(
    ptr, scale_ptr, offset, value, mask, block, block_mask, seed,
    STREAM: tl.constexpr, STOCHASTIC: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Store fp32 `value` in the format of the pointers, rounded at random or to the nearest."""
    if ptr.dtype.element_ty == tl.int8 or ptr.dtype.element_ty == tl.uint8:
        if STOCHASTIC:
            uniform = (random_bits(seed, STREAM) >> 8).to(tl.float32) * 5.9604644775390625e-08
        else:
            uniform = 0.5
        # Elements outside the weight must not raise their block's maximum.
        if mask is not None:
            value = tl.where(mask, value, 0.0)
        code, field = _encode(value, uniform, ptr.dtype.element_ty == tl.int8)
        tl.store(ptr + offset, code.to(tl.int32).to(ptr.dtype.element_ty), mask=mask)
        tl.store(scale_ptr + block, field.to(tl.uint8), mask=block_mask)
    else:
        store_rounded(ptr, offset, value, mask, seed, STREAM, STOCHASTIC, INTERPRET)
