"""AdamW, Lion and SGD on registers: the one place in the Triton backend with their arithmetic.

The equations stand at the top of `forge_hf/rules.py`. All arithmetic is fp32; the weight moves by the new
moments before these are rounded for storage.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..quantized import Moment
from ..scalars import StepScalars
from .moments import load, load_scale, moment_to_fp32, store_moment
from .rounding import root, store_weight, weight_to_fp32
from .tiles import CUDA

__all__ = [
    "CONSTANTS",
    "POINTERS",
    "RuleArguments",
    "device_numbers",
    "load_state",
    "named",
    "rule_arguments",
    "update_elements",
]


class RuleArguments(NamedTuple):
    """What every update kernel takes beside weight and gradient.

    Attributes:
        pointers: Low bits, moments, their scales, coefficient and numbers, in the kernels' order (POINTERS);
            None for what is not there.
        rng_key: Key of stochastic rounding as a signed 32-bit number: one compiled kernel for every key.
        constants: (rule, nesterov, stochastic), the kernels' first constexpr arguments (CONSTANTS).
    """

    pointers: tuple[Any, ...]
    rng_key: int
    constants: tuple[str, bool, bool]

    def kinds(self) -> tuple[Any, ...]:
        """What a key of compiled kernels must say of the pointers."""
        return tuple([None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in self.pointers])


POINTERS = ("low_ptr", "m_ptr", "v_ptr", "m_scale_ptr", "v_scale_ptr", "coefficient_ptr", "numbers_ptr")
CONSTANTS = ("RULE", "NESTEROV", "STOCHASTIC")


def named(constants: tuple[str, bool, bool]) -> dict[str, Any]:
    """`RuleArguments.constants` by the kernels' names."""
    return dict(zip(CONSTANTS, constants, strict=True))


def rule_arguments(
    rule: str,
    scalars: StepScalars,
    coefficient: torch.Tensor | None,
    rng_key: int | None,
    moments: Sequence[Moment],
    low: torch.Tensor | None,
    device: torch.device,
) -> RuleArguments:
    """Arguments of one update.

    Args:
        rule: "adamw", "lion" or "sgd".
        scalars: The numbers of this step.
        coefficient: 0-d fp32 tensor, or None.
        rng_key: See `launch.wgrad_update_`.
        moments: Tensors or `QuantizedMoment`s.
        low: The weight's low bits, or None.
        device: Where the kernel runs.
    """
    key = 0 if rng_key is None else rng_key
    stored: list[Any] = [None, None, None, None]
    for index, moment in enumerate(moments):
        if isinstance(moment, torch.Tensor):
            stored[index] = moment
        else:
            stored[index], stored[index + 2] = moment
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    numbers = device_numbers(rule, scalars, device, stream)
    return RuleArguments(
        (low, *stored, coefficient, numbers),
        key - (1 << 32) if key >= 1 << 31 else key,
        (rule, bool(scalars.nesterov), rng_key is not None),
    )


@functools.lru_cache(maxsize=64)
def device_numbers(rule: str, scalars: StepScalars, device: torch.device, stream: int) -> torch.Tensor:
    """The numbers of one step as an fp32 tensor on the device, copied there once, without synchronising.

    Kernels read them from memory, so a schedule compiles nothing. Differences and quotients are taken here in
    double precision: `1 - beta2` of an fp32 0.999 is off by 3e-5. `stream` keeps a copy that one stream has
    not finished from being read by another.
    """
    sgd = rule == "sgd"
    numbers = [
        scalars.lr / scalars.bias_correction1,
        scalars.weight_decay if sgd else 1.0 - scalars.lr * scalars.weight_decay,
        scalars.momentum if sgd else scalars.beta1,
        1.0 - scalars.beta1,
        scalars.beta2,
        1.0 - scalars.beta2,
        1.0 / scalars.bias_correction2_sqrt,
        scalars.eps,
    ]
    return torch.tensor(numbers, dtype=torch.float32).to(device, non_blocking=True)


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
    w = w * decay - step_size * _quotient(m, root(v) * denom_scale + eps)
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
def load_state(
    w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, offset, mask, block, block_mask
):  # fmt: skip
    """Weight, its low bits, moments and their scales as stored; the weight in place of what is not there."""
    w = load(w_ptr, offset, mask)
    low = w
    m = w
    v = w
    if low_ptr is not None:
        low = load(low_ptr, offset, mask)
    if m_ptr is not None:
        m = load(m_ptr, offset, mask)
    if v_ptr is not None:
        v = load(v_ptr, offset, mask)
    m_scale = load_scale(m_scale_ptr, block, block_mask, w)
    v_scale = load_scale(v_scale_ptr, block, block_mask, w)
    return w, low, m, v, m_scale, v_scale


@triton.jit
def update_elements(
    g, w, low, m, v, m_scale, v_scale,
    w_ptr, low_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, coefficient_ptr, numbers_ptr,
    offset, mask, block, block_mask, seed,
    RULE: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Update a 2-D tile of weight and moments by the fp32 gradient `g` and what `load_state` gave.

    Pointers that a rule or format does not need are None, and so is the mask of a full tile; `seed` is
    `rounding.hash_seed` of the elements, `block` are `moments.block_offsets`. `numbers_ptr` is
    `device_numbers`.
    """
    step_size = tl.load(numbers_ptr)
    # 1 - lr * weight_decay, or for sgd the weight decay itself; sgd's momentum comes as beta1
    decay = tl.load(numbers_ptr + 1)
    w = weight_to_fp32(w, low, low_ptr, INTERPRET)
    if CUDA:
        # Gives the gradient the weight's register layout here; it is converted once per use (two for adamw)
        # otherwise, each time through shared memory.
        g = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [g, w], dtype=tl.float32, is_pure=True, pack=1
        )
    if coefficient_ptr is not None:
        g *= tl.load(coefficient_ptr)
    if m_ptr is not None:
        beta1 = tl.load(numbers_ptr + 2)
        m = moment_to_fp32(m, m_scale, m_ptr, INTERPRET)
        if RULE == "sgd":
            w, m = _sgd_momentum(w, g, m, step_size, decay, beta1, NESTEROV)
        else:
            beta1_rest = tl.load(numbers_ptr + 3)
            beta2 = tl.load(numbers_ptr + 4)
            beta2_rest = tl.load(numbers_ptr + 5)
            if RULE == "adamw":
                w, m, v = _adamw(
                    w, g, m, moment_to_fp32(v, v_scale, v_ptr, INTERPRET),
                    step_size, decay, beta1, beta1_rest, beta2, beta2_rest,
                    tl.load(numbers_ptr + 6), tl.load(numbers_ptr + 7),
                )  # fmt: skip
                store_moment(
                    v_ptr, v_scale_ptr, offset, v, mask, block, block_mask, seed, 2, STOCHASTIC, INTERPRET
                )
            else:
                w, m = _lion(w, g, m, step_size, decay, beta1, beta1_rest, beta2, beta2_rest)
        store_moment(m_ptr, m_scale_ptr, offset, m, mask, block, block_mask, seed, 1, STOCHASTIC, INTERPRET)
    else:
        w -= step_size * (g + decay * w)
    store_weight(w_ptr, low_ptr, offset, w, mask, seed, STOCHASTIC, INTERPRET)
