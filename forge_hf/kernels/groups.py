"""Updates of many weights: those alike share one launch, which finds them through a table of addresses.

On the host of an H200 an update of its own cost 100 to 200 us, launch and Python, more than the kernel of a
weight of 4096x4096 takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from ..updates import Update
from .checks import check_update, merge
from .paths import chunk_of, on_device_of
from .pointer_table import pointer_table
from .rules import rule_arguments
from .wgrad_hopper import hopper_tile
from .wgrad_update import GROUP_COLUMNS, FusedUpdate, grouped_update

__all__ = ["update_groups_"]

#: Weights of a launch: one axis of a grid.
MOST_IN_A_GROUP = 65535
#: Launches of groups, by their size and what their members have in common.
_KNOWN_GROUPS: dict[tuple[object, ...], FusedUpdate] = {}
#: Batches of many lengths would let them grow without end.
_MOST_KNOWN = 4096


def update_groups_(
    updates: Sequence[Update], want_norm_sq: bool
) -> tuple[list[torch.Tensor | None], list[int]]:
    """Run the updates, each by one pair, that have company.

    Returns:
        For each update an fp32 tensor whose sum is ||G||^2, or None; and the indices of those that were left,
        to be run one by one.

    Raises:
        ValueError: as `launch.wgrad_update_`.
    """
    results: list[torch.Tensor | None] = [None] * len(updates)
    kinds: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    rows: list[tuple[int, ...] | None] = []
    for index, update in enumerate(updates):
        rows.append(_table_row(update))
        kinds[(index,) if rows[-1] is None else _kind(update)].append(index)
    groups: list[list[int]] = []
    left: list[int] = []
    for members in kinds.values():
        if len(members) > 1 and _fits(updates[members[0]]):
            groups += [members[i : i + MOST_IN_A_GROUP] for i in range(0, len(members), MOST_IN_A_GROUP)]
        else:
            left += members
    for members, table in zip(groups, _tables(updates, rows, groups), strict=True):
        first = updates[members[0]]
        with on_device_of(first.weight):
            partials = _run(first, len(members), table, want_norm_sq)
        if partials is not None:
            for index, part in zip(members, partials.unbind(), strict=True):
                results[index] = part
    return results, left


def _table_row(update: Update) -> tuple[int, ...] | None:
    """The weight's row in the table of a group (see `grouped_update`), or None for one that has none."""
    weight, pair, moments, _, _, _, rng_key, low = update
    assert isinstance(pair, tuple)
    stored: list[torch.Tensor | None] = [*pair, weight, low, None, None, None, None]
    for index, moment in enumerate(moments):
        if isinstance(moment, torch.Tensor):
            stored[4 + index] = moment
        else:
            stored[4 + index], stored[6 + index] = moment
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in stored]
    if any([address & 15 for address in addresses]):
        return None
    if rng_key is not None and not 0 <= rng_key < 1 << 32:
        raise ValueError(f"rng_key must be in [0, 2**32), got {rng_key}")
    return (*addresses, rng_key or 0, 0)


def _kind(update: Update) -> tuple[object, ...]:
    """What updates of one launch have in common."""
    weight, pair, moments, rule, scalars, coefficient, rng_key, low = update
    assert isinstance(pair, tuple)
    dy_TN, x_TK = pair
    tensors = [dy_TN, x_TK, weight]
    for moment in moments:
        tensors.extend((moment,) if isinstance(moment, torch.Tensor) else moment)
    if low is not None:
        tensors.append(low)
    return (
        rule,
        id(scalars),  # the same object for all of a group in a step
        id(coefficient),
        rng_key is None,
        *[(t.shape, t.stride(), t.dtype, t.device) for t in tensors],
    )


def _fits(update: Update) -> bool:
    """Check an update that stands for its kind; whether the kernel for groups takes it."""
    weight, pair, moments, rule, scalars, coefficient, rng_key, low = update
    assert isinstance(pair, tuple)
    check_update(weight, moments, rule, coefficient, rng_key, low)
    if weight.ndim != 2 or not (weight.numel() and pair[0].ndim == 2 and pair[0].shape[0]):
        return False
    N, K = weight.shape
    merged = merge([pair], N, K, weight)
    if merged[0] is not pair[0] or merged[1] is not pair[1] or chunk_of(weight, pair[0], moments):
        return False
    return low is not None or hopper_tile(weight, *pair, moments) is None


def _tables(
    updates: Sequence[Update], rows: Sequence[tuple[int, ...] | None], groups: Sequence[list[int]]
) -> list[torch.Tensor]:
    """The table of each group: parts of one for each device, as every copy costs the host."""
    by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
    for number, members in enumerate(groups):
        by_device[updates[members[0]].weight.device].append(number)
    tables: dict[int, torch.Tensor] = {}
    for device, numbers in by_device.items():
        values = [value for number in numbers for index in groups[number] for value in rows[index] or ()]
        sizes = [len(groups[number]) for number in numbers]
        parts = pointer_table(values, GROUP_COLUMNS, device).split(sizes)
        tables.update(zip(numbers, parts, strict=True))
    return [tables[number] for number in range(len(groups))]


def _run(update: Update, count: int, table: torch.Tensor, want_norm_sq: bool) -> torch.Tensor | None:
    """Launch for `count` weights like that of `update`; returns the partials (count, programs) if wanted."""
    weight, pair, moments, rule, scalars, coefficient, rng_key, low = update
    assert isinstance(pair, tuple)
    arguments = rule_arguments(rule, scalars, coefficient, rng_key, moments, low, weight.device)
    # Not the identities of this step's numbers and coefficient.
    key = (count, arguments.constants, coefficient is None, *_kind(update)[4:])
    known = _KNOWN_GROUPS.get(key)
    if known is None:
        if len(_KNOWN_GROUPS) >= _MOST_KNOWN:
            _KNOWN_GROUPS.clear()
        known = grouped_update(weight, *pair, moments, low, arguments.constants, count)
        _KNOWN_GROUPS[key] = known
    partials = None
    if want_norm_sq:
        partials = torch.empty((count, known.programs), dtype=torch.float32, device=weight.device)
    known.update(table, *arguments.pointers[-2:], partials)
    return partials
