"""Squared Frobenius norm of a weight gradient from token Gram matrices, for pairs of few tokens.

    G = dy^T x = dy^T xc + s m^T,   xc = x - 1 m^T,   s = sum_t dy_t,   for any row m: here the mean of x
    ||G||^2 = sum_ij (dy dy^T)_ij (xc xc^T)_ij + 2 sum_i (dy_i . s) (xc_i . m) + |s|^2 |m|^2

T^2 (N + K) FLOP, as i >= j suffices, against 2 T N K of the GEMM. Without the centring inputs that are nearly
the same for all tokens cancel: a norm of 0.14 came out as 1.22. `m` is rounded to the dtype of x, which keeps
the identity and makes x - m exact where the two are close; s and all sums are fp32. Features whose mean is
below their standard deviation have m = 0: they cannot cancel by more than a factor of two, and x - m, which
would have to be rounded, stays x.

Four launches, each with a fixed order of summation and no atomics, so the same pair gives the same bits:

    columns   s, m, xc; for each block of columns its share of dy_i . s, xc_i . m, |s|^2 and |m|^2
    parts     tiles of dy dy^T and of xc xc^T, each over one part of the features
    product   adds up the parts, multiplies the two matrices; the other two terms of the sum
    finish    adds up what the programs before it wrote; rounding below 0 is cut off

Shapes: dy (T, N), x (T, K).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .norm_plan import SLICE_ROWS, GramPlan, gram_plan
from .replay import Launch, alignment
from .rounding import nearest_bf16
from .tiles import INTERPRET, dot, to_fp32
from .wgrad_norm import finish_launch

__all__ = ["GramKind", "centred_gram_norm_sq", "gram_columns", "gram_kinds", "gram_part", "gram_product"]

#: Blocks of columns, and parts of features, that a program of the product reads at once.
COLUMN_BLOCKS, PART_BLOCK = 512, 8


@triton.jit
def _as_operand(value, like_ptr, INTERPRET: tl.constexpr):
    """The fp32 value rounded to the dtype behind `like_ptr`."""
    if like_ptr.dtype.element_ty == tl.bfloat16:
        return nearest_bf16(value, INTERPRET)
    return value.to(like_ptr.dtype.element_ty)


@triton.jit
def _row_products(
    a, vector, rows_ptr, centred, offs_t, T, here, like_ptr, IS_X: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    """Store this block's share of each row's product; x is centred and stored before."""
    if IS_X:
        stored = _as_operand(a - vector[None, :], like_ptr, INTERPRET)
        tl.store(centred, stored, mask=here)
        a = to_fp32(stored, INTERPRET)
    tl.store(rows_ptr + offs_t, tl.sum(a * vector[None, :], axis=1), mask=offs_t < T)


@triton.jit
def _column_block(
    a_ptr, centred_ptr, rows_ptr, square_ptr, T, F, block, stride_t, stride_f,
    IS_X: tl.constexpr, ONE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Column sums of one block of columns, then with them its share of each row's product.

    For dy the row is multiplied by the sum; x is multiplied by its mean after it was centred and stored. ONE
    says that BLOCK_T holds all rows, which are then read once.
    """
    offs_t = tl.arange(0, BLOCK_T)
    offs_f = block * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = (offs_f < F)[None, :]
    first = a_ptr + offs_t.to(tl.int64)[:, None] * stride_t + offs_f.to(tl.int64)[None, :] * stride_f
    step_t = tl.cast(stride_t, tl.int64) * BLOCK_T
    a = to_fp32(tl.load(first, mask=(offs_t < T)[:, None] & inside, other=0.0), INTERPRET)
    sums = a
    squares = a * a
    if not ONE:
        ptrs = first
        for start in range(BLOCK_T, T, BLOCK_T):
            ptrs += step_t
            a = to_fp32(tl.load(ptrs, mask=(offs_t < T - start)[:, None] & inside, other=0.0), INTERPRET)
            sums += a
            if IS_X:
                squares += a * a
    vector = tl.sum(sums, axis=0)
    if IS_X:
        mean = vector / T
        vector = to_fp32(_as_operand(mean, a_ptr, INTERPRET), INTERPRET)
        vector = tl.where(2.0 * mean * mean > tl.sum(squares, axis=0) / T, vector, 0.0)
    tl.store(square_ptr + block, tl.sum(vector * vector))
    rows_ptr += block.to(tl.int64) * T
    centred = centred_ptr + offs_t.to(tl.int64)[:, None] * F + offs_f[None, :]
    if ONE:
        here = (offs_t < T)[:, None] & inside
        _row_products(a, vector, rows_ptr, centred, offs_t, T, here, a_ptr, IS_X, INTERPRET)
    else:
        for start in range(0, T, BLOCK_T):
            here = (offs_t < T - start)[:, None] & inside
            a = to_fp32(tl.load(first, mask=here, other=0.0), INTERPRET)
            _row_products(a, vector, rows_ptr, centred, start + offs_t, T, here, a_ptr, IS_X, INTERPRET)
            first += step_t
            centred += tl.cast(F, tl.int64) * BLOCK_T


