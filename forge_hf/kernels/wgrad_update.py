"""Weight gradient and optimizer update in one kernel: the gradient lives in registers, one tile at a time.

    G = dy^T x;   norm_sq = sum G^2;   w, moments = rule(w, coefficient * G, moments)

A weight that is an embedding's too gets its row sums (`embedding.py`) added to G.
Shapes: dy (T, N), x (T, K), weight and moments (N, K). Source: FORGE, arXiv 2606.22932, section 3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..scalars import StepScalars
from .embedding import RowSums, load_rows
from .plan import update_tile, uses_chunks
from .rounding import hash_seed, lane_seed
from .rules import load_state, rule_arguments, update_elements
from .tiles import GROUP_N, accumulate_tile, tile_order
from .wgrad_chunks import chunk_rows, launch_wgrad_chunks

__all__ = ["launch_wgrad_update"]


@triton.jit
def _half_columns(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RIGHT: tl.constexpr):
    """Left or right half of a tile's columns; each thread keeps its elements."""
    left, right = tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
    if RIGHT:
        left = right
    return left


@triton.jit
def _half_rows(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOWER: tl.constexpr):
    """The even or odd groups of 8 rows, which every thread of a tensor-core product holds both."""
    tile = tl.permute(tl.reshape(tile, (ROWS // 16, 2, 8, COLUMNS)), (0, 2, 3, 1))
    upper, lower = tl.split(tile)
    if LOWER:
        upper = lower
    return tl.reshape(upper, (ROWS // 2, COLUMNS))


@triton.jit(do_not_specialize=["T", "rng_key"])
def _wgrad_update_kernel(
    dy_ptr, x_ptr, w_ptr, m_ptr, v_ptr, coefficient_ptr, norm_ptr, head_ptr, sums_ptr,
    T, N, K, stride_dt, stride_dn, stride_xt, stride_xk, rng_key,
    step_size, decay, beta1, beta1_rest, beta2, beta2_rest, denom_scale, eps,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr, EVEN_T: tl.constexpr, PARTS: tl.constexpr,
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
    norm_sq = 0.0
    if norm_ptr is not None:
        if head_ptr is None:
            tl.store(norm_ptr + pid, tl.sum(acc * acc))
    # A part at a time: gradient, weight and moments of a whole tile exceed the registers. Rows are split
    # first: short pieces of a row waste memory bandwidth, and 16 columns at a time took thrice as long as 64.
    # Asking for weight and moments earlier, into registers or by prefetch into the L2 cache, was slower.
    COLUMN_PARTS: tl.constexpr = PARTS // 2
    COLUMNS: tl.constexpr = BLOCK_K // COLUMN_PARTS
    row = tl.arange(0, BLOCK_N // 2)
    for row_part in tl.static_range(2):
        rows = _half_rows(acc, BLOCK_N, BLOCK_K, row_part == 1)
        n = pid_n * BLOCK_N + (row // 8) * 16 + row_part * 8 + row % 8
        first = n.to(tl.int64) * K + pid_k * BLOCK_K
        row_seed = hash_seed(first, rng_key)
        for part in tl.static_range(COLUMN_PARTS):
            g = rows
            if COLUMN_PARTS >= 2:
                g = _half_columns(g, BLOCK_N // 2, BLOCK_K, part >= COLUMN_PARTS // 2)
            if COLUMN_PARTS >= 4:
                right = part % (COLUMN_PARTS // 2) >= COLUMN_PARTS // 4
                g = _half_columns(g, BLOCK_N // 2, BLOCK_K // 2, right)
            lane = part * COLUMNS + tl.arange(0, COLUMNS)
            offset = first[:, None] + lane[None, :]
            if EVEN:  # a row of the tile is aligned to its length, so no 32-bit block ends inside
                mask = None
                seed = row_seed[:, None] + lane_seed(lane)[None, :]
            else:
                mask = (n < N)[:, None] & (pid_k * BLOCK_K + lane < K)[None, :]
                seed = hash_seed(offset, rng_key)
            if head_ptr is not None:
                g += load_rows(head_ptr, sums_ptr, n, pid_k * BLOCK_K + lane, N, K)
                if norm_ptr is not None:
                    norm_sq += tl.sum(g * g)
            w, m, v = load_state(w_ptr, m_ptr, v_ptr, offset, mask)
            update_elements(
                g, w, m, v, w_ptr, m_ptr, v_ptr, coefficient_ptr, offset, mask, seed,
                step_size, decay, beta1, beta1_rest, beta2, beta2_rest, denom_scale, eps,
                RULE, NESTEROV, STOCHASTIC, INTERPRET,
            )  # fmt: skip
    if norm_ptr is not None:
        if head_ptr is not None:
            tl.store(norm_ptr + pid, norm_sq)


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
    rows: RowSums | None = None,
) -> torch.Tensor | None:
    """Run the kernel on checked arguments; with T = 0 the gradient is 0 and decay and momentum still act."""
    (N, K), T = weight.shape, dy_TN.shape[0]
    chunk = chunk_rows(N, K) if uses_chunks(T, N, K, dy_TN.dtype) else 0
    if chunk:
        return launch_wgrad_chunks(
            weight, dy_TN, x_TK, moments, rule, scalars, coefficient, rng_key, want_norm_sq, chunk, rows
        )
    state_bytes = max(tensor.itemsize for tensor in (weight, *moments))
    tile = update_tile(T, N, K, dy_TN.dtype, state_bytes, weight.device)
    programs = tile.programs(N, K)
    partials = torch.empty(programs, dtype=torch.float32, device=weight.device) if want_norm_sq else None
    if programs:
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        if tile.max_registers is not None:
            options["maxnreg"] = tile.max_registers
        _wgrad_update_kernel[(programs,)](
            dy_TN, x_TK, weight, norm_ptr=partials,
            head_ptr=None if rows is None else rows.head_of, sums_ptr=None if rows is None else rows.sums,
            T=T, N=N, K=K,
            stride_dt=dy_TN.stride(0), stride_dn=dy_TN.stride(1),
            stride_xt=x_TK.stride(0), stride_xk=x_TK.stride(1),
            EVEN=N % tile.block_n == 0 and K % tile.block_k == 0, EVEN_T=T % tile.block_t == 0,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, BLOCK_T=tile.block_t, PARTS=tile.parts, GROUP=GROUP_N,
            **options, **rule_arguments(rule, scalars, coefficient, rng_key, moments),
        )  # fmt: skip
    return None if partials is None else partials.sum()
