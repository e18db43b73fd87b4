"""Weight gradient and optimizer update in one kernel: the gradient lives in registers, one tile at a time.

    G = dy^T x;   norm_sq = sum G^2;   w, moments = rule(w, coefficient * G, moments)

Shapes: dy (T, N), x (T, K), weight and moments (N, K). Source: FORGE, arXiv 2606.22932, section 3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..scalars import StepScalars
from .rules import rule_arguments, update_elements
from .tiles import GROUP_N, accumulate_tile, gemm_tile, tile_order

__all__ = ["launch_wgrad_update"]


@triton.jit
def _halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _quarter(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr):
    """Quarter number PART of a tile's columns; each thread keeps its elements."""
    left, right = _halves(tile, ROWS, COLUMNS)
    if PART >= 2:
        left = right
    left, right = _halves(left, ROWS, COLUMNS // 2)
    if PART % 2 == 1:
        left = right
    return left


@triton.jit(do_not_specialize=["T", "rng_key"])
def _wgrad_update_kernel(
    dy_ptr, x_ptr, w_ptr, m_ptr, v_ptr, coefficient_ptr, norm_ptr,
    T, N, K, stride_dt, stride_dn, stride_xt, stride_xk, rng_key,
    step_size, decay, beta1, beta1_rest, beta2, beta2_rest, denom_scale, eps,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    pid_n, pid_k = tile_order(pid, tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K), GROUP)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = accumulate_tile(
        dy_ptr, x_ptr, offs_n, offs_k, T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
        EVEN, BLOCK_N, BLOCK_K, BLOCK_T, INTERPRET,
    )  # fmt: skip
    if norm_ptr is not None:
        tl.store(norm_ptr + pid, tl.sum(acc * acc))
    # A quarter of the columns at a time: gradient, weight and moments of a whole tile exceed the registers
    # (halves spill up to 308 bytes per thread on sm_90, quarters none).
    QUARTER: tl.constexpr = BLOCK_K // 4
    rows = offs_n.to(tl.int64)[:, None] * K
    for part in tl.static_range(4):
        cols = pid_k * BLOCK_K + part * QUARTER + tl.arange(0, QUARTER)
        mask = (offs_n < N)[:, None] & (cols < K)[None, :]
        update_elements(
            _quarter(acc, BLOCK_N, BLOCK_K, part), w_ptr, m_ptr, v_ptr, coefficient_ptr,
            rows + cols[None, :], mask, rng_key,
            step_size, decay, beta1, beta1_rest, beta2, beta2_rest, denom_scale, eps,
            RULE, NESTEROV, STOCHASTIC, INTERPRET,
        )  # fmt: skip


def launch_wgrad_update(
    weight: torch.Tensor,
    dy_TN: torch.Tensor,
    x_TK: torch.Tensor,
    moments: tuple[torch.Tensor, ...],
    rule: str,
    scalars: StepScalars,
    coefficient: torch.Tensor | None,
    rng_key: int | None,
    want_norm_sq: bool,
) -> torch.Tensor | None:
    """Run the kernel on checked arguments; with T = 0 the gradient is 0 and decay and momentum still act."""
    (N, K), T = weight.shape, dy_TN.shape[0]
    tile = gemm_tile(dy_TN.dtype)
    programs = triton.cdiv(N, tile.block_n) * triton.cdiv(K, tile.block_k)
    partials = torch.empty(programs, dtype=torch.float32, device=weight.device) if want_norm_sq else None
    if programs:
        _wgrad_update_kernel[(programs,)](
            dy_TN, x_TK, weight, norm_ptr=partials,
            T=T, N=N, K=K,
            stride_dt=dy_TN.stride(0), stride_dn=dy_TN.stride(1),
            stride_xt=x_TK.stride(0), stride_xk=x_TK.stride(1),
            EVEN=T % tile.block_t == 0 and N % tile.block_n == 0 and K % tile.block_k == 0,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, BLOCK_T=tile.block_t, GROUP=GROUP_N,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
            **rule_arguments(rule, scalars, coefficient, rng_key, moments),
        )  # fmt: skip
    return None if partials is None else partials.sum()
