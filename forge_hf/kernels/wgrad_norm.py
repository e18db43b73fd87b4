"""Squared Frobenius norm of a weight gradient from its pair, without the gradient.

    GEMM-reduce   ||G||^2 = sum_tiles sum (dy^T x)^2               2 T N K FLOP
    Gram          ||G||^2 = sum_ij (x x^T)_ij (dy dy^T)_ij           T^2 (N + K) FLOP, as i >= j suffices

Each program writes one partial and torch adds them up: no atomics, so the same pair gives the same bits.
Shapes: dy (T, N), x (T, K).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .embedding import RowSums, load_rows
from .plan import gram_is_cheaper, gram_part, gram_tile, norm_tile
from .tiles import GROUP_N, INTERPRET, LAUNCH_OPTIONS, accumulate_tile, dot, tile_order

__all__ = ["centred_gram_norm_sq", "gemm_norm_sq", "gram_is_cheaper", "gram_norm_sq"]


@triton.jit(do_not_specialize=["T"])
def _gemm_norm_kernel(
    dy_ptr, x_ptr, partial_ptr, head_ptr, sums_ptr, T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
    EVEN: tl.constexpr, EVEN_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    pid_n, pid_k = tile_order(pid, tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K), GROUP)
    acc = accumulate_tile(
        dy_ptr, x_ptr, pid_n * BLOCK_N + tl.arange(0, BLOCK_N), pid_k * BLOCK_K + tl.arange(0, BLOCK_K),
        T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
        EVEN, EVEN_T, BLOCK_N, BLOCK_K, BLOCK_T, INTERPRET,
    )  # fmt: skip
    if head_ptr is not None:
        n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc += load_rows(head_ptr, sums_ptr, n, pid_k * BLOCK_K + tl.arange(0, BLOCK_K), N, K)
    tl.store(partial_ptr + pid, tl.sum(acc * acc))


def gemm_norm_sq(dy_TN: torch.Tensor, x_TK: torch.Tensor, rows: RowSums | None = None) -> torch.Tensor:
    """||dy^T x + rows||_F^2 by the GEMM with a reduction for an epilogue (0-d fp32)."""
    (T, N), K = dy_TN.shape, x_TK.shape[1]
    tile = norm_tile(N, K, dy_TN.dtype, dy_TN.device)
    programs = tile.programs(N, K)
    partials = torch.empty(programs, dtype=torch.float32, device=dy_TN.device)
    if programs:
        _gemm_norm_kernel[(programs,)](
            dy_TN, x_TK, partials,
            None if rows is None else rows.head_of, None if rows is None else rows.sums,
            T, N, K, dy_TN.stride(0), dy_TN.stride(1), x_TK.stride(0), x_TK.stride(1),
            EVEN=N % tile.block_n == 0 and K % tile.block_k == 0, EVEN_T=T % tile.block_t == 0,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, BLOCK_T=tile.block_t, GROUP=GROUP_N,
            INTERPRET=INTERPRET, num_warps=tile.num_warps, num_stages=tile.num_stages, **LAUNCH_OPTIONS,
        )  # fmt: skip
    return partials.sum()


@triton.jit
def _gram_block(
    a_ptr, rows, cols, T, F, first_block, blocks, stride_t, stride_f,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """(a a^T)[rows, cols] over `blocks` blocks of features of a (T, F); rows and columns from T on are 0."""
    offs_f = tl.arange(0, BLOCK_F)
    step_f = tl.cast(stride_f, tl.int64)
    first = first_block * BLOCK_F
    a_ptr += first * step_f
    row_ptrs = a_ptr + rows.to(tl.int64)[:, None] * stride_t + offs_f[None, :] * step_f
    col_ptrs = a_ptr + cols.to(tl.int64)[None, :] * stride_t + offs_f[:, None] * step_f
    acc = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    for start in range(first, tl.minimum(first + blocks * BLOCK_F, F), BLOCK_F):
        inside = offs_f < F - start
        left = tl.load(row_ptrs, mask=(rows < T)[:, None] & inside[None, :], other=0.0)
        right = tl.load(col_ptrs, mask=inside[:, None] & (cols < T)[None, :], other=0.0)
        acc = dot(left, right, acc, INTERPRET)
        row_ptrs += BLOCK_F * step_f
        col_ptrs += BLOCK_F * step_f
    return acc


@triton.jit(do_not_specialize=["T"])
def _gram_norm_kernel(
    dy_ptr, x_ptr, partial_ptr, T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    j = tl.program_id(1)
    if j > i:
        return
    rows = i * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = j * BLOCK_T + tl.arange(0, BLOCK_T)
    gram = _gram_block(
        dy_ptr, rows, cols, T, N, 0, tl.cdiv(N, BLOCK_F), stride_dt, stride_dn, BLOCK_T, BLOCK_F, INTERPRET
    )
    gram *= _gram_block(
        x_ptr, rows, cols, T, K, 0, tl.cdiv(K, BLOCK_F), stride_xt, stride_xk, BLOCK_T, BLOCK_F, INTERPRET
    )
    # A tile off the diagonal stands for its mirror image too.
    share = tl.where(i == j, 1.0, 2.0)
    tl.store(partial_ptr + i * (i + 1) // 2 + j, share * tl.sum(gram))


@triton.jit
def _tile_offsets(i, j, BLOCK_T: tl.constexpr):
    """Where tile (i, j), j <= i, of a packed triangle of tiles lies."""
    lane = tl.arange(0, BLOCK_T)
    start = (i * (i + 1) // 2 + j).to(tl.int64) * (BLOCK_T * BLOCK_T)
    return start + lane[:, None] * BLOCK_T + lane[None, :]


@triton.jit(do_not_specialize=["T", "blocks", "first_part"])
def _gram_part_kernel(
    a_ptr, tiles_ptr, T, F, blocks, first_part, stride_t, stride_f,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One tile of a a^T over `blocks` blocks of features, stored as part `first_part` + program_id(2)."""
    i = tl.program_id(0)
    j = tl.program_id(1)
    part = tl.program_id(2)
    if j > i:
        return
    rows = i * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = j * BLOCK_T + tl.arange(0, BLOCK_T)
    gram = _gram_block(
        a_ptr, rows, cols, T, F, part * blocks, blocks, stride_t, stride_f, BLOCK_T, BLOCK_F, INTERPRET
    )
    side = tl.num_programs(0)
    tiles_ptr += (first_part + part).to(tl.int64) * (side * (side + 1) // 2) * (BLOCK_T * BLOCK_T)
    tl.store(tiles_ptr + _tile_offsets(i, j, BLOCK_T), gram)


@triton.jit(do_not_specialize=["parts_n", "parts"])
def _gram_product_kernel(tiles_ptr, partial_ptr, parts_n, parts, BLOCK_T: tl.constexpr):
    i = tl.program_id(0)
    j = tl.program_id(1)
    if j > i:
        return
    blocks = tl.num_programs(0)
    step = (blocks * (blocks + 1) // 2).to(tl.int64) * (BLOCK_T * BLOCK_T)
    tiles_ptr += _tile_offsets(i, j, BLOCK_T)
    gram_dy = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    for _part in range(0, parts_n):
        gram_dy += tl.load(tiles_ptr)
        tiles_ptr += step
    gram_x = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    for _part in range(parts_n, parts):
        gram_x += tl.load(tiles_ptr)
        tiles_ptr += step
    share = tl.where(i == j, 1.0, 2.0)
    tl.store(partial_ptr + i * (i + 1) // 2 + j, share * tl.sum(gram_dy * gram_x))


def gram_norm_sq(dy_TN: torch.Tensor, x_TK: torch.Tensor) -> torch.Tensor:
    """||dy^T x||_F^2 from the token Gram matrices, tile by tile (0-d fp32; rounding below 0 is cut off)."""
    (T, N), K = dy_TN.shape, x_TK.shape[1]
    block_t, block_f = gram_tile(T, dy_TN.dtype)
    blocks = triton.cdiv(T, block_t)
    pairs = blocks * (blocks + 1) // 2
    partials = torch.empty(pairs, dtype=torch.float32, device=dy_TN.device)
    strides = (dy_TN.stride(0), dy_TN.stride(1), x_TK.stride(0), x_TK.stride(1))
    blocking = {"BLOCK_T": block_t, "BLOCK_F": block_f, "INTERPRET": INTERPRET}
    options = {**blocking, "num_warps": 4, "num_stages": 3, **LAUNCH_OPTIONS}
    features = gram_part(pairs, N + K, block_f)
    if blocks and features >= N + K:
        _gram_norm_kernel[(blocks, blocks)](dy_TN, x_TK, partials, T, N, K, *strides, **options)
    elif blocks:
        parts_n, parts_k = triton.cdiv(N, features), triton.cdiv(K, features)
        parts = parts_n + parts_k
        tiles = torch.empty((parts, pairs, block_t, block_t), dtype=torch.float32, device=dy_TN.device)
        _gram_part_kernel[(blocks, blocks, parts_n)](
            dy_TN, tiles, T, N, features // block_f, 0, *strides[:2], **options
        )
        _gram_part_kernel[(blocks, blocks, parts_k)](
            x_TK, tiles, T, K, features // block_f, parts_n, *strides[2:], **options
        )
        _gram_product_kernel[(blocks, blocks)](
            tiles, partials, parts_n, parts, BLOCK_T=block_t, num_warps=4, **LAUNCH_OPTIONS
        )
    return partials.sum().clamp_(min=0.0)


def centred_gram_norm_sq(dy_TN: torch.Tensor, x_TK: torch.Tensor) -> torch.Tensor:
    """`gram_norm_sq` that does not cancel when the rows of x are nearly the same (0-d fp32).

        G = dy^T (x - 1 m^T) + s m^T,   s = sum_t dy_t,   for any row m: here the mean of x

    so ||G||^2 = ||dy^T xc||^2 + 2 (dy s) . (xc m) + |s|^2 |m|^2. `m` is rounded to the dtype of x, which
    keeps the identity. The copy xc takes T K elements for a moment.
    """
    mean_K = x_TK.mean(0, dtype=torch.float32).to(x_TK.dtype)
    total_N = dy_TN.sum(0, dtype=torch.float32)
    centred_TK = x_TK - mean_K
    cross = torch.mv(dy_TN, total_N.to(dy_TN.dtype)).float().dot(torch.mv(centred_TK, mean_K).float())
    outer = total_N.square().sum() * mean_K.float().square().sum()
    return (gram_norm_sq(dy_TN, centred_TK) + 2.0 * cross + outer).clamp_(min=0.0)
