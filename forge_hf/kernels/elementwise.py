"""Optimizer update from a dense gradient, for parameters that are not on the pair path.

    w, moments = rule(w, coefficient * grad, moments)

Shapes: all tensors alike, any shape; the kernel sees them flat.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..scalars import StepScalars
from .rules import rule_arguments, update_elements
from .tiles import to_fp32

__all__ = ["launch_dense_update"]

_BLOCK = 1024


@triton.jit(do_not_specialize=["rng_key"])
def _dense_update_kernel(
    g_ptr, w_ptr, m_ptr, v_ptr, coefficient_ptr, count, rng_key,
    step_size, decay, beta1, beta1_rest, beta2, beta2_rest, denom_scale, eps,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < count
    g = to_fp32(tl.load(g_ptr + offset, mask=mask, other=0.0), INTERPRET)
    update_elements(
        g, w_ptr, m_ptr, v_ptr, coefficient_ptr, offset, mask, rng_key,
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
    count = weight.numel()
    if count:
        _dense_update_kernel[(triton.cdiv(count, _BLOCK),)](
            grad.contiguous(), weight, count=count, BLOCK=_BLOCK, num_warps=4,
            **rule_arguments(rule, scalars, coefficient, rng_key, moments),
        )  # fmt: skip
