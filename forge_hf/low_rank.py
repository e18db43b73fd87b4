"""Updates of projected weights: AdamW on R, and W from its result, by the kernels of all other updates.

    N = AdamW(R) / -lr          the element-wise kernel on a scratch tensor of zeros, lr = -1, no decay
    W = W (1 - lr wd) - lr scale (P^T N Q)      the pair kernel of SGD: N and the basis are its pair

SGD's d = g + wd' W with lr' = lr scale and wd' = wd / scale is that line. So clipping, every format of the
moments, stochastic rounding and `weight_bits` are those of all updates, and the full-size update exists only
tile by tile. N has the basis' dtype.

Source: Zhao et al. 2024 (GaLore, arXiv 2403.03507), Algorithm 2; weight decay as in torch.optim.AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .config import ForgeConfig
from .dispatch import backend_for
from .projected import ProjectedGradient
from .quantized import QuantizedMoment, dequantize
from .rules import ADAMW
from .scalars import StepScalars
from .state import allocate_moment, convert_moment, has_moment, low_bits_of, moment_of, rounding_key
from .subspace import Basis, low_rank_shape, project, random_basis, refreshed, rotated, sides
from .updates import Update

__all__ = [
    "BASIS_KEYS",
    "PROJECTION_KEYS",
    "ProjectedUpdate",
    "apply_projected_",
    "basis_of",
    "basis_shapes",
    "find_basis",
    "is_due",
    "is_projected",
    "moment_like",
    "prepare_projected",
]

#: State keys of the left and right basis.
BASIS_KEYS = ("basis_left", "basis_right")
#: Keys of a param group whose weights are projected, as in galore-torch.
PROJECTION_KEYS = ("rank", "update_proj_gap", "scale", "proj_type")
#: Bytes of scratch that the updates of one batch may take.
BATCH_BYTES = 256 << 20
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class ProjectedUpdate:
    """An update of a projected weight that only has to be run.

    Attributes:
        parameter: The weight (N, K).
        gradient: Its gradient, reduced or not.
        group: Its param group.
        state: Its state.
        config: Storage and rounding options.
        scalars: AdamW's numbers of this update.
        step: The count of updates after it.
        number: Position among all parameters, which keys stochastic rounding.
        basis: The basis of this update.
        fresh: Whether the state does not hold it yet.
    """

    parameter: Tensor
    gradient: ProjectedGradient
    group: dict[str, Any]
    state: dict[str, Any]
    config: ForgeConfig
    scalars: StepScalars
    step: int
    number: int
    basis: Basis
    fresh: bool
    low: Tensor | None

    @property
    def done(self) -> bool:
        """Whether it has run."""
        return int(self.state["step"]) == self.step

    @property
    def scratch_bytes(self) -> int:
        """Bytes that running it takes: R, unless it is held already, the scratch, and N."""
        rows, columns = low_rank_shape(self.group["proj_type"], self.group["rank"], self.parameter.shape)
        return rows * columns * (4 + 4 + self.parameter.itemsize)


def is_projected(group: dict[str, Any]) -> bool:
    """Whether the weights of a param group are projected."""
    return group.get("rank") is not None


def basis_shapes(group: dict[str, Any], parameter: Tensor) -> dict[str, tuple[int, int]]:
    """Shape of each basis of a projected weight, by its key."""
    rank, shape = min(int(group["rank"]), *parameter.shape), parameter.shape
    wanted = zip(BASIS_KEYS, sides(group["proj_type"], shape), shape, strict=True)
    return {key: (rank, size) for key, there, size in wanted if there}


def moment_like(group: dict[str, Any], parameter: Tensor) -> Tensor:
    """An uninitialised tensor in the shape of `parameter`'s moments, of its dtype and device."""
    return parameter.new_empty(low_rank_shape(group["proj_type"], group["rank"], parameter.shape))


def basis_of(state: dict[str, Any]) -> Basis | None:
    """The basis in a parameter's state, or None before its first update."""
    left, right = (state.get(key) for key in BASIS_KEYS)
    return None if left is None and right is None else Basis(left, right)


def is_due(group: dict[str, Any], step: int, offset: int) -> bool:
    """Whether the update after `step` earlier ones looks for a new basis.

    Args:
        group: With `update_proj_gap`.
        step: Updates so far; the first one always does.
        offset: By how many steps this weight is ahead of the others (`refresh="staggered"`).
    """
    return step == 0 or (step + offset) % int(group["update_proj_gap"]) == 0


def find_basis(
    parameter: Tensor,
    gradient: ProjectedGradient,
    group: dict[str, Any],
    old: Basis | None,
    subspace: str,
    seed: int,
) -> tuple[Basis, bool]:
    """A basis from the gradient, in the dtype in which it is kept.

    Reads the norm of the gradient on the host, once per refresh.

    Args:
        parameter: The weight.
        gradient: Its whole gradient, not reduced yet.
        group: With rank and proj_type.
        old: The basis so far, or None.
        subspace: "power" or "svd".
        seed: Of the random directions that the first power iteration starts from.

    Returns:
        The basis, and whether the gradient was usable: finite and not 0. If not, it is the old or a random
        one.
    """
    start = random_basis(group["proj_type"], group["rank"], parameter, seed) if old is None else old
    norm_sq = float(gradient.unscaled_norm_sq())
    usable = 0.0 < norm_sq < float("inf")
    basis = refreshed(gradient, start, subspace, warm=old is not None) if usable else start
    return basis.to(parameter.dtype), usable


