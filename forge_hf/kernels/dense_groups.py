"""Updates by dense gradients of many weights: those of one kind share one launch, whatever their sizes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence

import torch
import triton

from .. import quantized
from ..updates import Update
from .checks import FLOATS, check_update
from .elementwise import BLOCK, DENSE_COLUMNS, grouped_dense_update
from .paths import on_device_of
from .pointer_table import addresses_of, checked_key, pointer_table, tensors_of
from .replay import Launch
from .rules import rule_arguments

__all__ = ["dense_groups_"]

#: Launches, by their programs and what their members have in common.
_KNOWN: dict[tuple[object, ...], Launch] = {}
#: Models whose parameters come and go would let them grow without end.
_MOST_KNOWN = 4096


def dense_groups_(updates: Sequence[Update]) -> list[int]:
    """Run the updates by dense gradients that have company; the indices of those that were left."""
    kinds: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    rows: list[list[int] | None] = []
    left: list[int] = []
    for index, update in enumerate(updates):
        weight, grad, moments, rule, scalars, coefficient, rng_key, low = update
        rows.append(_dense_row(update) if _is_flat(update) else None)
        if rows[-1] is None:
            left.append(index)
            continue
        assert isinstance(grad, torch.Tensor)
        dtypes = tuple([tensor.dtype for tensor in (weight, grad, *tensors_of(moments))])
        low_dtype = None if low is None else low.dtype
        # The numbers are the same object for all of a param group in a step.
        key = (
            *(rule, id(scalars), id(coefficient), rng_key is None),
            *(weight.device, weight.numel() % 16 == 0, low_dtype, dtypes),
        )
        kinds[key].append(index)
    for kind, members in kinds.items():
        if len(members) == 1:
            left += members
        else:
            _run([updates[index] for index in members], [rows[index] or [] for index in members], kind[4:])
    return left


def _run(updates: Sequence[Update], rows: Sequence[list[int]], kind: tuple[object, ...]) -> None:
    weight, grad, moments, rule, scalars, coefficient, rng_key, low = updates[0]
    assert isinstance(grad, torch.Tensor)
    check_update(weight, moments, rule, coefficient, rng_key, low)
    programs, values = 0, []
    for row in rows:
        row[8] = programs
        programs += triton.cdiv(row[7], BLOCK)
        values += row
    with on_device_of(weight):
        arguments = rule_arguments(rule, scalars, coefficient, rng_key, moments, low, weight.device)
        key = (programs, arguments.constants, coefficient is None, *kind)
        known = _KNOWN.get(key)
        if known is None:
            if len(_KNOWN) >= _MOST_KNOWN:
                _KNOWN.clear()
            known = grouped_dense_update(weight, grad, moments, low, arguments.constants, programs)
            _KNOWN[key] = known
        owners = _owners(tuple(values[7::DENSE_COLUMNS]), weight.device)
        known(pointer_table(values, DENSE_COLUMNS, weight.device), owners, *arguments.pointers[-2:])


def _is_flat(update: Update) -> bool:
    """Whether the update may be done element after element, whatever its shape."""
    weight, grad, moments, _, _, _, _, low = update
    if not isinstance(grad, torch.Tensor) or grad.shape != weight.shape or grad.device != weight.device:
        return False
    if not (weight.is_contiguous() and grad.is_contiguous() and 0 < weight.numel() < 1 << 31):
        return False
    if grad.dtype not in FLOATS:
        return False
    columns = quantized.rows_and_columns(weight.shape)[1]
    for moment in moments:
        if isinstance(moment, torch.Tensor):
            if moment.shape != weight.shape or not moment.is_contiguous():
                return False
        elif moment.codes.shape != weight.shape or columns % quantized.BLOCK:
            return False
        elif moment.scale.numel() * quantized.BLOCK != weight.numel():
            return False
    return low is None or (low.shape == weight.shape and low.is_contiguous())


def _dense_row(update: Update) -> list[int] | None:
    """The row (see `grouped_dense_update`) without the first program."""
    weight, grad, moments, _, _, _, rng_key, low = update
    assert isinstance(grad, torch.Tensor)
    addresses = addresses_of((grad, weight, low), moments)
    return None if addresses is None else [*addresses, weight.numel(), 0, checked_key(rng_key)]


@functools.lru_cache(maxsize=64)
def _owners(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """For each program the row of its weight; the same in all steps of a model."""
    counts = torch.tensor([triton.cdiv(size, BLOCK) for size in sizes])
    rows = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(counts)
    return rows.to(device)
