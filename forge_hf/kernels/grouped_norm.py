"""Squared norms of many weights' gradients, in few launches.

    columns, parts, product   one launch each for all pairs of a kind that go by Gram matrices (`wgrad_gram`)
    GEMM                      one launch for all pairs of a kind that go by it (`wgrad_norm`)
    finish                    one launch for all pairs of all kinds

A kind is a shape with its strides and dtype. Every pair has a row in one table: its addresses, and where in
one buffer its partials and its scratch are. Programs, tiles and the order of sums are those of one pair
alone, so the bits are too. On the host of an H200 a pair alone costs 25 to 41 us.

Shapes: dy (T, N), x (T, K).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .checks import FLOATS, Segment
from .norm_plan import GramPlan, gram_plan, norm_tile, uses_descriptors, uses_gram
from .plan import Tile
from .pointer_table import ELEMENTS, address, pointer_table
from .replay import Launch
from .wgrad_gram import gram_columns, gram_kinds, gram_part, gram_product
from .wgrad_norm import FINISH_BLOCK, finished, gemm_constants, product_tile

__all__ = ["grouped_norms_sq"]

#: Bytes of scratch of all pairs that one launch serves, unless one pair alone takes more. For 14336x4096 in
#: bf16 a pair takes 0.6 MiB at T=32, 5.6 at 128, 21 at 512 and 44 at 2048: many pairs a launch where the host
#: is the bound, and little more memory than the largest pair takes anyway.
SCRATCH_BYTES = 64 << 20
#: Most programs on the second and third axis of a grid.
GRID_LIMIT = 65535
#: Partials and scratch of a pair begin at multiples of so many fp32 elements, 128 bytes.
SLOT = tl.constexpr(32)

# Columns of the table; offsets count elements of the buffer, PLACE is the index of the result.
DY, X, PARTIALS, SCRATCH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
COUNT, PLACE, WIDTH = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)


@triton.jit
def _part_of(buffer_ptr, row_ptr, column: tl.constexpr):
    """Pointer to the partials or the scratch of a pair."""
    return buffer_ptr + tl.multiple_of(tl.load(row_ptr + column), SLOT)


@triton.jit(do_not_specialize=["first", "T"])
def _gemms_kernel(
    table_ptr, buffer_ptr, first, T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
    ELEMENT: tl.constexpr, EVEN: tl.constexpr, EVEN_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    row_ptr = table_ptr + (first + tl.program_id(1)) * WIDTH
    pid = tl.program_id(0)
    acc, _, _ = product_tile(
        address(row_ptr, DY, ELEMENT), address(row_ptr, X, ELEMENT), pid,
        T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
        EVEN, EVEN_T, BLOCK_N, BLOCK_K, BLOCK_T, GROUP, INTERPRET,
    )  # fmt: skip
    tl.store(_part_of(buffer_ptr, row_ptr, PARTIALS) + pid, tl.sum(acc * acc))


@triton.jit(do_not_specialize=["first", "T", "blocks_n"])
def _grams_columns_kernel(
    table_ptr, buffer_ptr, first, T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
    blocks_n, columns_at, centred_at,
    ELEMENT: tl.constexpr, ONE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    row_ptr = table_ptr + (first + tl.program_id(1)) * WIDTH
    gram_columns(
        address(row_ptr, DY, ELEMENT), address(row_ptr, X, ELEMENT), _part_of(buffer_ptr, row_ptr, SCRATCH),
        T, N, K, stride_dt, stride_dn, stride_xt, stride_xk, blocks_n, columns_at, centred_at,
        ONE, BLOCK_T, BLOCK_F, INTERPRET,
    )  # fmt: skip


# The third axis of these two counts the pieces of a pair, then the pairs.
@triton.jit(do_not_specialize=["first", "T", "parts_n"])
def _grams_parts_kernel(
    table_ptr, buffer_ptr, first, T, N, K, stride_dt, stride_dn, parts_n, features, tiles_at, centred_at,
    ELEMENT: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    j = tl.program_id(1)
    if j > i:
        return
    row_ptr = table_ptr + (first + tl.program_id(2) // PARTS) * WIDTH
    gram_part(
        address(row_ptr, DY, ELEMENT), _part_of(buffer_ptr, row_ptr, SCRATCH), i, j,
        tl.program_id(2) % PARTS, T, N, K, stride_dt, stride_dn, parts_n, features, tiles_at, centred_at,
        UNIT, EVEN, BLOCK_T, BLOCK_F, INTERPRET,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "T", "blocks_n", "blocks_all", "parts_n", "parts"])
def _grams_product_kernel(
    table_ptr, buffer_ptr, first, T, blocks_n, blocks_all, parts_n, parts, columns_at, tiles_at,
    BLOCK_T: tl.constexpr, ROWS: tl.constexpr, COLUMN_BLOCKS: tl.constexpr, PART_BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    j = tl.program_id(1)
    if j > i and j < tl.num_programs(0):
        return
    pieces: tl.constexpr = BLOCK_T // ROWS
    row_ptr = table_ptr + (first + tl.program_id(2) // pieces) * WIDTH
    gram_product(
        _part_of(buffer_ptr, row_ptr, SCRATCH), _part_of(buffer_ptr, row_ptr, PARTIALS), i, j,
        tl.program_id(2) % pieces, T, blocks_n, blocks_all, parts_n, parts, columns_at, tiles_at,
        BLOCK_T, ROWS, COLUMN_BLOCKS, PART_BLOCK,
    )  # fmt: skip


@triton.jit
def _finish_all_kernel(table_ptr, buffer_ptr, out_ptr, BLOCK: tl.constexpr):
    row_ptr = table_ptr + tl.program_id(0) * WIDTH
    count = tl.load(row_ptr + COUNT).to(tl.int32)
    norm_sq = finished(_part_of(buffer_ptr, row_ptr, PARTIALS), count, BLOCK)
    tl.store(out_ptr + tl.load(row_ptr + PLACE), norm_sq)


class _Kind(NamedTuple):
    """How the pairs of one kind are served; sizes count fp32 elements."""

    #: Number of a pair's partials: 0 of an empty one, whose norm is 0 without a launch of its own.
    partials: int
    #: What they and its scratch take in the buffer.
    room: int
    scratch: int
    #: Most pairs of a launch.
    most: int
    #: The plan of either form.
    plan: GramPlan | Tile | None


# Sizes and strides of dy and of x, their dtypes, and whether an address table can take them.
_Key = tuple[Any, ...]


def _slot(elements: int) -> int:
    return triton.cdiv(elements, SLOT.value) * SLOT.value


@functools.lru_cache(maxsize=1024)
def _kind(key: _Key, device: torch.device) -> _Kind | None:
    """How pairs of this kind are served, or None for one by one, with the checks of one."""
    dy_size, x_size, dy_stride, x_stride, operand, x_dtype, fits = key
    if len(dy_size) != 2 or len(x_size) != 2 or dy_size[0] != x_size[0]:
        return None
    (T, N), K, strides = dy_size, x_size[1], (*dy_stride, *x_stride)
    if operand != x_dtype or operand not in FLOATS or not fits:
        return None
    if not (T and N and K):
        return _Kind(0, 0, 0, GRID_LIMIT, None)
    if 1 not in dy_stride or 1 not in x_stride:  # copied first
        return None
    if uses_gram(T, N, K, operand):
        plan = gram_plan(T, N, K, operand)
        scratch = _slot(plan.scratch)
        # The slices of a tile are fewer than 17.
        most = min(SCRATCH_BYTES // (4 * scratch), GRID_LIMIT // max(plan.parts_n + plan.parts_k, 16))
        return _Kind(plan.partials, _slot(plan.partials), scratch, max(1, most), plan)
    if uses_descriptors(T, N, K, strides, (True, True), operand, device):
        return None
    tile = norm_tile(N, K, operand, device)
    programs = tile.programs(N, K)
    return _Kind(programs, _slot(programs), 0, GRID_LIMIT, tile)


@functools.lru_cache(maxsize=1024)
def _launches(key: _Key, device: torch.device, pairs: int) -> tuple[Launch, ...]:
    """What takes (table, buffer, index of the first row) for so many pairs of a kind."""
    kind = _kind(key, device)
    assert kind is not None
    if kind.plan is None:
        return ()
    (T, N), (_, K), dy_stride, x_stride, operand, _, _ = key
    strides, element = (*dy_stride, *x_stride), {"ELEMENT": ELEMENTS[operand]}
    if isinstance(kind.plan, Tile):
        tile = kind.plan
        constants = {**element, **gemm_constants(T, N, K, tile)}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        return (Launch(_gemms_kernel, (kind.partials, pairs), (T, N, K, *strides), constants, **options),)
    columns, parts, product = gram_kinds(kind.plan, T, N, K, strides)
    side, _, slices = parts.grid
    return (
        Launch(
            _grams_columns_kernel,
            (*columns.grid, pairs),
            columns.numbers,
            {**element, **columns.constants},
            **columns.options,
        ),
        Launch(
            _grams_parts_kernel,
            (side, side, slices * pairs),
            parts.numbers,
            {**element, "PARTS": slices, **parts.constants},
            **parts.options,
        ),
        Launch(
            _grams_product_kernel,
            (*product.grid[:2], product.grid[2] * pairs),
            product.numbers,
            product.constants,
            **product.options,
        ),
    )


@functools.lru_cache(maxsize=1024)
def _finish_launch(pairs: int, device_index: int | None) -> Launch:
    return Launch(_finish_all_kernel, (pairs,), (), {"BLOCK": FINISH_BLOCK}, num_warps=4)


def grouped_norms_sq(pairs: Sequence[Segment]) -> tuple[torch.Tensor, list[int]]:
    """||dy^T x||_F^2 of each pair (len(pairs),), fp32, and the indices of pairs that must go one by one.

    The elements of those are left unset: pairs whose addresses do not fit a table, that have to be copied or
    checked first, or that go through tensor descriptors.
    """
    first = pairs[0][0]
    device, here = first.device, first.get_device()
    groups: dict[_Key, list[tuple[int, int, int]]] = {}
    for place, (dy, x) in enumerate(pairs):
        dy_at, x_at = dy.data_ptr(), x.data_ptr()
        fits = not (dy_at | x_at) & 15 and dy.get_device() == here == x.get_device()
        key = (dy.shape, x.shape, dy.stride(), x.stride(), dy.dtype, x.dtype, fits)
        group = groups.get(key)
        if group is None:
            group = groups[key] = []
        group.append((dy_at, x_at, place))
    kinds: list[tuple[_Key, _Kind, list[tuple[int, int, int]]]] = []
    alone: list[int] = []
    for key, group in groups.items():
        kind = _kind(key, device)
        if kind is None:
            alone += [place for _, _, place in group]
        else:
            kinds.append((key, kind, group))

    # Launches run one after the other, so they share the scratch, which comes before all partials.
    at = max([kind.scratch * min(kind.most, len(group)) for _, kind, group in kinds], default=0)
    rows: list[int] = []
    count = 0
    work: list[tuple[tuple[Launch, ...], int]] = []
    for key, kind, group in kinds:
        for start in range(0, len(group), kind.most):
            served = group[start : start + kind.most]
            work.append((_launches(key, device, len(served)), count))
            count += len(served)
            for number, (dy_at, x_at, place) in enumerate(served):
                rows += (dy_at, x_at, at, number * kind.scratch, kind.partials, place)
                at += kind.room
    norms = torch.empty(len(pairs), dtype=torch.float32, device=device)
    if rows:
        table = pointer_table(rows, WIDTH.value, device)
        buffer = torch.empty(at, dtype=torch.float32, device=device)
        for launches, row in work:
            for launch in launches:
                launch(table, buffer, row)
        _finish_launch(count, device.index)(table, buffer, norms)
    return norms, alone
