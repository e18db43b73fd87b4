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
from .tiles import CUDA, INTERPRET, LAUNCH_OPTIONS, to_fp32

__all__ = ["load", "load_state", "rule_arguments", "update_elements"]


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
def _quotient(dividend, divisor):
    """The quotient, off by 2 units of the last place, where the divisor is at most 2^126.

    The correctly rounded root and quotient (`sqrt_rn`, `div_rn`) took 40 of 108 instructions per weight, `/`
    7 of 64, and an update is off by 1e-7 of itself either way.
    """
    if CUDA:
        quotient = dividend * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [divisor], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        quotient = dividend / divisor
    return quotient


@triton.jit
def _adamw(w, g, m, v, step_size, decay, beta1, beta1_rest, beta2, beta2_rest, denom_scale, eps):
    m = beta1 * m + beta1_rest * g
    v = beta2 * v + beta2_rest * g * g
    w = w * decay - step_size * _quotient(m, tl.sqrt(v) * denom_scale + eps)
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
def load(ptr, offset, mask):
    """Elements as stored, 0 where the mask is false; None masks nothing. Each is read once a step."""
    if mask is None:
        value = tl.load(ptr + offset, eviction_policy="evict_first")
    else:
        value = tl.load(ptr + offset, mask=mask, other=0.0, eviction_policy="evict_first")
    return value


@triton.jit
def load_state(w_ptr, m_ptr, v_ptr, offset, mask):
    """Weight and moments at element offsets, as stored; the weight in place of a moment that is not there."""
    w = load(w_ptr, offset, mask)
    m = w
    v = w
    if m_ptr is not None:
        m = load(m_ptr, offset, mask)
    if v_ptr is not None:
        v = load(v_ptr, offset, mask)
    return w, m, v


@triton.jit
def update_elements(
    g, w, m, v, w_ptr, m_ptr, v_ptr, coefficient_ptr, offset, mask, seed,
    step_size, decay, beta1, beta1_rest, beta2, beta2_rest, denom_scale, eps,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Update weight and moments at element offsets, by the fp32 gradient `g` and what `load_state` gave.

    `decay` is 1 - lr * weight_decay, or for sgd the weight decay itself; sgd's momentum arrives as `beta1`.
    Pointers that a rule does not need are None, and so is the mask of a full block; `seed` is
    `rounding.hash_seed` of the elements.
    """
    w = to_fp32(w, INTERPRET)
    if CUDA:
        # Gives the gradient the weight's register layout here; it is converted once per use (two for adamw)
        # otherwise, each time through shared memory.
        g = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [g, w], dtype=tl.float32, is_pure=True, pack=1
        )
    if coefficient_ptr is not None:
        g *= tl.load(coefficient_ptr)
    if m_ptr is not None:
        m = to_fp32(m, INTERPRET)
        if RULE == "adamw":
            w, m, v = _adamw(
                w, g, m, to_fp32(v, INTERPRET),
                step_size, decay, beta1, beta1_rest, beta2, beta2_rest, denom_scale, eps,
            )  # fmt: skip
            store_rounded(v_ptr, offset, v, mask, seed, 2, STOCHASTIC, INTERPRET)
        elif RULE == "lion":
            w, m = _lion(w, g, m, step_size, decay, beta1, beta1_rest, beta2, beta2_rest)
        else:
            w, m = _sgd_momentum(w, g, m, step_size, decay, beta1, NESTEROV)
        store_rounded(m_ptr, offset, m, mask, seed, 1, STOCHASTIC, INTERPRET)
    else:
        w -= step_size * (g + decay * w)
    store_rounded(w_ptr, offset, w, mask, seed, 0, STOCHASTIC, INTERPRET)
