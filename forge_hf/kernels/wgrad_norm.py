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

from .tiles import GROUP_N, INTERPRET, LAUNCH_OPTIONS, accumulate_tile, dot, gemm_tile, gram_tile, tile_order

__all__ = ["gemm_norm_sq", "gram_is_cheaper", "gram_norm_sq"]


def gram_is_cheaper(tokens: int, out_features: int, in_features: int) -> bool:
    """Whether the Gram form takes fewer FLOP than the GEMM."""
    return tokens * (out_features + in_features) < 2 * out_features * in_features


@triton.jit(do_not_specialize=["T"])
def _gemm_norm_kernel(
    dy_ptr, x_ptr, partial_ptr, T, N, K, stride_dt, stride_dn, stride_xt, stride_xk, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    pid_n, pid_k = tile_order(pid, tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K), GROUP)
    acc = accumulate_tile(
        dy_ptr, x_ptr, pid_n * BLOCK_N + tl.arange(0, BLOCK_N), pid_k * BLOCK_K + tl.arange(0, BLOCK_K),
        T, N, K, stride_dt, stride_dn, stride_xt, stride_xk, EVEN, BLOCK_N, BLOCK_K, BLOCK_T, INTERPRET,
    )  # fmt: skip
    tl.store(partial_ptr + pid, tl.sum(acc * acc))


def gemm_norm_sq(dy_TN: torch.Tensor, x_TK: torch.Tensor) -> torch.Tensor:
    """||dy^T x||_F^2 by the GEMM with a reduction for an epilogue (0-d fp32)."""
    (T, N), K = dy_TN.shape, x_TK.shape[1]
    tile = gemm_tile(dy_TN.dtype)
    programs = triton.cdiv(N, tile.block_n) * triton.cdiv(K, tile.block_k)
    partials = torch.empty(programs, dtype=torch.float32, device=dy_TN.device)
    if programs:
        _gemm_norm_kernel[(programs,)](
            dy_TN, x_TK, partials, T, N, K, dy_TN.stride(0), dy_TN.stride(1), x_TK.stride(0), x_TK.stride(1),
            EVEN=T % tile.block_t == 0 and N % tile.block_n == 0 and K % tile.block_k == 0,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, BLOCK_T=tile.block_t, GROUP=GROUP_N,
            INTERPRET=INTERPRET, num_warps=tile.num_warps, num_stages=tile.num_stages, **LAUNCH_OPTIONS,
        )  # fmt: skip
    return partials.sum()


@triton.jit
def _gram_block(
    a_ptr, rows, cols, T, F, stride_t, stride_f,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """(a a^T)[rows, cols] for a (T, F); rows and columns at or beyond T are 0."""
    offs_f = tl.arange(0, BLOCK_F)
    step_f = tl.cast(stride_f, tl.int64)
    row_ptrs = a_ptr + rows.to(tl.int64)[:, None] * stride_t + offs_f[None, :] * step_f
    col_ptrs = a_ptr + cols.to(tl.int64)[None, :] * stride_t + offs_f[:, None] * step_f
    acc = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    for start in range(0, F, BLOCK_F):
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
    gram = _gram_block(dy_ptr, rows, cols, T, N, stride_dt, stride_dn, BLOCK_T, BLOCK_F, INTERPRET)
    gram *= _gram_block(x_ptr, rows, cols, T, K, stride_xt, stride_xk, BLOCK_T, BLOCK_F, INTERPRET)
    # A tile off the diagonal stands for its mirror image too.
    share = tl.where(i == j, 1.0, 2.0)
    tl.store(partial_ptr + i * (i + 1) // 2 + j, share * tl.sum(gram))


def gram_norm_sq(dy_TN: torch.Tensor, x_TK: torch.Tensor) -> torch.Tensor:
    """||dy^T x||_F^2 from the token Gram matrices, tile by tile (0-d fp32; rounding below 0 is cut off)."""
    (T, N), K = dy_TN.shape, x_TK.shape[1]
    block_t, block_f = gram_tile(T, dy_TN.dtype)
    blocks = triton.cdiv(T, block_t)
    partials = torch.empty(blocks * (blocks + 1) // 2, dtype=torch.float32, device=dy_TN.device)
    if blocks:
        _gram_norm_kernel[(blocks, blocks)](
            dy_TN, x_TK, partials, T, N, K, dy_TN.stride(0), dy_TN.stride(1), x_TK.stride(0), x_TK.stride(1),
            BLOCK_T=block_t, BLOCK_F=block_f, INTERPRET=INTERPRET,
            num_warps=4, num_stages=3, **LAUNCH_OPTIONS,
        )  # fmt: skip
    return partials.sum().clamp_(min=0.0)
