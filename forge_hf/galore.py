"""ForgeGaLoreAdamW: AdamW on projected gradients that are computed from the pairs.

    step mode      R replaces a weight's pair in backward, as soon as its norm is known
    backward mode  the weight is updated in backward

Micro-batches before the last keep pairs (or their dense sum), since the norm of a sum is not the sum of the
norms; with `measure_norm=False` they are added up as R, except for a weight whose basis is due in that step:
the new basis sees the whole gradient. Weights outside the targets are trained by AdamW as in `ForgeAdamW`.

Source: Zhao et al. 2024 (GaLore, arXiv 2403.03507).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .config import ForgeConfigError, refuse
from .gradient import FactoredGradient
from .low_rank import (
    BASIS_KEYS,
    PROJECTION_KEYS,
    ProjectedUpdate,
    apply_projected_,
    basis_of,
    basis_shapes,
    find_basis,
    is_due,
    is_projected,
    prepare_projected,
)
from .optimizer import ForgeOptimizer
from .projected import ProjectedGradient
from .rules import ADAMW
from .slot import WeightSlot
from .state import rounding_key
from .subspace import PROJ_TYPES, SUBSPACES, Basis, low_rank_shape, sides
from .targets import Targets, find_targets

__all__ = ["ForgeGaLoreAdamW"]

GALORE = dataclasses.replace(
    ADAMW,
    options={
        "rank": "int",
        "update_proj_gap": "int",
        "scale": "float",
        "proj_type": "str",
        "subspace": "str",
        "refresh": "str",
        "moments": "str",
        "measure_norm": "bool",
    },
)
_CHOICES = {
    "proj_type": PROJ_TYPES,
    "subspace": SUBSPACES,
    "refresh": ("together", "staggered"),
    "moments": ("keep", "rotate"),
}


class ForgeGaLoreAdamW(ForgeOptimizer):
    """AdamW whose moments live in a subspace of each target weight's gradient (GaLore).

    Args:
        params: The model, or param groups together with `attach_to`. Groups with a key `rank` are projected
            with their own `rank`, `update_proj_gap`, `scale`, `proj_type`, or those below where one is
            missing; other groups are split into targets and the rest.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        rank: Directions kept of each target weight, at most its smaller side.
        update_proj_gap: Steps between two new bases of a weight.
        scale: Factor of the update of projected weights.
        proj_type: "std" (the smaller side), "reverse_std", "left", "right", or "full" (both sides).
        subspace: How a basis is found: "power" (from the pairs) or "svd" (dense, one weight at a time).
        refresh: "together", or "staggered": spread over the steps of a gap.
        moments: What a new basis does to the moments: "keep" (as in the paper) or "rotate" into it.
        measure_norm: Whether the norm of the whole gradient is measured before only its projection is kept:
            for clipping and logs. False is faster, and holds only projections over the micro-batches of a
            step; the logged norm is then NaN, and clipping is refused.
        target_modules: As `optim_target_modules` in TrainingArguments; None for all linear layers that are
            not of the vocabulary's size.
        attach_to: The model, when `params` are groups.
        **options: Fields of `ForgeConfig`.

    Raises:
        ForgeConfigError: an option is unknown or out of range.
        ForgeRefusal: no weight to project, or one that cannot be.
    """

    rule = GALORE
    _offsets: dict[int, int]
    _warned = False

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        proj_type: str = "std",
        subspace: str = "power",
        refresh: str = "together",
        moments: str = "keep",
        measure_norm: bool = True,
        target_modules: str | Iterable[str] | None = None,
        attach_to: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.projection = {
            "rank": rank,
            "update_proj_gap": update_proj_gap,
            "scale": scale,
            "proj_type": proj_type,
        }
        self.subspace, self.refresh, self.moments = subspace, refresh, moments
        self.measure_norm = measure_norm
        if not measure_norm and options.get("nonfinite", "propagate") != "propagate":
            raise ForgeConfigError(
                f"Option nonfinite='{options['nonfinite']}' looks at the norm that measure_norm=False gives "
                "up. Fix: leave one of the two out."
            )
        for name in ("subspace", "refresh", "moments"):
            _check_choice(name, getattr(self, name))
        _check_projection(self.projection)
        if isinstance(params, nn.Module):
            attach_to = params if attach_to is None else attach_to
            params = [parameter for parameter in params.parameters() if parameter.requires_grad]
        if attach_to is None:
            raise refuse("no_model", name=type(self).__name__)
        self._targets = Targets({}, {})
        groups = self._split(list(params), attach_to, target_modules)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, settings, attach_to, options)

    def _split(self, given: list[Any], model: nn.Module, names: Any) -> list[dict[str, Any]]:
        """Param groups with the targets apart; each keeps the settings of the group that it came from."""
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        if not all(is_projected(group) for group in groups) and not (
            names is None and any(is_projected(group) for group in groups)
        ):
            self._targets = find_targets(model, names)
        split: list[dict[str, Any]] = []
        for group in groups:
            if is_projected(group):
                split.append(group)
                continue
            members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
            targets = [member for member in members if id(_tensor(member)) in self._targets.weights]
            rest = [member for member in members if id(_tensor(member)) not in self._targets.weights]
            rest_group = {key: value for key, value in group.items() if key not in PROJECTION_KEYS}
            # An empty group stays: schedulers and resumed runs may count on it.
            if rest or not targets:
                split.append({**rest_group, "params": rest})
            if targets:
                split.append({**group, **self.projection, "params": targets})
        if not any(is_projected(group) for group in split):
            raise refuse("no_targets", names=names, why="none of them is among the optimizer's parameters")
        return split

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; one with a key `rank` is projected.

        Raises:
            ForgeConfigError: a setting is out of range.
            ForgeRefusal: a parameter that cannot be trained, or projected.
        """
        if is_projected(param_group):
            param_group = {**self.projection, **param_group}
            _check_projection(param_group)
            members = param_group["params"]
            names = self._names()
            for member in [members] if isinstance(members, Tensor) else list(members):
                tensor = _tensor(member)
                if tensor.dim() != 2:
                    name = names.get(id(tensor), "parameter")
                    raise refuse("projected_rank", param=name, dim=tensor.dim())
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the optimizer without the model: the copy works on ordinary gradients."""
        names = ("projection", "subspace", "refresh", "moments", "measure_norm", "_offsets", "_targets")
        kept = {name: getattr(self, name) for name in names}
        # Keys of the model that is left behind.
        return {**super().__getstate__(), **kept, "_offsets": {}, "_targets": Targets({}, {})}

    def _attach(self) -> None:
        super()._attach()
        self._offsets = {}
        groups = {id(p): group for group in self.param_groups for p in group["params"] if is_projected(group)}
        for index, (key, group) in enumerate(groups.items()):
            gap = int(group["update_proj_gap"])
            self._offsets[key] = index * gap // len(groups) if self.refresh == "staggered" else 0
            slot = self._slots.get(key)
            if slot is not None:
                slot.gradient_type = ProjectedGradient
        model = self._model()
        assert model is not None
        by_name = {name: id(parameter) for name, parameter in model.named_parameters()}
        self._report = [self._described(entry, groups.get(by_name[entry.name])) for entry in self._report]

    def _described(self, entry: Any, group: dict[str, Any] | None) -> Any:
        """A line of the report, with what GaLore does to the parameter."""
        if group is None:
            why = self._targets.ignored.get(entry.name)
            return (
                entry
                if why is None
                else dataclasses.replace(entry, reason=f"{entry.reason}; {why}: not projected")
            )
        if entry.path == "frozen":
            return entry
        shape = torch.Size(entry.shape)
        left, right = sides(group["proj_type"], shape)
        side = "both sides" if left and right else "left" if left else "right"
        rank = low_rank_shape(group["proj_type"], group["rank"], shape)[0]
        return dataclasses.replace(entry, reason=f"{entry.reason}, projected: rank {rank}, {side}")

    def _settle(self, slot: WeightSlot) -> None:
        """Reduce a complete gradient to its projection where that is smaller and nothing more is needed."""
        gradient = slot.gradient
        place = self._place_of(slot.parameter)
        if not isinstance(gradient, ProjectedGradient) or gradient.low_rank is not None or place is None:
            return
        group = self.param_groups[place[0]]
        if not is_projected(group):
            return
        last = self.tape.in_last_micro_batch()
        want_norm = self.measure_norm
        state = self.state[slot.parameter]
        if not last and (want_norm or self._due_now(slot.parameter, group, state)):
            return
        rows, columns = low_rank_shape(group["proj_type"], group["rank"], slot.parameter.shape)
        if gradient.held_bytes() > 4 * rows * columns:
            basis, fresh = self._find(slot.parameter, gradient, group, state, place[1])
            gradient.reduce_(basis, fresh, want_norm)

    def _place_of(self, parameter: Tensor) -> tuple[int, int] | None:
        if id(parameter) not in self._places or not self.tape.slots:
            self._number_parameters()
        return self._places.get(id(parameter))

    def _due_now(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> bool:
        return is_due(group, int(state.get("step", 0)), self._offsets.get(id(parameter), 0))

    def _find(
        self,
        parameter: Tensor,
        gradient: ProjectedGradient,
        group: dict[str, Any],
        state: dict[str, Any],
        number: int,
    ) -> tuple[Basis, bool]:
        """The basis of this step, and whether it is a new one."""
        old = basis_of(state)
        if old is not None and _shapes(old) != basis_shapes(group, parameter):
            raise refuse("projection_changed", param=self._names().get(id(parameter), "parameter"))
        if old is not None and not self._due_now(parameter, group, state):
            return old, False
        seed = rounding_key(self.config.seed, 0, number)
        basis, usable = find_basis(parameter, gradient, group, old, self.subspace, seed)
        if not usable and not self._warned:
            self._warned = True
            name = self._names().get(id(parameter), "parameter")
            what = "a random one is used" if old is None else "the old one is kept"
            warnings.warn(
                f"The gradient of '{name}' was 0 or not finite when a new GaLore basis was due, so {what}. "
                "Said once, for all weights.",
                stacklevel=2,
            )
        return basis, usable or old is None

    def _prepare(self, parameter: Tensor, gradient: FactoredGradient | Tensor) -> Any:
        index, number = self._places[id(parameter)]
        group, state = self.param_groups[index], self.state[parameter]
        if not is_projected(group):
            return super()._prepare(parameter, gradient)
        if not isinstance(gradient, ProjectedGradient):
            whole = ProjectedGradient(parameter, self._names().get(id(parameter), "parameter"))
            whole.add_dense(gradient) if isinstance(gradient, Tensor) else whole.accumulate(gradient)
            gradient = whole
        held = gradient
        return prepare_projected(
            parameter, held, group, state, self.config, number, self._versions,
            lambda: self._find(parameter, held, group, state, number),
        )  # fmt: skip

    def _run(self, updates: list[Any], want_norm_sq: bool = False) -> list[Tensor | None]:
        projected = [update for update in updates if isinstance(update, ProjectedUpdate)]
        if not projected:
            return super()._run(updates, want_norm_sq)
        others = [update for update in updates if not isinstance(update, ProjectedUpdate)]
        norms = iter(super()._run(others, want_norm_sq))
        measured = [
            update.gradient.unscaled_norm_sq() if want_norm_sq and self.measure_norm else None
            for update in projected
        ]
        apply_projected_(projected, self._versions, rotate=self.moments == "rotate")
        own = iter(measured)
        return [next(own) if isinstance(update, ProjectedUpdate) else next(norms) for update in updates]


def _shapes(basis: Basis) -> dict[str, tuple[int, ...]]:
    return {key: tuple(side.shape) for key, side in zip(BASIS_KEYS, basis, strict=True) if side is not None}


def _tensor(member: Any) -> Tensor:
    """A parameter of a group, which torch also takes as (name, parameter)."""
    tensor: Tensor = member[1] if isinstance(member, tuple) else member
    return tensor


def _check_choice(name: str, value: Any) -> None:
    choices = _CHOICES[name]
    if value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise ForgeConfigError(f"Option {name}={value!r} is unknown; {hint}Valid: {', '.join(choices)}.")


def _check_projection(group: dict[str, Any]) -> None:
    """Check the settings of a projected group.

    Raises:
        ForgeConfigError: one of them is out of range.
    """
    for name in ("rank", "update_proj_gap"):
        value = group[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ForgeConfigError(f"Option {name}={value!r} is not a whole number of at least 1.")
    scale = group["scale"]
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0.0 < scale < math.inf:
        raise ForgeConfigError(f"Option scale={scale!r} is not a number above 0.")
    _check_choice("proj_type", group["proj_type"])
