"""Rows of docs/compatibility.md, which tests with the marker `compatibility` write.

    @pytest.mark.compatibility("Settings", "accumulation of {steps}", mode="{mode}")

The fields are those of `pytest.mark.parametrize`. What a test measures with `measured(distance)`, or the
refusals that it raises, become the result. `FORGE_HF_WRITE_DOCS=1 pytest -m compatibility` writes the page;
`tests/test_compatibility.py` holds that page and tests have the same rows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "Row", "measured", "page", "row_of", "rows_of_page"]

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"
#: Section, setting, mode.
Row = tuple[str, str, str]

_distances: list[float] = []

_HEAD = """# Compatibility

Written by the tests (`FORGE_HF_WRITE_DOCS=1 pytest -m compatibility`); each row is a test that runs in
CI. Unless a row says otherwise, the stock Trainer trains a tiny random model twice, with `adamw_torch`
and with `forge_adamw`, in fp32 on a CPU; the result is the distance of the end points as a fraction of
the way that `adamw_torch` travelled. Both sum the same products in another order, which Adam amplifies
where a gradient is near 0. "The same" are tests that compare something else than end points. `step` and
`backward` are the values of `update`; where a row names none, `auto` chose. Architectures and adapters
accumulate two micro-batches; "reentrant" and "non-reentrant" name the kind of gradient checkpointing.
"""


def measured(distance: float) -> float:
    """Note the distance of two runs for the row of the running test; returns it."""
    _distances.append(float(distance))
    return distance


def start() -> None:
    """Forget what earlier tests measured."""
    _distances.clear()


def result(refusals: list[str]) -> str:
    """What a row says: refused and how, or how far the runs ended from each other."""
    if refusals and not _distances:
        return "refused: " + refusals[0].replace("|", "\\|")
    if not _distances:
        return "the same"
    largest = max(_distances)
    if largest == 0.0:
        return "equal to the bit"
    # One power of ten is the same on every machine, mostly.
    exponent = math.ceil(math.log10(largest) - 1e-9)
    return f"below {10.0**exponent * 100:.{max(0, -exponent - 2)}f} %"


def row_of(item: Any) -> Row | None:
    """The row that a collected test writes, or None."""
    marker = item.get_closest_marker("compatibility")
    if marker is None:
        return None
    section, setting = marker.args
    params = {key: getattr(value, "value", value) for key, value in _params(item).items()}
    texts = [section, setting, marker.kwargs.get("mode", "")]
    filled = [text.format(**params).replace("|", "\\|") for text in texts]
    return filled[0], filled[1], filled[2]


def _params(item: Any) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else dict(callspec.params)


def page(rows: dict[Row, tuple[str, str]]) -> str:
    """The page for results and test files by row."""
    lines = [_HEAD]
    for section in dict.fromkeys(sorted(row[0] for row in rows)):
        lines.append(f"## {section}\n\n| | `update` | result | test |\n|---|---|---|---|")
        for row in sorted(row for row in rows if row[0] == section):
            outcome, file = rows[row]
            lines.append(f"| {row[1]} | {row[2]} | {outcome} | `{file}` |")
        lines.append("")
    return "\n".join(lines)


def rows_of_page(text: str) -> dict[Row, str]:
    """Test file by row of a page."""
    rows: dict[Row, str] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.replace("\\|", "\0").split("|")]
        if section and len(cells) == 6 and cells[4].startswith("`tests/"):
            setting, mode = (cell.replace("\0", "\\|") for cell in cells[1:3])
            rows[section, setting, mode] = cells[4].strip("`")
    return rows
