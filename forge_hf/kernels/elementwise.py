"""Optimizer update from a dense gradient, for parameters that are not on the pair path.

    w, moments = rule(w, coefficient * grad, moments)

Shapes: all tensors alike, any shape; the kernel sees them flat.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .. import quantized
from ..quantized import Moment
from .moments import block_offsets, blocks_inside, load
from .pointer_table import address, elements_of
from .replay import Launch, alignment
from .rounding import hash_seed, lane_seed
from .rules import POINTERS, RuleArguments, load_state, named, update_elements
from .tiles import INTERPRET, to_fp32

__all__ = ["BLOCK", "DENSE_COLUMNS", "dense_launch", "grouped_dense_update", "launch_dense_update"]

BLOCK = 1024
#: Columns of the table of a group.
DENSE_COLUMNS = 10
_M_SCALE = POINTERS.index("m_scale_ptr")
#: Blocks of 8-bit moments in a block of this kernel.
SPAN_BLOCKS = tl.constexpr(BLOCK // quantized.BLOCK)


@triton.jit
def _update_block(
    pid, g_ptr, w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, coefficient_ptr, numbers_ptr,
    norm_ptr, rng_key, columns, first_block,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A block of a row of `columns` elements; the gradient begins at block `first_block` of the weight."""
    per_row = tl.cdiv(columns, BLOCK)
    row = (pid // per_row).to(tl.int64)
    column = (pid % per_row).to(tl.int64) * BLOCK
    inside = row * columns + column
    start = first_block.to(tl.int64) * BLOCK + inside
    lane = tl.arange(0, BLOCK)
    mask = None if EVEN else (lane < columns - column)[None, :]
    lane = lane[None, :]
    g = to_fp32(load(g_ptr + inside, lane, mask), INTERPRET)
    if norm_ptr is not None:
        tl.store(norm_ptr + first_block + pid, tl.sum(g * g))
    w_ptr += start
    if low_ptr is not None:
        low_ptr += start
    if m_ptr is not None:
        m_ptr += start
    if v_ptr is not None:
        v_ptr += start
    block = lane
    block_mask = mask
    if m_scale_ptr is not None:
        one = tl.zeros((1,), tl.int64)
        # A span begins at a whole block.
        block = block_offsets(one + row, column, columns, BLOCK) + first_block.to(tl.int64) * SPAN_BLOCKS
        if not EVEN:
            block_mask = blocks_inside(one == 0, column, columns, BLOCK)
    w, low, m, v, m_scale, v_scale = load_state(
        w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, lane, mask, block, block_mask
    )
    update_elements(
        g, w, low, m, v, m_scale, v_scale,
        w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, coefficient_ptr, numbers_ptr,
        lane, mask, block, block_mask, hash_seed(start, rng_key) + lane_seed(lane),
        RULE, NESTEROV, STOCHASTIC, INTERPRET,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_block", "rng_key"])
def _dense_update_kernel(
    g_ptr, w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, coefficient_ptr, numbers_ptr, norm_ptr,
    rng_key, columns, first_block,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    _update_block(
        tl.program_id(0), g_ptr, w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, coefficient_ptr,
        numbers_ptr, norm_ptr, rng_key, columns, first_block,
        RULE, NESTEROV, STOCHASTIC, EVEN, BLOCK, INTERPRET,
    )  # fmt: skip


@triton.jit
def _grouped_dense_kernel(
    table_ptr, owner_ptr, coefficient_ptr, numbers_ptr,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr, GRADIENT: tl.constexpr, WEIGHT: tl.constexpr, LOW: tl.constexpr,
    M: tl.constexpr, V: tl.constexpr, M_SCALE: tl.constexpr, V_SCALE: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same for weights of any sizes: `owner_ptr` says whose row of the table is a program's."""
    pid = tl.program_id(0)
    table_ptr += tl.load(owner_ptr + pid) * COLUMNS
    size = tl.load(table_ptr + 7).to(tl.int32)
    if WIDE:
        size = tl.multiple_of(size, 16)
    _update_block(
        pid - tl.load(table_ptr + 8).to(tl.int32), address(table_ptr, 0, GRADIENT),
        address(table_ptr, 1, WEIGHT), address(table_ptr, 2, LOW), address(table_ptr, 3, M),
        address(table_ptr, 4, V), address(table_ptr, 5, M_SCALE), address(table_ptr, 6, V_SCALE),
        coefficient_ptr, numbers_ptr, None, tl.load(table_ptr + 9).to(tl.uint32), size, tl.cast(0, tl.int32),
        RULE, NESTEROV, STOCHASTIC, False, BLOCK, INTERPRET,
    )  # fmt: skip


def launch_dense_update(weight: torch.Tensor, grad: torch.Tensor, arguments: RuleArguments) -> None:
    """Run the kernel on checked arguments; a gradient with other strides is copied first."""
    grad = grad.contiguous()
    rows, columns = 1, grad.numel()
    if arguments.pointers[_M_SCALE] is not None:
        own_rows, own_columns = quantized.rows_and_columns(weight.shape)
        if own_columns % quantized.BLOCK:  # else the blocks of all rows follow each other
            rows, columns = own_rows, own_columns
    if not (rows and columns):
        return
    kinds = (grad.dtype, weight.dtype, alignment(grad, weight), arguments.kinds())
    launch = dense_launch(rows, columns, 0, arguments.constants, weight.device, kinds)
    launch(grad, weight, *arguments.pointers, None, arguments.rng_key)


@functools.lru_cache(maxsize=4096)
def dense_launch(
    rows: int,
    columns: int,
    first_block: int,
    constants: tuple[str, bool, bool],
    device: torch.device,
    kinds: tuple[object, ...],
) -> Launch:
    """Launch that takes (gradient, weight, *pointers, partials, random key).

    Args:
        rows: Of the gradient; more than 1 where the blocks of 8-bit moments end with the weight's rows.
        columns: Elements of each.
        first_block: The gradient begins at so many BLOCKs of the weight; random bits are numbered from the
            weight's first element. Above 0, the rows of a weight with 8-bit moments are whole blocks of them.
        constants: See `RuleArguments`.
        device: Where it runs.
        kinds: What else it is compiled for: dtypes and alignment of the tensors.
    """
    flags = {**named(constants), "EVEN": columns % BLOCK == 0, "BLOCK": BLOCK, "INTERPRET": INTERPRET}
    grid = (rows * -(-columns // BLOCK),)
    return Launch(_dense_update_kernel, grid, (columns, first_block), flags, num_warps=4)


def grouped_dense_update(
    weight: torch.Tensor,
    grad: torch.Tensor,
    moments: Sequence[Moment],
    low: torch.Tensor | None,
    constants: tuple[str, bool, bool],
    programs: int,
) -> Launch:
    """Launch of the updates of weights like this one, which takes (table, owners, coefficient, numbers).

    Columns of the table: gradient, weight, low bits, both moments, both scales, elements, the weight's first
    program, random key. `owners` (programs,) are int32 rows of the table, one for each BLOCK elements.
    """
    flags = {
        **named(constants),
        "BLOCK": BLOCK,
        "INTERPRET": INTERPRET,
        **elements_of(("GRADIENT", "WEIGHT", "LOW"), (grad, weight, low), moments),
        "WIDE": weight.numel() % 16 == 0,
        "COLUMNS": DENSE_COLUMNS,
    }
    return Launch(_grouped_dense_kernel, (programs,), (), flags, num_warps=4)
