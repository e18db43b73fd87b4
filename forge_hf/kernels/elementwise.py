"""Optimizer update from a dense gradient, for parameters that are not on the pair path.

    w, moments = rule(w, coefficient * grad, moments)

Shapes: all tensors alike, any shape; the kernel sees them flat.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..scalars import StepScalars
from .rounding import hash_seed, lane_seed
from .rules import load, load_state, rule_arguments, update_elements
from .tiles import to_fp32

__all__ = ["BLOCK", "launch_dense_update", "update_span"]

BLOCK = 1024


@triton.jit(do_not_specialize=["first_block", "rng_key"])
def _dense_update_kernel(
    g_ptr, w_ptr, m_ptr, v_ptr, coefficient_ptr, norm_ptr, count, first_block, rng_key,
    step_size, decay, beta1, beta1_rest, beta2, beta2_rest, denom_scale, eps,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One block of BLOCK elements; the gradient begins at block `first_block` of the weight."""
    pid = tl.program_id(0).to(tl.int64)
    start = (first_block + pid) * BLOCK
    lane = tl.arange(0, BLOCK)
    mask = None if EVEN else lane < count - pid * BLOCK
    g = to_fp32(load(g_ptr + pid * BLOCK, lane, mask), INTERPRET)
    if norm_ptr is not None:
        tl.store(norm_ptr + first_block + pid, tl.sum(g * g))
    w_ptr += start
    if m_ptr is not None:
        m_ptr += start
    if v_ptr is not None:
        v_ptr += start
    w, m, v = load_state(w_ptr, m_ptr, v_ptr, lane, mask)
    update_elements(
        g, w, m, v, w_ptr, m_ptr, v_ptr,
        coefficient_ptr, lane, mask, hash_seed(start, rng_key) + lane_seed(lane),
        step_size, decay, beta1, beta1_rest, beta2, beta2_rest, denom_scale, eps,
        RULE, NESTEROV, STOCHASTIC, INTERPRET,
    )  # fmt: skip


def launch_dense_update(
    weight: torch.Tensor,
    grad: torch.Tensor,
    moments: tuple[torch.Tensor, ...],
    rule: str,
    scalars: StepScalars,
    coefficient: torch.Tensor | None,
    rng_key: int | None,
) -> None:
    """Run the kernel on checked arguments; a gradient with other strides is copied first."""
    arguments = rule_arguments(rule, scalars, coefficient, rng_key, moments)
    update_span(weight, grad.contiguous(), 0, None, arguments)


def update_span(
    weight: torch.Tensor,
    grad: torch.Tensor,
    first_block: int,
    partials: torch.Tensor | None,
    arguments: dict[str, Any],
) -> None:
    """Update the `grad.numel()` elements of the weight that begin at BLOCK * `first_block`.

    Args:
        weight: The whole weight; its moments and the rule's numbers are in `arguments` (`rule_arguments`).
        grad: Contiguous.
        first_block: Where the span begins; random bits are numbered from the weight's first element.
        partials: fp32, one per BLOCK elements of the weight, takes sums of squares of `grad`; or None.
        arguments: See `weight`.
    """
    count = grad.numel()
    if count:
        _dense_update_kernel[(triton.cdiv(count, BLOCK),)](
            grad, weight, norm_ptr=partials, count=count, first_block=first_block,
            EVEN=count % BLOCK == 0, BLOCK=BLOCK, num_warps=4, **arguments,
        )  # fmt: skip
