"""Weight gradient and optimizer update in one kernel: the gradient lives in registers, one tile at a time.

    G = dy^T x;   norm_sq = sum G^2;   w, moments = rule(w, coefficient * G, moments)

A weight that is an embedding's too gets its row sums (`embedding.py`) added to G.
Shapes: dy (T, N), x (T, K), weight and moments (N, K). Source: FORGE, arXiv 2606.22932, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..quantized import Moment, QuantizedMoment
from .embedding import RowSums, load_rows
from .moments import block_offsets, blocks_inside
from .plan import update_tile
from .pointer_table import ELEMENTS, address
from .replay import Launch
from .rounding import hash_seed, lane_seed
from .rules import RuleArguments, load_state, named, update_elements
from .tiles import GROUP_N, INTERPRET, accumulate_tile, tile_order
from .wgrad_norm import summed

__all__ = ["GROUP_COLUMNS", "FusedUpdate", "fused_update", "grouped_update"]

#: Columns of the table of a group.
GROUP_COLUMNS = 10


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


@triton.jit
def _update_tile(
    pid, dy_ptr, x_ptr, w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr,
    coefficient_ptr, numbers_ptr, norm_ptr, head_ptr, sums_ptr, rng_key,
    T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr, EVEN_T: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Tile number `pid` of one weight."""
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
    if norm_ptr is not None:
        if head_ptr is not None:
            tl.store(norm_ptr + pid, norm_sq)


@triton.jit(do_not_specialize=["T", "rng_key"])
def _wgrad_update_kernel(
    dy_ptr, x_ptr, w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr,
    coefficient_ptr, numbers_ptr, norm_ptr, head_ptr, sums_ptr, rng_key,
    T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr, EVEN_T: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    _update_tile(
        tl.program_id(0), dy_ptr, x_ptr, w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr,
        coefficient_ptr, numbers_ptr, norm_ptr, head_ptr, sums_ptr, rng_key,
        T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
        RULE, NESTEROV, STOCHASTIC, EVEN, EVEN_T, PARTS, BLOCK_N, BLOCK_K, BLOCK_T, GROUP, INTERPRET,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _grouped_update_kernel(
    table_ptr, coefficient_ptr, numbers_ptr, norm_ptr,
    T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr, EVEN_T: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    INTERPRET: tl.constexpr,
    PAIR: tl.constexpr, WEIGHT: tl.constexpr, LOW: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    M_SCALE: tl.constexpr, V_SCALE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same for many weights alike, a row of the table each: axis 0 are tiles, axis 1 weights."""
    member = tl.program_id(1)
    table_ptr += member * COLUMNS
    if norm_ptr is not None:
        norm_ptr += member * tl.num_programs(0)
    _update_tile(
        tl.program_id(0), address(table_ptr, 0, PAIR), address(table_ptr, 1, PAIR),
        address(table_ptr, 2, WEIGHT), address(table_ptr, 3, LOW), address(table_ptr, 4, M),
        address(table_ptr, 5, V), address(table_ptr, 6, M_SCALE), address(table_ptr, 7, V_SCALE),
        coefficient_ptr, numbers_ptr, norm_ptr, None, None, tl.load(table_ptr + 8).to(tl.uint32),
        T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
        RULE, NESTEROV, STOCHASTIC, EVEN, EVEN_T, PARTS, BLOCK_N, BLOCK_K, BLOCK_T, GROUP, INTERPRET,
    )  # fmt: skip


class FusedUpdate(NamedTuple):
    """The launch of one weight's update, which only the tensors change.

    Attributes:
        programs: Partials of the norm.
        update: Takes (dy, x, weight, *pointers, partials, head_of, sums, rng_key).
    """

    programs: int
    update: Launch

    def run(
        self,
        weight: torch.Tensor,
        dy_TN: torch.Tensor,
        x_TK: torch.Tensor,
        arguments: RuleArguments,
        want_norm_sq: bool,
        rows: RowSums | None = None,
    ) -> torch.Tensor | None:
        """Launch; returns the squared norm (0-d fp32) if wanted."""
        head_of, sums = (None, None) if rows is None else rows

        def launch(partials: torch.Tensor | None) -> None:
            self.update(dy_TN, x_TK, weight, *arguments.pointers, partials, head_of, sums, arguments.rng_key)

        if want_norm_sq:
            return summed(self.programs, weight.device, launch)
        launch(None)
        return None


def fused_update(
    weight: torch.Tensor,
    dy_TN: torch.Tensor,
    x_TK: torch.Tensor,
    moments: Sequence[Moment],
    constants: tuple[str, bool, bool],
) -> FusedUpdate:
    """Choose the tile; the launch fits all tensors of these shapes, strides, dtypes and alignment."""
    programs, numbers, flags, options = _chosen(weight, dy_TN, x_TK, moments, constants)
    return FusedUpdate(programs, Launch(_wgrad_update_kernel, (programs,), numbers, flags, **options))


def grouped_update(
    weight: torch.Tensor,
    dy_TN: torch.Tensor,
    x_TK: torch.Tensor,
    moments: Sequence[Moment],
    low: torch.Tensor | None,
    constants: tuple[str, bool, bool],
    count: int,
) -> FusedUpdate:
    """`fused_update` for `count` weights alike; the launch takes (table, coefficient, numbers, partials).

    Columns of the table: dy, x, weight, low bits, both moments, both scales, random key, and one that makes
    a row a multiple of 16 bytes. Partials are (count, programs).
    """
    programs, numbers, flags, options = _chosen(weight, dy_TN, x_TK, moments, constants)
    stored: list[torch.Tensor | None] = [dy_TN, weight, low, None, None, None, None]
    for index, moment in enumerate(moments):
        stored[3 + index], stored[5 + index] = moment if isinstance(moment, tuple) else (moment, None)
    elements = [None if tensor is None else ELEMENTS[tensor.dtype] for tensor in stored]
    names = ("PAIR", "WEIGHT", "LOW", "M", "V", "M_SCALE", "V_SCALE")
    flags |= {**dict(zip(names, elements, strict=True)), "COLUMNS": GROUP_COLUMNS}
    return FusedUpdate(programs, Launch(_grouped_update_kernel, (programs, count), numbers, flags, **options))


def _chosen(
    weight: torch.Tensor,
    dy_TN: torch.Tensor,
    x_TK: torch.Tensor,
    moments: Sequence[Moment],
    constants: tuple[str, bool, bool],
) -> tuple[int, tuple[int, ...], dict[str, Any], dict[str, Any]]:
    """Programs, run-time numbers, constants and options of the launch."""
    (N, K), T = weight.shape, dy_TN.shape[0]
    state_bytes = max([weight.itemsize, *(m.itemsize for m in moments if isinstance(m, torch.Tensor))])
    quantized = any(isinstance(moment, QuantizedMoment) for moment in moments)
    tile = update_tile(T, N, K, dy_TN.dtype, state_bytes, weight.device, quantized)
    programs = tile.programs(N, K)
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.max_registers is not None:
        options["maxnreg"] = tile.max_registers
    flags: dict[str, Any] = {
        **named(constants),
        "EVEN": N % tile.block_n == 0 and K % tile.block_k == 0,
        "EVEN_T": T % tile.block_t == 0,
        "PARTS": tile.parts,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "BLOCK_T": tile.block_t,
        "GROUP": GROUP_N,
        "INTERPRET": INTERPRET,
    }
    numbers = (T, N, K, *dy_TN.stride(), *x_TK.stride())
    return programs, numbers, flags, options
