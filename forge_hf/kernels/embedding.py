"""Embedding gradients from (ids, dY): sums by row without atomics, and the update of a whole table.

    sums[h] = sum of dY_t over the tokens t with ids_t = ids_h      one h per row that has tokens: its head
    head_of[n] = h, or -1 where row n has no token
    G[n] = sums[head_of[n]], or 0;   w, moments = rule(w, coefficient * G, moments)

The ids are sorted first (stable), so the tokens of a row are neighbours and its head is the first of them.
Runs are added up in pieces of PIECE tokens, then the pieces, always in the same order: the same step twice
gives the same bits, a frequent token is no bottleneck, and nothing is read back to the host.
Shapes: T tokens, N rows of the table, K columns; ids (T,), dY and sums (T, K), weight and moments (N, K).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .. import quantized
from .moments import block_offsets, blocks_inside
from .rounding import hash_seed, lane_seed, store_rounded
from .rules import RuleArguments, load_state, named, update_elements
from .tiles import INTERPRET, LAUNCH_OPTIONS, to_fp32

__all__ = [
    "RowSums",
    "accumulate_rows",
    "add_rows",
    "launch_table_update",
    "load_rows",
    "rows_norm_sq",
    "sum_rows",
]

#: Sorted tokens that one program adds up; a row with more has several programs.
PIECE = 64
#: Tokens and columns of one load.
ROWS, COLUMNS = 16, 256
#: Elements of a tile of the table.
TILE = 1024
#: Bytes of the sums that exist at a time while they are added to a dense gradient.
SLAB_BYTES = 32 << 20


class RowSums(NamedTuple):
    """Sums by row: `sums` (T, K) fp32, of which the heads' rows are set, and `head_of` (N,) int32."""

    head_of: torch.Tensor
    sums: torch.Tensor


@triton.jit(do_not_specialize=["T"])
def _piece_kernel(
    ids_ptr, order_ptr, dy_ptr, sums_ptr, T, K, stride_t, stride_k,
    PIECE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Sum the tokens of sorted position i's run that lie in its piece, if i is the first of them."""
    i = tl.program_id(0)
    row = tl.load(ids_ptr + i)
    before = tl.load(ids_ptr + tl.maximum(i - 1, 0))
    if (row < 0) | ((i % PIECE != 0) & (before == row)):
        return
    place = i // PIECE * PIECE + tl.arange(0, PIECE)
    same = tl.load(ids_ptr + place, mask=(place >= i) & (place < T), other=-1) == row
    count = tl.sum(same.to(tl.int32))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step_k = column.to(tl.int64)[None, :] * stride_k
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, count, ROWS):
        lane = start + tl.arange(0, ROWS)
        token = tl.load(order_ptr + i + lane, mask=lane < count, other=0).to(tl.int64)
        mask = (lane < count)[:, None] & (column < K)[None, :]
        dy = tl.load(dy_ptr + token[:, None] * stride_t + step_k, mask=mask, other=0.0)
        total += tl.sum(to_fp32(dy, INTERPRET), axis=0)
    tl.store(sums_ptr + i.to(tl.int64) * K + column, total, mask=column < K)


