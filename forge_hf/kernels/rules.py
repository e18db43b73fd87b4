"""AdamW, Lion and SGD on registers: the one place in the Triton backend with their arithmetic.

The equations stand at the top of `forge_hf/rules.py`. All arithmetic is fp32; the weight moves by the new
moments before these are rounded for storage.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..scalars import StepScalars
from .rounding import store_rounded
from .tiles import INTERPRET, LAUNCH_OPTIONS, to_fp32

__all__ = ["rule_arguments", "update_elements"]


def rule_arguments(
    rule: str, scalars: StepScalars, coefficient: Any, rng_key: int | None, moments: tuple[Any, ...]
) -> dict[str, Any]:
    """The keyword arguments and launch options that both update kernels take for `update_elements`.

    Differences and quotients are taken here in double precision: `1 - beta2` of an fp32 0.999 is off by 3e-5.
    """
    sgd = rule == "sgd"
    key = 0 if rng_key is None else rng_key
    return {
        "m_ptr": moments[0] if moments else None,
        "v_ptr": moments[1] if len(moments) > 1 else None,
        "coefficient_ptr": coefficient,
        # The same 32 bits as a signed number: one compiled kernel for every key.
        "rng_key": key - (1 << 32) if key >= 1 << 31 else key,
        "step_size": float(scalars.lr / scalars.bias_correction1),
        "decay": float(scalars.weight_decay if sgd else 1.0 - scalars.lr * scalars.weight_decay),
        "beta1": float(scalars.momentum if sgd else scalars.beta1),
        "beta1_rest": 1.0 - scalars.beta1,
        "beta2": float(scalars.beta2),
        "beta2_rest": 1.0 - scalars.beta2,
        "denom_scale": 1.0 / scalars.bias_correction2_sqrt,
        "eps": float(scalars.eps),
        "RULE": rule,
        "NESTEROV": bool(scalars.nesterov),
        "STOCHASTIC": rng_key is not None,
        "INTERPRET": INTERPRET,
        **LAUNCH_OPTIONS,
    }


@triton.jit
def _adamw(w, g, m, v, step_size, decay, beta1, beta1_rest, beta2, beta2_rest, denom_scale, eps):
    m = beta1 * m + beta1_rest * g
    v = beta2 * v + beta2_rest * g * g
    w = w * decay - step_size * tl.div_rn(m, tl.sqrt_rn(v) * denom_scale + eps)
    return w, m, v


@triton.jit
def _lion(w, g, m, step_size, decay, beta1, beta1_rest, beta2, beta2_rest):
    u = beta1 * m + beta1_rest * g
    # sign(0) = sign(NaN) = 0, as torch has it
    w = w * decay - tl.where(u > 0, step_size, tl.where(u < 0, -step_size, 0.0))
    return w, beta2 * m + beta2_rest * g


@triton.jit
def _sgd_momentum(w, g, m, step_size, weight_decay, momentum, NESTEROV: tl.constexpr):
    d = g + weight_decay * w
    m = momentum * m + d
    if NESTEROV:
        d = d + momentum * m
    else:
        d = m
    return w - step_size * d, m


@triton.jit
def update_elements(
    g, w_ptr, m_ptr, v_ptr, coefficient_ptr, offset, mask, rng_key,
    step_size, decay, beta1, beta1_rest, beta2, beta2_rest, denom_scale, eps,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Update weight and moments in place at int64 element offsets, by the fp32 gradient `g` in registers.

    `decay` is 1 - lr * weight_decay, or for sgd the weight decay itself; sgd's momentum arrives as `beta1`.
    Pointers that a rule does not need are None.
    """
    if coefficient_ptr is not None:
        g *= tl.load(coefficient_ptr)
    w = to_fp32(tl.load(w_ptr + offset, mask=mask, other=0.0), INTERPRET)
    if m_ptr is not None:
        m = to_fp32(tl.load(m_ptr + offset, mask=mask, other=0.0), INTERPRET)
        if RULE == "adamw":
            v = to_fp32(tl.load(v_ptr + offset, mask=mask, other=0.0), INTERPRET)
            w, m, v = _adamw(
                w, g, m, v, step_size, decay, beta1, beta1_rest, beta2, beta2_rest, denom_scale, eps
            )
            store_rounded(v_ptr, offset, v, mask, rng_key, 2, STOCHASTIC, INTERPRET)
        elif RULE == "lion":
            w, m = _lion(w, g, m, step_size, decay, beta1, beta1_rest, beta2, beta2_rest)
        else:
            w, m = _sgd_momentum(w, g, m, step_size, decay, beta1, NESTEROV)
        store_rounded(m_ptr, offset, m, mask, rng_key, 1, STOCHASTIC, INTERPRET)
    else:
        w -= step_size * (g + decay * w)
    store_rounded(w_ptr, offset, w, mask, rng_key, 0, STOCHASTIC, INTERPRET)
