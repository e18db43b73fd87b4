"""The report on paths, as text: parameters with the same path and reason share a line."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from .attach import PathEntry
from .slot import live_slots

if TYPE_CHECKING:
    from .optimizer import ForgeOptimizer

__all__ = ["coverage", "explain", "grouped", "grouped_lines"]


def _pattern(name: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def explain(target: Any) -> str:
    """What is fused, in which mode and format, and why the rest is not.

    Args:
        target: A forge optimizer, accelerate's wrapper around one, or a model that one is attached to.

    Raises:
        TypeError: no forge optimizer can be found from `target`.
    """
    optimizer = _optimizer_of(target)
    entries = optimizer.report()
    config = optimizer.config
    head = (
        f"{type(optimizer).__name__}: update={optimizer.update_mode}, clip={config.clip}, "
        f"state={config.state}, rounding={config.rounding}. "
    )
    return "\n".join([head + coverage(entries), *grouped_lines(entries)])


def coverage(entries: Sequence[PathEntry]) -> str:
    """How much of what is trained needs no stored gradient, as a sentence."""
    total = sum(_numel(entry) for entry in entries if entry.path != "frozen")
    paired = sum(_numel(entry) for entry in entries if entry.path == "pair")
    return f"{paired / max(total, 1):.1%} of {total:,} trained weights need no stored gradient."


def grouped(entries: Sequence[PathEntry]) -> list[dict[str, Any]]:
    """Entries that differ in numbers of their names only: path, name, count, shape, reason of each group."""
    groups: dict[tuple[str, str, str], list[PathEntry]] = defaultdict(list)
    for entry in entries:
        groups[(entry.path, _pattern(entry.name), entry.reason)].append(entry)
    return [
        {
            "path": path,
            "name": pattern,
            "count": len(members),
            "shape": list(members[0].shape),
            "reason": reason,
        }
        for (path, pattern, reason), members in groups.items()
    ]


def grouped_lines(entries: Sequence[PathEntry]) -> list[str]:
    """`grouped` as lines of text."""
    return [
        f"  {g['path']:6} {g['name']}{_times(g['count'])} {g['shape']}: {g['reason']}"
        for g in grouped(entries)
    ]


def _times(count: int) -> str:
    return f" x{count}" if count > 1 else ""


def _numel(entry: PathEntry) -> int:
    result = 1
    for size in entry.shape:
        result *= size
    return result


def _optimizer_of(target: Any) -> ForgeOptimizer:
    if isinstance(target, nn.Module):
        slots = live_slots(target.parameters())
        owner = slots[0].tape.owner() if slots else None
    else:
        owner = target if hasattr(target, "report") else getattr(target, "optimizer", None)
    if owner is None or not hasattr(owner, "report"):
        raise TypeError(f"explain() found no forge optimizer in this {type(target).__name__}.")
    return owner