@triton.jit(do_not_specialize=["T"])
def _join_kernel(
    ids_ptr, sums_ptr, head_ptr, norm_ptr, T, K,
    PIECE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the later pieces of the run that begins at sorted position i, and note its head."""
    i = tl.program_id(0)
    row = tl.load(ids_ptr + i)
    before = tl.load(ids_ptr + tl.maximum(i - 1, 0))
    if (row < 0) | ((i > 0) & (before == row)):
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < K
    target = sums_ptr + i.to(tl.int64) * K + column
    total = tl.load(target, mask=inside, other=0.0)
    second = (i // PIECE + 1) * PIECE
    # Most runs end in their first piece; only the others look how many they have.
    limit = second
    if tl.load(ids_ptr + second, mask=second < T, other=-1) == row:
        limit = T
    count = 0
    for start in range(second, limit, PIECE * PIECE):
        place = start + PIECE * tl.arange(0, PIECE)
        same = tl.load(ids_ptr + place, mask=place < T, other=-1) == row
        count += tl.sum(same.to(tl.int32))
    for start in range(0, count, ROWS):
        lane = start + tl.arange(0, ROWS)
        source = (second + PIECE * lane).to(tl.int64) * K
        mask = (lane < count)[:, None] & inside[None, :]
        piece = tl.load(sums_ptr + source[:, None] + column[None, :], mask=mask, other=0.0)
        total += tl.sum(piece, axis=0)
    if count > 0:
        tl.store(target, total, mask=inside)
    if head_ptr is not None:
        if tl.program_id(1) == 0:
            tl.store(head_ptr + row, i)
    if norm_ptr is not None:
        tl.store(norm_ptr + i * tl.num_programs(1) + tl.program_id(1), tl.sum(total * total))


@triton.jit
def load_rows(head_ptr, sums_ptr, n, column, N, K):
    """A tile of the gradient at rows `n` and columns `column`: 0 for rows without tokens, and outside."""
    head = tl.load(head_ptr + n, mask=n < N, other=-1)
    source = head.to(tl.int64)[:, None] * K + column[None, :]
    return tl.load(sums_ptr + source, mask=(head >= 0)[:, None] & (column < K)[None, :], other=0.0)


@triton.jit
def _add_rows_kernel(
    target_ptr, head_ptr, sums_ptr, N, K, stride_target,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """target[n] += sums[head_of[n]], for rows that have a head."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.load(head_ptr + n, mask=n < N, other=-1)
    mask = (head >= 0)[:, None] & (column < K)[None, :]
    offset = n.to(tl.int64)[:, None] * stride_target + column[None, :]
    value = to_fp32(tl.load(target_ptr + offset, mask=mask, other=0.0), INTERPRET)
    value += load_rows(head_ptr, sums_ptr, n, column, N, K)
    store_rounded(target_ptr, offset, value, mask, 0, 0, False, INTERPRET)


@triton.jit(do_not_specialize=["rng_key"])
def _table_update_kernel(
    head_ptr, sums_ptr, w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, coefficient_ptr, numbers_ptr,
    rng_key, N, K,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = n.to(tl.int64) * K + tl.program_id(1) * COLUMNS
    lane = tl.arange(0, COLUMNS)
    column = tl.program_id(1) * COLUMNS + lane
    g = load_rows(head_ptr, sums_ptr, n, column, N, K)
    offset = first[:, None] + lane[None, :]
    if EVEN:  # a row of the tile is aligned to its length, so no 32-bit block ends inside
        mask = None
        seed = hash_seed(first, rng_key)[:, None] + lane_seed(lane)[None, :]
    else:
        mask = (n < N)[:, None] & (column < K)[None, :]
        seed = hash_seed(offset, rng_key)
    block = offset
    block_mask = mask
    if m_scale_ptr is not None:
        block = block_offsets(n, tl.program_id(1) * COLUMNS, K, COLUMNS)
        if not EVEN:
            block_mask = blocks_inside(n < N, tl.program_id(1) * COLUMNS, K, COLUMNS)
    w, low, m, v, m_scale, v_scale = load_state(
        w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, offset, mask, block, block_mask
    )
    update_elements(
        g, w, low, m, v, m_scale, v_scale,
        w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, coefficient_ptr, numbers_ptr,
        offset, mask, block, block_mask, seed, RULE, NESTEROV, STOCHASTIC, INTERPRET,
    )  # fmt: skip


class _Sorted(NamedTuple):
    """All lookups as one: ascending ids (T,), where each token was, and dY (T, K)."""

    ids: torch.Tensor
    order: torch.Tensor
    dy_TK: torch.Tensor


def _sort(lookups: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> _Sorted:
    held = [lookup for lookup in lookups if lookup[0].shape[0]] or list(lookups[:1])
    ids_T, dy_TK = held[0]
    if len(held) > 1:
        ids_T, dy_TK = torch.cat([ids for ids, _ in held]), torch.cat([dy for _, dy in held])
    return _Sorted(*torch.sort(ids_T, stable=True), dy_TK)


def _sum_sorted(
    tokens: _Sorted, dy_TK: torch.Tensor, head_of: torch.Tensor | None, partials: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums (T, K) of the tokens' dY, or of some columns of it; fills `head_of` and `partials`."""
    T, K = dy_TK.shape
    sums = torch.empty((T, K), dtype=torch.float32, device=dy_TK.device)
    grid = (T, triton.cdiv(K, COLUMNS))
    if T and K:
        blocking = {"PIECE": PIECE, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": 4, **LAUNCH_OPTIONS}
        _piece_kernel[grid](
            tokens.ids, tokens.order, dy_TK, sums, T, K, *dy_TK.stride(), INTERPRET=INTERPRET, **blocking
        )
        _join_kernel[grid](tokens.ids, sums, head_of, partials, T, K, **blocking)
    return sums


def _no_heads(N: int, device: torch.device) -> torch.Tensor:
    return torch.full((N,), -1, dtype=torch.int32, device=device)


def _partials(tokens: _Sorted) -> torch.Tensor:
    """Room for one sum of squares per program; those that are no head leave their 0."""
    T, K = tokens.dy_TK.shape
    return torch.zeros(T * triton.cdiv(K, COLUMNS), dtype=torch.float32, device=tokens.dy_TK.device)


def sum_rows(
    lookups: Sequence[tuple[torch.Tensor, torch.Tensor]], N: int, want_norm_sq: bool
) -> tuple[RowSums, torch.Tensor | None]:
    """Sum checked lookups by row of a table of N rows.

    Returns:
        The sums, and their squared norm (0-d fp32) if wanted.
    """
    tokens = _sort(lookups)
    head_of = _no_heads(N, tokens.dy_TK.device)
    partials = _partials(tokens) if want_norm_sq else None
    sums = _sum_sorted(tokens, tokens.dy_TK, head_of, partials)
    return RowSums(head_of, sums), None if partials is None else partials.sum()


def rows_norm_sq(lookups: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Squared norm of the sums of checked lookups (0-d fp32); the table's size does not matter."""
    tokens = _sort(lookups)
    partials = _partials(tokens)
    _sum_sorted(tokens, tokens.dy_TK, None, partials)
    return partials.sum()


def add_rows(target: torch.Tensor, rows: RowSums, first_row: int = 0) -> None:
    """Add to `target` (rows of unit stride) the gradient's rows from `first_row` on, summed in fp32."""
    N, K = target.shape
    if N and rows.sums.shape[0]:
        _add_rows_kernel[(triton.cdiv(N, ROWS), triton.cdiv(K, COLUMNS))](
            target, rows.head_of[first_row:], rows.sums, N, K, target.stride(0),
            ROWS=ROWS, COLUMNS=COLUMNS, INTERPRET=INTERPRET, num_warps=4, **LAUNCH_OPTIONS,
        )  # fmt: skip


def accumulate_rows(
    buffer: torch.Tensor, lookups: Sequence[tuple[torch.Tensor, torch.Tensor]], slab_bytes: int = SLAB_BYTES
) -> None:
    """Add checked lookups to a dense gradient (N, K); sums exist for some columns at a time."""
    N, K = buffer.shape
    tokens = _sort(lookups)
    head_of = _no_heads(N, buffer.device)
    step = max(COLUMNS, slab_bytes // (4 * max(1, tokens.ids.shape[0])) // COLUMNS * COLUMNS)
    for first in range(0, K, step):
        columns = slice(first, first + step)
        sums = _sum_sorted(tokens, tokens.dy_TK[:, columns], head_of)
        add_rows(buffer[:, columns], RowSums(head_of, sums))


def launch_table_update(weight: torch.Tensor, rows: RowSums, arguments: RuleArguments) -> None:
    """Run the update on checked arguments: rows without tokens have gradient 0, and still decay."""
    N, K = weight.shape
    columns = max(quantized.BLOCK, min(TILE, triton.next_power_of_2(K)))
    while K % columns and columns > quantized.BLOCK:
        columns //= 2
    height = max(1, TILE // columns)
    if N and K:
        _table_update_kernel[(triton.cdiv(N, height), triton.cdiv(K, columns))](
            rows.head_of, rows.sums, weight, *arguments.pointers, arguments.rng_key, N, K,
            EVEN=N % height == 0 and K % columns == 0, ROWS=height, COLUMNS=columns, INTERPRET=INTERPRET,
            num_warps=4, **named(arguments.constants), **LAUNCH_OPTIONS,
        )  # fmt: skip