def _commit_(update: ProjectedUpdate, rotate: bool) -> None:
    """Put a fresh basis into the state, and allocate moments or turn them."""
    state, parameter, option = update.state, update.parameter, update.config.state
    old = basis_of(state)
    like = moment_like(update.group, parameter)
    for name in _MOMENTS:
        if not has_moment(state, name):
            allocate_moment(state, name, option, like)
        elif rotate and old is not None:
            moment = moment_of(state, name)
            values = dequantize(moment) if isinstance(moment, QuantizedMoment) else moment.float()
            turned = rotated(values, old, update.basis, squared=name == "exp_avg_sq")
            convert_moment(state, name, option, like, turned)
    for key, side in zip(BASIS_KEYS, update.basis, strict=True):
        if side is not None:
            state[key] = side


def apply_projected_(updates: Sequence[ProjectedUpdate], versions: dict[int, int], rotate: bool) -> None:
    """Update weights, moments and bases in place, and count the step of each; gradients are used up.

    Args:
        updates: Of different parameters.
        versions: Version of each weight with low bits after its last update here, by its id.
        rotate: Turn the moments into a fresh basis instead of keeping their numbers.
    """
    for backend, batch in _batches(updates):
        for update in batch:
            if update.fresh:
                _commit_(update, rotate)
        scratch = [_prepared_direction(update) for update in batch]
        backend.dense_updates_([direction for direction in scratch])
        pairs = []
        for update, direction in zip(batch, scratch, strict=True):
            update.gradient.low_rank = None
            pairs.append(_weight_update(update, direction.weight))
        del scratch
        backend.wgrad_updates_(pairs)
        torch.autograd.graph.increment_version([update.parameter for update in batch])
        for update in batch:
            update.state["step"].fill_(update.step)
            if update.low is not None:
                versions[id(update.parameter)] = update.parameter._version


def _batches(updates: Sequence[ProjectedUpdate]) -> Iterator[tuple[ModuleType, list[ProjectedUpdate]]]:
    """Cut at `BATCH_BYTES` of scratch and where the backend changes."""
    batch: list[ProjectedUpdate] = []
    scratch_bytes, backend = 0, None
    for update in updates:
        own = backend_for(update.parameter)
        if batch and (own is not backend or scratch_bytes + update.scratch_bytes > BATCH_BYTES):
            assert backend is not None
            yield backend, batch
            batch, scratch_bytes = [], 0
        backend = own
        batch.append(update)
        scratch_bytes += update.scratch_bytes
    if batch and backend is not None:
        yield backend, batch


def _prepared_direction(update: ProjectedUpdate) -> Update:
    """AdamW on R with a scratch weight that becomes N."""
    gradient, config = update.gradient, update.config
    low_rank = project(gradient, update.basis) if gradient.low_rank is None else gradient.low_rank
    moments = tuple(moment_of(update.state, name) for name in _MOMENTS)
    scalars = update.scalars._replace(lr=-1.0, weight_decay=0.0)
    key = rounding_key(config.seed, update.step, update.number) if config.rounding == "stochastic" else None
    return Update(
        torch.zeros_like(low_rank), low_rank, moments, ADAMW.name, scalars, gradient.coefficient, key, None
    )


def _weight_update(update: ProjectedUpdate, direction: Tensor) -> Update:
    """SGD on the pair whose product is P^T N Q."""
    (left, right), config, numbers = update.basis, update.config, update.scalars
    if left is not None and right is not None:
        pair = left, (direction @ right.float()).to(right.dtype)
    elif left is not None:
        pair = left, direction.to(left.dtype)
    else:
        assert right is not None
        pair = direction.to(right.dtype), right
    scale = float(update.group["scale"])
    scalars = StepScalars(lr=numbers.lr * scale, weight_decay=numbers.weight_decay / scale)
    stochastic = config.rounding == "stochastic"
    # Another key than that of the moments.
    key = rounding_key(config.seed, update.step, update.number ^ 0x80000000) if stochastic else None
    return Update(update.parameter.detach(), pair, (), "sgd", scalars, None, key, update.low)


def prepare_projected(
    parameter: Tensor,
    gradient: ProjectedGradient,
    group: dict[str, Any],
    state: dict[str, Any],
    config: ForgeConfig,
    number: int,
    versions: dict[int, int],
    find: Any,
) -> ProjectedUpdate:
    """Gather what the update of a projected weight needs; nothing of the model changes.

    Args:
        parameter: fp32, bf16 or fp16 (N, K).
        gradient: Its gradient.
        group: With AdamW's settings and `rank`, `proj_type`, `update_proj_gap`, `scale`.
        state: Its state.
        config: Storage and rounding options.
        number: Its position among all parameters.
        versions: As in `apply_projected_`.
        find: Called without arguments where the gradient has no basis yet; returns a basis and whether it is
            fresh.
    """
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32)
    low = None if config.weight_bits == 16 else low_bits_of(state, config.weight_bits, parameter)
    if low is not None and versions.get(id(parameter), parameter._version) != parameter._version:
        low.zero_()  # they belonged to the value before somebody else wrote to the weight
    if gradient.basis is None:
        basis, fresh = find()
    else:
        basis, fresh = gradient.basis, gradient.fresh
    step = int(state["step"]) + 1
    scalars = ADAMW.scalars(group, step)
    return ProjectedUpdate(
        parameter, gradient, group, state, config, scalars, step, number, basis, fresh, low
    )
