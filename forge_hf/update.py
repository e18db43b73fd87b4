"""One update of one parameter: its state, its numbers, the right operation of the backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .config import ForgeConfig
from .dispatch import backend_for
from .gradient import FactoredGradient
from .quantized import Moment
from .rules import Rule
from .scalars import StepScalars
from .state import CODES, allocate_moment, low_bits_of, moment_of, rounding_key

__all__ = ["apply_"]


def apply_(
    rule: Rule,
    config: ForgeConfig,
    group: dict[str, Any],
    state: dict[str, Any],
    parameter: Tensor,
    number: int,
    gradient: FactoredGradient | Tensor,
    known: dict[int, StepScalars],
    versions: dict[int, int],
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
        versions: Version of each weight with low bits after its last update here, by its id; one that is not
            in it counts as unchanged.
        want_norm_sq: Also return the squared norm of a factored gradient, before its coefficient.

    Returns:
        0-d fp32 tensor, or None.
    """
    moments = _moments(rule, config, group, state, parameter)
    low = None if config.weight_bits == 16 else low_bits_of(state, config.weight_bits, parameter)
    if low is not None and versions.get(id(parameter), parameter._version) != parameter._version:
        low.zero_()  # they belonged to the value before somebody else wrote to the weight
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
    if low is not None:
        versions[id(parameter)] = parameter._version
    state["step"].fill_(step)
    return norm_sq


def _moments(
    rule: Rule, config: ForgeConfig, group: dict[str, Any], state: dict[str, Any], parameter: Tensor
) -> tuple[Moment, ...]:
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32)
    names = rule.moment_names(group)
    for name in names:
        if name not in state and name + CODES not in state:
            allocate_moment(state, name, config.state, parameter)
    if len(parameter.shape) > 2 and parameter.is_contiguous():
        for key, value in state.items():  # which may be from when the weight was channels_last
            state[key] = value.contiguous()
    return tuple(moment_of(state, name) for name in names)
