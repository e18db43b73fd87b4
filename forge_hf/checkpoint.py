"""Loading of optimizer checkpoints: everything is checked before anything is changed.

torch's `load_state_dict` casts state to the weight's dtype, which ruins fp32 moments of bf16 weights; this
one keeps the dtype, and converts only when the option `state` asks for another format than the checkpoint
holds.
"""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import quantized
from .config import refuse
from .foreign import from_bitsandbytes
from .low_rank import PROJECTION_KEYS, basis_shapes, is_projected, moment_like
from .quantized import Moment, QuantizedMoment
from .state import (
    CODES,
    LOW_BITS,
    SCALE,
    UNSIGNED,
    convert_moment,
    has_moment,
    low_bits_of,
    moment_of,
)

if TYPE_CHECKING:
    from .optimizer import ForgeOptimizer

__all__ = ["load_"]


def load_(optimizer: ForgeOptimizer, state_dict: dict[str, Any]) -> None:
    """Load `state_dict` into `optimizer`; see `ForgeOptimizer.load_state_dict`.

    Raises:
        ForgeRefusal: the checkpoint does not fit.
        ForgeConfigError: one of its settings is not supported.
    """
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    groups = _new_groups(optimizer, state_dict)
    state = _new_state(optimizer, state_dict, groups)
    optimizer.__setstate__({"state": state, "param_groups": groups})
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _looks_like_a_state_dict(state_dict: Any) -> bool:
    if not isinstance(state_dict, dict) or not isinstance(state_dict.get("state"), dict):
        return False
    groups = state_dict.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
    )


