"""Updates of parameters: their state, their numbers, and as few calls of the backend as can be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config import ForgeConfig
from .dispatch import backend_for
from .gradient import FactoredGradient
from .quantized import Moment
from .rules import Rule
from .scalars import StepScalars
from .state import CODES, LOW_BITS, allocate_moment, low_bits_of, moment_of, rounding_key
from .updates import Update

__all__ = ["Prepared", "apply_", "prepare", "waits_for_company"]


class Prepared(NamedTuple):
    """An update that only has to be run.

    Attributes:
        update: What the backend takes.
        kind: Of its gradient: "dense", "pair", or "factors" for several pairs or lookups, which only
            `gradient` has.
        gradient: As it was given.
        parameter: The parameter itself.
        state: Its state, whose step is counted when the update has run.
        step: The count after it.
        backend: The module that runs it.
    """

    update: Update
    kind: str
    gradient: FactoredGradient | Tensor
    parameter: Tensor
    state: dict[str, Any]
    step: int
    backend: ModuleType

    @property
    def done(self) -> bool:
        """Whether it has run."""
        return int(self.state["step"]) == self.step


def prepare(
    rule: Rule,
    config: ForgeConfig,
    group: dict[str, Any],
    state: dict[str, Any],
    parameter: Tensor,
    number: int,
    gradient: FactoredGradient | Tensor,
    known: dict[int, StepScalars],
    versions: dict[int, int],
) -> Prepared:
    """Gather what the update of `parameter` needs; nothing of the model changes.

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

    Raises:
        ForgeRefusal: a held pair was written to.
    """
    moments = _moments(rule, config, group, state, parameter)
    low = None if config.weight_bits == 16 else low_bits_of(state, config.weight_bits, parameter)
    if low is not None and versions.get(id(parameter), parameter._version) != parameter._version:
        low.zero_()  # they belonged to the value before somebody else wrote to the weight
    step = int(state["step"]) + 1
    scalars = known.get(step)
    if scalars is None:
        scalars = known[step] = rule.scalars(group, step)
    rng_key = rounding_key(config.seed, step, number) if config.rounding == "stochastic" else None
    kind, given, coefficient = _form(gradient)
    update = Update(parameter.detach(), given, moments, rule.name, scalars, coefficient, rng_key, low)
    return Prepared(update, kind, gradient, parameter, state, step, backend_for(parameter))


def _form(
    gradient: FactoredGradient | Tensor,
) -> tuple[str, Tensor | tuple[Tensor, Tensor] | None, Tensor | None]:
    """Kind, what `Update.gradient` is, and coefficient."""
    if isinstance(gradient, Tensor):
        return "dense", gradient, None
    if gradient.buffer is not None:
        return "dense", gradient.buffer, gradient.coefficient
    pairs = gradient.pairs()
    if len(pairs) != 1 or gradient.looked_up:
        return "factors", None, gradient.coefficient
    return "pair", pairs[0], gradient.coefficient


def waits_for_company(prepared: Prepared) -> bool:
    """Whether the backend runs such an update faster together with others."""
    return prepared.kind == "pair" and bool(prepared.backend.waits_for_company(prepared.update))


def apply_(
    updates: Sequence[Prepared], versions: dict[int, int], want_norm_sq: bool = False
) -> list[Tensor | None]:
    """Update parameters and their states in place, and count the step of each.

    Args:
        updates: Of different parameters.
        versions: As in `prepare`.
        want_norm_sq: Also return what adds up to the squared norm of each factored gradient before its
            coefficient.

    Returns:
        For each update an fp32 tensor whose sum is that norm, or None.
    """
    norms: list[Tensor | None] = [None] * len(updates)
    together: defaultdict[tuple[ModuleType, str], list[int]] = defaultdict(list)
    for index, prepared in enumerate(updates):
        if prepared.kind == "factors":
            norms[index] = _apply_factors_(prepared, want_norm_sq)
            _count([prepared], versions)
            continue
        together[prepared.backend, prepared.kind].append(index)
        if want_norm_sq and prepared.kind == "dense" and isinstance(prepared.gradient, FactoredGradient):
            norms[index] = prepared.gradient.unscaled_norm_sq()
    for (backend, kind), members in together.items():
        group = [updates[index] for index in members]
        if kind == "dense":
            backend.dense_updates_([prepared.update for prepared in group])
        else:
            results = backend.wgrad_updates_([prepared.update for prepared in group], want_norm_sq)
            for index, norm_sq in zip(members, results, strict=True):
                norms[index] = norm_sq
        _count(group, versions)
    return norms


def _apply_factors_(prepared: Prepared, want_norm_sq: bool) -> Tensor | None:
    update, gradient = prepared.update, prepared.gradient
    assert isinstance(gradient, FactoredGradient)
    norm_sq: Tensor | None = prepared.backend.wgrad_update_(
        update.weight,
        gradient.pairs(),
        moments=update.moments,
        rule=update.rule,
        scalars=update.scalars,
        coefficient=update.coefficient,
        rng_key=update.rng_key,
        low=update.low,
        want_norm_sq=want_norm_sq,
        lookups=gradient.lookups(),
    )
    return norm_sq


def _count(updates: Sequence[Prepared], versions: dict[int, int]) -> None:
    # A kernel's store does not move the version counter; another graph node that saved W must notice.
    torch.autograd.graph.increment_version([prepared.parameter for prepared in updates])
    for prepared in updates:
        prepared.state["step"].fill_(prepared.step)
        if LOW_BITS in prepared.state:
            versions[id(prepared.parameter)] = prepared.parameter._version


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
