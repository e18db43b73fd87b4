"""Squared Frobenius norm of a weight gradient from its pair, without the gradient, by the GEMM.

    ||G||^2 = sum_tiles sum (dy^T x)^2               2 T N K FLOP

Each program writes one partial and one more program adds them up: no atomics, so the same pair gives the same
bits. `wgrad_gram` is faster for few tokens. Shapes: dy (T, N), x (T, K).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .plan import norm_tile
from .tiles import GROUP_N, INTERPRET, LAUNCH_OPTIONS, accumulate_tile, tile_order
from .wgrad_gram import finish_sum

__all__ = ["gemm_norm_sq"]


@triton.jit(do_not_specialize=["T"])
def _gemm_norm_kernel(
    dy_ptr, x_ptr, partial_ptr, T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
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
    tl.store(partial_ptr + pid, tl.sum(acc * acc))


def gemm_norm_sq(dy_TN: torch.Tensor, x_TK: torch.Tensor) -> torch.Tensor:
    """||dy^T x||_F^2 by the GEMM with a reduction for an epilogue (0-d fp32)."""
    (T, N), K = dy_TN.shape, x_TK.shape[1]
    tile = norm_tile(N, K, dy_TN.dtype, dy_TN.device)
    programs = tile.programs(N, K)
    partials = torch.empty(programs, dtype=torch.float32, device=dy_TN.device)
    if programs:
        _gemm_norm_kernel[(programs,)](
            dy_TN, x_TK, partials, T, N, K, dy_TN.stride(0), dy_TN.stride(1), x_TK.stride(0), x_TK.stride(1),
            EVEN=N % tile.block_n == 0 and K % tile.block_k == 0, EVEN_T=T % tile.block_t == 0,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, BLOCK_T=tile.block_t, GROUP=GROUP_N,
            INTERPRET=INTERPRET, num_warps=tile.num_warps, num_stages=tile.num_stages, **LAUNCH_OPTIONS,
        )  # fmt: skip
    return finish_sum(partials, programs)