def _new_groups(optimizer: ForgeOptimizer, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    if not _looks_like_a_state_dict(state_dict):
        raise refuse("state_file", problem="it is not an optimizer's state_dict")
    ours, theirs = optimizer.param_groups, state_dict["param_groups"]
    sizes = [[len(group["params"]) for group in groups] for groups in (ours, theirs)]
    if sizes[0] != sizes[1]:
        raise refuse("state_file", problem=f"its groups hold {sizes[1]} parameters, the model's {sizes[0]}")
    groups = []
    for group, saved in zip(ours, theirs, strict=True):
        kept = {key: group[key] for key in ("params", "param_names") if key in group}
        missing = [key for key in optimizer.rule.defaults if key not in saved]
        if missing:
            raise refuse("state_file", problem=f"its groups lack {', '.join(missing)}")
        merged = {
            **optimizer.rule.fixed,
            **deepcopy({k: v for k, v in saved.items() if k not in kept}),
            **kept,
        }
        optimizer.rule.validate(merged)
        for key in PROJECTION_KEYS:
            if group.get(key) != saved.get(key):
                raise refuse("state_projection", key=key, found=saved.get(key), expected=group.get(key))
        groups.append(merged)
    return groups


def _new_state(
    optimizer: ForgeOptimizer, state_dict: dict[str, Any], groups: list[dict[str, Any]]
) -> defaultdict[Any, Any]:
    saved_ids = [key for group in state_dict["param_groups"] for key in group["params"]]
    places = [(group, parameter) for group in groups for parameter in group["params"]]
    saved_state = dict(state_dict["state"])
    state: defaultdict[Any, Any] = defaultdict(dict)
    for index, (key, (group, parameter)) in enumerate(zip(saved_ids, places, strict=True)):
        if key in saved_state:
            state[parameter] = _parameter_state(optimizer, group, parameter, index, saved_state.pop(key))
    if saved_state:
        raise refuse(
            "state_file", problem=f"it holds state for unknown parameters {sorted(map(str, saved_state))[:3]}"
        )
    return state


def _parameter_state(
    optimizer: ForgeOptimizer, group: dict[str, Any], parameter: Tensor, index: int, saved: dict[str, Any]
) -> dict[str, Any]:
    """State of one parameter from its saved form."""
    if not isinstance(saved, dict):
        raise refuse("state_file", problem=f"the state of parameter {index} is no dict")
    # torch's SGD stores no step, and a None buffer before the first update.
    saved = {key: value for key, value in saved.items() if value is not None}
    if not saved:
        return {}
    needed = optimizer.rule.moment_names(group)
    possible = optimizer.rule.moment_names({**group, "momentum": 1.0})
    saved = from_bitsandbytes(saved, possible)
    # SGD whose momentum was set to 0 still carries the buffer of before.
    names = [name for name in possible if name in needed or has_moment(saved, name)]
    counts_steps = "step" in saved or optimizer.rule.name == "sgd"
    keys = {key for name in names for key in _keys_of(saved, name)}
    like, bases = parameter, {}
    if is_projected(group):
        like, bases = moment_like(group, parameter), basis_shapes(group, parameter)
        keys |= set(bases)
    if set(saved) - {"step", LOW_BITS} != keys or not counts_steps:
        found, expected = sorted(map(str, saved)), sorted({"step", *needed, *bases})
        raise refuse("state_keys", index=index, found=found, rule=optimizer.rule.name, expected=expected)
    result: dict[str, Any] = {"step": _step_counter(saved.get("step", 1.0), index)}
    for name in names:
        moment = _saved_moment(saved, name, index, like)
        convert_moment(result, name, optimizer.config.state, like, moment)
    for key, shape in bases.items():
        result[key] = _saved_basis(saved[key], key, index, parameter, shape)
    low = low_bits_of(result, optimizer.config.weight_bits, parameter)
    if low is not None and LOW_BITS in saved:
        _load_low_bits(low, saved[LOW_BITS], index)
    return result


def _keys_of(saved: dict[str, Any], name: str) -> tuple[str, ...]:
    """Under which keys a checkpoint has a moment, or would."""
    return (name + CODES, name + SCALE) if name + CODES in saved else (name,)


def _saved_moment(saved: dict[str, Any], name: str, index: int, parameter: Tensor) -> Moment:
    """A moment of the checkpoint, checked."""
    moment = moment_of(saved, name)
    values = moment.codes if isinstance(moment, QuantizedMoment) else moment
    expected = tuple(parameter.shape)
    if not isinstance(values, Tensor) or values.shape != parameter.shape:
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise refuse("state_shape", key=name, index=index, found=found, expected=expected)
    if not isinstance(moment, QuantizedMoment):
        if not values.is_floating_point():
            raise refuse("state_file", problem=f"'{name}' of parameter {index} has dtype {values.dtype}")
        return moment
    if values.dtype != (torch.uint8 if name in UNSIGNED else torch.int8):
        raise refuse("state_file", problem=f"'{name + CODES}' of parameter {index} has dtype {values.dtype}")
    rows, columns = quantized.rows_and_columns(parameter.shape)
    blocks, scale = (rows, -(-columns // quantized.BLOCK)), moment.scale
    if not isinstance(scale, Tensor) or tuple(scale.shape) != blocks or scale.dtype != torch.uint8:
        raise refuse("state_file", problem=f"'{name + SCALE}' of parameter {index} is not uint8 {blocks}")
    return moment


def _saved_basis(basis: Any, key: str, index: int, parameter: Tensor, shape: tuple[int, int]) -> Tensor:
    """A basis of the checkpoint on the weight's device, in the weight's dtype."""
    if not isinstance(basis, Tensor) or tuple(basis.shape) != shape:
        found = tuple(basis.shape) if isinstance(basis, Tensor) else type(basis).__name__
        raise refuse("state_shape", key=key, index=index, found=found, expected=shape)
    if not basis.is_floating_point():
        raise refuse("state_file", problem=f"'{key}' of parameter {index} has dtype {basis.dtype}")
    return basis.detach().to(device=parameter.device, dtype=parameter.dtype, copy=True).contiguous()


def _load_low_bits(target: Tensor, saved: Any, index: int) -> None:
    """Copy the low bits; 32-bit ones lose their lower half in a 24-bit run, and gain zeros the other way."""
    if (
        not isinstance(saved, Tensor)
        or saved.shape != target.shape
        or saved.dtype not in (torch.int8, torch.int16)
    ):
        raise refuse(
            "state_file", problem=f"'{LOW_BITS}' of parameter {index} is not int8 or int16 of its shape"
        )
    shift = 8 * (target.itemsize - saved.itemsize)
    wide = saved.to(torch.int32)
    target.copy_(wide << shift if shift >= 0 else wide >> -shift)


def _step_counter(step: Any, index: int) -> Tensor:
    try:
        count = float(step)
    except (TypeError, ValueError, RuntimeError):
        count = -1.0
    if not (count >= 0 and count.is_integer()):
        raise refuse("state_file", problem=f"step of parameter {index} is {step!r}")
    return torch.tensor(count, dtype=torch.float32)