@triton.jit
def gram_columns(
    dy_ptr, x_ptr, scratch_ptr, T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
    blocks_n, columns_at, centred_at,
    ONE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Block `program_id(0)` of the columns of x and dy."""
    # Scratch: one square for each block of columns, then T row products for each; elsewhere xc.
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    centred_ptr = tl.cast(scratch_ptr + centred_at, x_ptr.dtype)
    scratch_ptr += columns_at
    rows_ptr = scratch_ptr + blocks
    # Those of x first: they take longer.
    if block < blocks - blocks_n:
        _column_block(
            x_ptr, centred_ptr, rows_ptr + blocks_n.to(tl.int64) * T, scratch_ptr + blocks_n, T, K, block,
            stride_xt, stride_xk, True, ONE, BLOCK_T, BLOCK_F, INTERPRET,
        )  # fmt: skip
    else:
        _column_block(
            dy_ptr, centred_ptr, rows_ptr, scratch_ptr, T, N, block - (blocks - blocks_n),
            stride_dt, stride_dn, False, ONE, BLOCK_T, BLOCK_F, INTERPRET,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "blocks_n"])
def _gram_columns_kernel(
    dy_ptr, x_ptr, scratch_ptr, T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
    blocks_n, columns_at, centred_at,
    ONE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    gram_columns(
        dy_ptr, x_ptr, scratch_ptr, T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
        blocks_n, columns_at, centred_at, ONE, BLOCK_T, BLOCK_F, INTERPRET,
    )  # fmt: skip


@triton.jit
def _gram_block(
    a_ptr, i, j, T, F, first, features, stride_t, stride_f,
    EVEN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """(a a^T)[rows of i, rows of j] over `features` features of a (T, F); rows from T on are 0.

    EVEN says that blocks divide T and F, which saves the masks.
    """
    rows = i * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = j * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_f = tl.arange(0, BLOCK_F)
    step_f = tl.cast(stride_f, tl.int64)
    a_ptr += first * step_f
    row_ptrs = a_ptr + rows.to(tl.int64)[:, None] * stride_t + offs_f[None, :] * step_f
    col_ptrs = a_ptr + cols.to(tl.int64)[None, :] * stride_t + offs_f[:, None] * step_f
    acc = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    for start in range(first, tl.minimum(first + features, F), BLOCK_F):
        if EVEN:
            left = tl.load(row_ptrs)
            right = tl.load(col_ptrs)
        else:
            left = tl.load(row_ptrs, mask=(rows < T)[:, None] & (offs_f < F - start)[None, :], other=0.0)
            right = tl.load(col_ptrs, mask=(offs_f < F - start)[:, None] & (cols < T)[None, :], other=0.0)
        acc = dot(left, right, acc, INTERPRET)
        row_ptrs += BLOCK_F * step_f
        col_ptrs += BLOCK_F * step_f
    return acc


@triton.jit
def gram_part(
    dy_ptr, scratch_ptr, i, j, part, T, N, K, stride_dt, stride_dn, parts_n, features, tiles_at, centred_at,
    UNIT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Tile (i, j) of dy dy^T, or of xc xc^T from part `parts_n` on, over `features` features."""
    centred_ptr = tl.cast(scratch_ptr + centred_at, dy_ptr.dtype)
    # One loop for both: two would take their shared memory side by side.
    is_dy = part < parts_n
    gram = _gram_block(
        tl.where(is_dy, dy_ptr, centred_ptr), i, j, T, tl.where(is_dy, N, K),
        tl.where(is_dy, part, part - parts_n) * features, features,
        tl.where(is_dy, stride_dt, K), 1 if UNIT else tl.where(is_dy, stride_dn, 1),
        EVEN, BLOCK_T, BLOCK_F, INTERPRET,
    )  # fmt: skip
    side = tl.num_programs(0)
    tile = part.to(tl.int64) * (side * (side + 1) // 2) + i * (i + 1) // 2 + j
    lane = tl.arange(0, BLOCK_T)
    tl.store(
        scratch_ptr + tiles_at + tile * (BLOCK_T * BLOCK_T) + lane[:, None] * BLOCK_T + lane[None, :], gram
    )


# `features` and the offsets in the scratch are multiples of 32: one specialization, and wide loads.
@triton.jit(do_not_specialize=["T", "parts_n"])
def _gram_parts_kernel(
    dy_ptr, scratch_ptr, T, N, K, stride_dt, stride_dn, parts_n, features, tiles_at, centred_at,
    UNIT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    j = tl.program_id(1)
    if j > i:
        return
    gram_part(
        dy_ptr, scratch_ptr, i, j, tl.program_id(2), T, N, K, stride_dt, stride_dn,
        parts_n, features, tiles_at, centred_at, UNIT, EVEN, BLOCK_T, BLOCK_F, INTERPRET,
    )  # fmt: skip


@triton.jit
def _sum_rows(base_ptr, first, last, stride, offsets, mask, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Sum of rows `first` to `last` of a (.., stride) fp32 matrix, at `offsets` in each."""
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    lane = tl.arange(0, BLOCK)
    for start in range(first, last, BLOCK):
        row = (start + lane).to(tl.int64) * stride
        inside = (lane < last - start)[:, None] & mask[None, :]
        total += tl.sum(tl.load(base_ptr + row[:, None] + offsets[None, :], mask=inside, other=0.0), axis=0)
    return total


@triton.jit
def gram_product(
    scratch_ptr, partial_ptr, i, j, piece, T, blocks_n, blocks_all, parts_n, parts, columns_at, tiles_at,
    BLOCK_T: tl.constexpr, ROWS: tl.constexpr, COLUMN_BLOCKS: tl.constexpr, PART_BLOCK: tl.constexpr,
):  # fmt: skip
    """Piece (ROWS rows) of tile (i, j <= i) of the product, or at j = side the other terms for block i."""
    side = tl.num_programs(0)
    pairs = side * (side + 1) // 2
    if j < side:
        tile = i * (i + 1) // 2 + j
        inside = piece * (ROWS * BLOCK_T) + tl.arange(0, ROWS * BLOCK_T)
        offsets = tile.to(tl.int64) * (BLOCK_T * BLOCK_T) + inside
        step = pairs.to(tl.int64) * (BLOCK_T * BLOCK_T)
        every = inside >= 0
        gram = _sum_rows(scratch_ptr + tiles_at, 0, parts_n, step, offsets, every, PART_BLOCK, ROWS * BLOCK_T)
        gram *= _sum_rows(
            scratch_ptr + tiles_at, parts_n, parts, step, offsets, every, PART_BLOCK, ROWS * BLOCK_T
        )
        # A tile off the diagonal stands for its mirror image too.
        result = tl.where(i == j, 1.0, 2.0) * tl.sum(gram)
    else:
        tile = pairs + i
        rows = i * BLOCK_T + piece * ROWS + tl.arange(0, ROWS)
        squares_ptr = scratch_ptr + columns_at
        rows_ptr = squares_ptr + blocks_all
        cross = _sum_rows(rows_ptr, 0, blocks_n, T, rows, rows < T, COLUMN_BLOCKS, ROWS)
        cross *= _sum_rows(rows_ptr, blocks_n, blocks_all, T, rows, rows < T, COLUMN_BLOCKS, ROWS)
        result = 2.0 * tl.sum(cross)
        if i + piece == 0:
            one = tl.arange(0, 1)
            outer = _sum_rows(squares_ptr, 0, blocks_n, 1, one, one == 0, COLUMN_BLOCKS, 1)
            outer *= _sum_rows(squares_ptr, blocks_n, blocks_all, 1, one, one == 0, COLUMN_BLOCKS, 1)
            result += tl.sum(outer)
    tl.store(partial_ptr + tile * (BLOCK_T // ROWS) + piece, result)


@triton.jit(do_not_specialize=["T", "blocks_n", "blocks_all", "parts_n", "parts"])
def _gram_product_kernel(
    scratch_ptr, T, blocks_n, blocks_all, parts_n, parts, columns_at, tiles_at,
    BLOCK_T: tl.constexpr, ROWS: tl.constexpr, COLUMN_BLOCKS: tl.constexpr, PART_BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    j = tl.program_id(1)
    if j > i and j < tl.num_programs(0):
        return
    gram_product(
        scratch_ptr, scratch_ptr, i, j, tl.program_id(2), T, blocks_n, blocks_all, parts_n, parts,
        columns_at, tiles_at, BLOCK_T, ROWS, COLUMN_BLOCKS, PART_BLOCK,
    )  # fmt: skip


class GramKind(NamedTuple):
    """What a launch of one of the three kernels is made of."""

    grid: tuple[int, ...]
    numbers: tuple[int, ...]
    constants: dict[str, int | bool]
    options: dict[str, int]


def gram_kinds(
    plan: GramPlan, T: int, N: int, K: int, strides: tuple[int, ...]
) -> tuple[GramKind, GramKind, GramKind]:
    """Grid for one pair, numbers, constants and options of columns, parts and product."""
    stride_dt, stride_dn, _, _ = strides
    blocks, parts = plan.blocks_n + plan.blocks_k, plan.parts_n + plan.parts_k
    common = {"BLOCK_T": plan.block_t, "BLOCK_F": plan.block_f, "INTERPRET": INTERPRET}
    columns = {"BLOCK_T": plan.column_rows, "BLOCK_F": plan.column_width, "INTERPRET": INTERPRET}
    reads = {"ROWS": SLICE_ROWS, "COLUMN_BLOCKS": COLUMN_BLOCKS, "PART_BLOCK": PART_BLOCK}
    return (
        GramKind(
            (blocks,),
            (T, N, K, *strides, plan.blocks_n, plan.columns_at, plan.centred_at),
            {"ONE": plan.column_rows >= T, **columns},
            {"num_warps": 8},
        ),
        GramKind(
            (plan.side, plan.side, parts),
            (T, N, K, stride_dt, stride_dn, plan.parts_n, plan.features, plan.tiles_at, plan.centred_at),
            {"UNIT": stride_dn == 1, "EVEN": plan.even, **common},
            {"num_warps": plan.num_warps, "num_stages": plan.num_stages},
        ),
        GramKind(
            (plan.side, plan.side + 1, plan.block_t // SLICE_ROWS),
            (T, plan.blocks_n, blocks, plan.parts_n, parts, plan.columns_at, plan.tiles_at),
            {"BLOCK_T": plan.block_t, **reads},
            {"num_warps": 4},
        ),
    )


class _Gram(NamedTuple):
    scratch: int
    columns: Launch
    parts: Launch
    product: Launch
    finish: Launch


@functools.lru_cache(maxsize=1024)
def _gram_launches(
    T: int, N: int, K: int, strides: tuple[int, ...], operand: torch.dtype, device: int | None, aligned: tuple
) -> _Gram:
    plan = gram_plan(T, N, K, operand)
    columns, parts, product = gram_kinds(plan, T, N, K, strides)
    return _Gram(
        plan.scratch,
        Launch(_gram_columns_kernel, columns.grid, columns.numbers, columns.constants, **columns.options),
        Launch(_gram_parts_kernel, parts.grid, parts.numbers, parts.constants, **parts.options),
        Launch(_gram_product_kernel, product.grid, product.numbers, product.constants, **product.options),
        finish_launch(plan.partials, device),
    )


def centred_gram_norm_sq(dy_TN: torch.Tensor, x_TK: torch.Tensor) -> torch.Tensor:
    """||dy^T x||_F^2 from the token Gram matrices (0-d fp32); the module says how.

    Takes T K elements of the dtype of x, and the scratch of the plan, for a moment.
    """
    (T, N), K, device = dy_TN.shape, x_TK.shape[1], dy_TN.device
    if not (T and N and K):
        return torch.zeros((), dtype=torch.float32, device=device)
    strides = (*dy_TN.stride(), *x_TK.stride())
    gram = _gram_launches(T, N, K, strides, dy_TN.dtype, device.index, alignment(dy_TN, x_TK))
    scratch = torch.empty(gram.scratch, dtype=torch.float32, device=device)
    result = torch.empty((), dtype=torch.float32, device=device)
    gram.columns(dy_TN, x_TK, scratch)
    gram.parts(dy_TN, scratch)
    gram.product(scratch)
    gram.finish(scratch, result)
    return result
