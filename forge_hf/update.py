"""One update of one parameter: its state, its numbers, the right operation of the backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .config import ForgeConfig, refuse
from .dispatch import backend_for
from .gradient import FactoredGradient
from .quantized import Moment
from .rules import Rule
from .scalars import StepScalars
from .state import LOW_BITS, allocate_low_bits, allocate_moment, moment_of, rounding_key

__all__ = ["apply_"]

#: dtypes of weights that the backends update.
TRAINABLE = (torch.float32, torch.bfloat16, torch.float16)


def apply_(
    rule: Rule,
    config: ForgeConfig,
    group: dict[str, Any],
    state: dict[str, Any],
    parameter: Tensor,
    number: int,
    gradient: FactoredGradient | Tensor,
    known: dict[int, StepScalars],
    want_norm_sq: bool = False,
) -> Tensor | None:
    """Update `parameter` and its state in place, and count the step.

    Args:
        rule: The update rule.
        config: Storage and rounding options.
        group: The parameter's group, with the settings of this step.
        state: Its state; missing moments are allocated as zeros.
        parameter: fp32, bf16 or fp16, any shape.
        number: Its position among all parameters, which keys stochastic rounding.
        gradient: Factored for a weight (N, K), else a tensor of the parameter's shape.
        known: Numbers of the group's updates in this step by their count; a missing one is added.
        want_norm_sq: Also return the squared norm of a factored gradient, before its coefficient.

    Returns:
        0-d fp32 tensor, or None.
    """
    moments = _moments(rule, config, group, state, parameter)
    low = state.get(LOW_BITS)
    step = int(state["step"]) + 1
    scalars = known.get(step)
    if scalars is None:
        scalars = known[step] = rule.scalars(group, step)
    stochastic = config.rounding == "stochastic"
    arguments: dict[str, Any] = {
        "moments": moments,
        "rule": rule.name,
        "scalars": scalars,
        "rng_key": rounding_key(config.seed, step, number) if stochastic else None,
        "low": low,
    }
    backend, weight, norm_sq = backend_for(parameter), parameter.detach(), None
    if isinstance(gradient, Tensor):
        backend.dense_update_(weight, gradient, **arguments)
    elif gradient.buffer is not None:
        norm_sq = gradient.unscaled_norm_sq() if want_norm_sq else None
        backend.dense_update_(weight, gradient.buffer, coefficient=gradient.coefficient, **arguments)
    else:
        arguments |= {"coefficient": gradient.coefficient, "want_norm_sq": want_norm_sq}
        norm_sq = backend.wgrad_update_(weight, gradient.pairs(), lookups=gradient.lookups(), **arguments)
    # A kernel's store does not move the version counter; another graph node that saved W must notice.
    torch.autograd.graph.increment_version(parameter)
    state["step"].fill_(step)
    return norm_sq


def _moments(
    rule: Rule, config: ForgeConfig, group: dict[str, Any], state: dict[str, Any], parameter: Tensor
) -> tuple[Moment, ...]:
    if "step" not in state:
        if parameter.dtype not in TRAINABLE:  # cast after the optimizer was built
            raise refuse("dtype", param="a parameter", dtype=parameter.dtype)
        state["step"] = torch.zeros((), dtype=torch.float32)
        allocate_low_bits(state, config.weight_bits, parameter)
    names = rule.moment_names(group)
    for name in names:
        if name not in state:
            allocate_moment(state, name, config.state, parameter)
    return tuple(moment_of(state, name) for name in names)
