"""The report on paths, as text: parameters with the same path and reason share a line."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from .attach import PathEntry

if TYPE_CHECKING:
    from .optimizer import ForgeOptimizer

__all__ = ["explain"]


def _pattern(name: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def explain(optimizer: ForgeOptimizer) -> str:
    """What is fused, in which mode and format, and why the rest is not."""
    entries = optimizer.report()
    total = sum(_numel(entry) for entry in entries if entry.path != "frozen")
    paired = sum(_numel(entry) for entry in entries if entry.path == "pair")
    config = optimizer.config
    lines = [
        f"{type(optimizer).__name__}: update={optimizer.update_mode}, clip={config.clip}, state={config.state}, "
        f"rounding={config.rounding}. {paired / max(total, 1):.1%} of {total:,} trained weights need no stored gradient."
    ]
    grouped: dict[tuple[str, str, str], list[PathEntry]] = defaultdict(list)
    for entry in entries:
        grouped[(entry.path, _pattern(entry.name), entry.reason)].append(entry)
    for (path, pattern, reason), members in grouped.items():
        count = f" x{len(members)}" if len(members) > 1 else ""
        lines.append(f"  {path:6} {pattern}{count} {list(members[0].shape)}: {reason}")
    return "\n".join(lines)


def _numel(entry: PathEntry) -> int:
    result = 1
    for size in entry.shape:
        result *= size
    return result
