"""Weight gradient and optimizer update in one kernel: the gradient lives in registers, one tile at a time.

    G = dy^T x;   norm_sq = sum G^2;   w, moments = rule(w, coefficient * G, moments)

Shapes: dy (T, N), x (T, K), weight and moments (N, K). Source: FORGE, arXiv 2606.22932, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..quantized import BLOCK, Moment, QuantizedMoment
from .moments import block_offsets, blocks_inside
from .plan import update_tile, uses_chunks
from .rounding import hash_seed, lane_seed
from .rules import load_state, update_elements
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
    dy_ptr, x_ptr, w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr,
    coefficient_ptr, numbers_ptr, norm_ptr, T, N, K, stride_dt, stride_dn, stride_xt, stride_xk, rng_key,
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
    if norm_ptr is not None:
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
            block = offset
            block_mask = mask
            if m_scale_ptr is not None:
                column = pid_k * BLOCK_K + part * COLUMNS
                block = block_offsets(n, column, K, COLUMNS)
                if not EVEN:
                    block_mask = blocks_inside(n < N, column, K, COLUMNS)
            w, low, m, v, m_scale, v_scale = load_state(
                w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, offset, mask, block, block_mask
            )
            update_elements(
                g, w, low, m, v, m_scale, v_scale,
                w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, coefficient_ptr, numbers_ptr,
                offset, mask, block, block_mask, seed, RULE, NESTEROV, STOCHASTIC, INTERPRET,
            )  # fmt: skip


def launch_wgrad_update(
    weight: torch.Tensor,
    dy_TN: torch.Tensor,
    x_TK: torch.Tensor,
    moments: Sequence[Moment],
    arguments: dict[str, Any],
    want_norm_sq: bool,
) -> torch.Tensor | None:
    """Run the kernel on checked arguments; with T = 0 the gradient is 0 and decay and momentum still act.

    `arguments` is what `rules.rule_arguments` gives for `moments` and the rest of the update.
    """
    (N, K), T = weight.shape, dy_TN.shape[0]
    quantized = any(isinstance(moment, QuantizedMoment) for moment in moments)
    if uses_chunks(T, N, K, dy_TN.dtype) and not (quantized and K % BLOCK):
        rows = chunk_rows(N, K)
        if rows:
            return launch_wgrad_chunks(weight, dy_TN, x_TK, arguments, want_norm_sq, rows)
    state_bytes = max([weight.itemsize, *(m.itemsize for m in moments if isinstance(m, torch.Tensor))])
    tile = update_tile(T, N, K, dy_TN.dtype, state_bytes, weight.device)
    if quantized:  # a part is whole blocks
        tile = tile._replace(parts=max(2, min(tile.parts, 2 * tile.block_k // BLOCK)))
    programs = tile.programs(N, K)
    partials = torch.empty(programs, dtype=torch.float32, device=weight.device) if want_norm_sq else None
    if programs:
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        if tile.max_registers is not None:
            options["maxnreg"] = tile.max_registers
        _wgrad_update_kernel[(programs,)](
            dy_TN, x_TK, weight, norm_ptr=partials,
            T=T, N=N, K=K,
            stride_dt=dy_TN.stride(0), stride_dn=dy_TN.stride(1),
            stride_xt=x_TK.stride(0), stride_xk=x_TK.stride(1),
            EVEN=N % tile.block_n == 0 and K % tile.block_k == 0, EVEN_T=T % tile.block_t == 0,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, BLOCK_T=tile.block_t, PARTS=tile.parts, GROUP=GROUP_N,
            **options, **arguments,
        )  # fmt: skip
    return None if partials is None else partials.sum()
