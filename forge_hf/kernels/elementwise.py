"""Optimizer update from a dense gradient, for parameters that are not on the pair path.

    w, moments = rule(w, coefficient * grad, moments)

Shapes: all tensors alike, any shape; the kernel sees them flat.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .. import quantized
from .moments import block_offsets, blocks_inside, load
from .replay import Launch, alignment
from .rounding import hash_seed, lane_seed
from .rules import POINTERS, RuleArguments, load_state, named, update_elements
from .tiles import INTERPRET, to_fp32

__all__ = ["BLOCK", "launch_dense_update", "update_span"]

BLOCK = 1024
_M_SCALE = POINTERS.index("m_scale_ptr")
#: Blocks of 8-bit moments in a block of this kernel.
SPAN_BLOCKS = tl.constexpr(BLOCK // quantized.BLOCK)


@triton.jit(do_not_specialize=["first_block", "rng_key"])
def _dense_update_kernel(
    g_ptr, w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, coefficient_ptr, numbers_ptr, norm_ptr,
    rng_key, columns, first_block,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A block of a row of `columns` elements; the gradient begins at block `first_block` of the weight."""
    pid = tl.program_id(0)
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


def launch_dense_update(weight: torch.Tensor, grad: torch.Tensor, arguments: RuleArguments) -> None:
    """Run the kernel on checked arguments; a gradient with other strides is copied first."""
    update_span(weight, grad.contiguous(), 0, None, arguments)


def update_span(
    weight: torch.Tensor,
    grad: torch.Tensor,
    first_block: int,
    partials: torch.Tensor | None,
    arguments: RuleArguments,
) -> None:
    """Update the `grad.numel()` elements of the weight that begin at BLOCK * `first_block`.

    Args:
        weight: The whole weight. With 8-bit moments and a `first_block` above 0, its rows are whole blocks of
            them.
        grad: Contiguous.
        first_block: Where the span begins; random bits are numbered from the weight's first element.
        partials: fp32, one per BLOCK elements of the weight, takes sums of squares of `grad`; or None.
        arguments: Moments of the whole weight and the rest of the update.
    """
    rows, columns = 1, grad.numel()
    if arguments.pointers[_M_SCALE] is not None:
        own_rows, own_columns = quantized.rows_and_columns(weight.shape)
        if own_columns % quantized.BLOCK:  # else the blocks of all rows follow each other
            rows, columns = own_rows, own_columns
    if not (rows and columns):
        return
    kinds = (grad.dtype, weight.dtype, partials is None, alignment(grad, weight), arguments.kinds())
    launch = _dense_launch(rows, columns, first_block, arguments.constants, weight.device, kinds)
    launch(grad, weight, *arguments.pointers, partials, arguments.rng_key)


@functools.lru_cache(maxsize=4096)
def _dense_launch(
    rows: int,
    columns: int,
    first_block: int,
    constants: tuple[str, bool, bool],
    device: torch.device,
    kinds: tuple[object, ...],
) -> Launch:
    flags = {**named(constants), "EVEN": columns % BLOCK == 0, "BLOCK": BLOCK, "INTERPRET": INTERPRET}
    grid = (rows * -(-columns // BLOCK),)
    return Launch(_dense_update_kernel, grid, (columns, first_block), flags, num_warps=4)
