"""Tables of `forge-hf estimate` and `forge-hf explain`."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from ..attach import preview
from ..report import coverage, grouped, grouped_lines
from .estimate import CARDS, CONTEXT_GIB, METHODS, Estimate, EstimateError, Setting, estimate, largest_batch

__all__ = ["show", "show_paths"]


def show(
    config: Any, setting: Setting, card: int | None, as_json: bool, console: Console | None = None
) -> None:
    """Print the estimates of all optimizers.

    Args:
        config: Of the model.
        setting: How it is trained.
        card: A key of `CARDS`, for the largest batch on it; None leaves that out.
        as_json: Print JSON in place of the table.
        console: Where to print.

    Raises:
        EstimateError: the model cannot be estimated, or the card is unknown.
    """
    console = console or Console()
    if card is not None and card not in CARDS:
        raise EstimateError(f"No card of {card} GB is known. Valid: {', '.join(map(str, CARDS))}.")
    estimates = estimate(config, setting)
    batches: dict[str, int] = {}
    if card is not None:
        with Progress(console=console, transient=True, disable=as_json) as progress:
            for name in progress.track(METHODS, description=f"Largest batch on {card} GB"):
                batches[name] = largest_batch(config, setting, name, card)
    if as_json:
        console.print_json(json.dumps(_as_dict(setting, estimates, card, batches)))
        return
    console.print(_table(setting, estimates, card, batches))
    console.print(
        f"GiB, with moments after the first step. A card needs {CONTEXT_GIB} GiB beside that for CUDA. "
        "Parts do not add up to the peak: activations and gradients are not all alive at once.",
        style="dim",
    )


def _table(setting: Setting, estimates: list[Estimate], card: int | None, batches: dict[str, int]) -> Table:
    words = f"batch {setting.batch} x {setting.length} tokens, {setting.precision}"
    words += ", checkpointing" if setting.checkpointing else ""
    words += ", clipping" if setting.clip else ", no clipping"
    table = Table(title=f"Estimated memory of a training step: {words}")
    table.add_column("optimizer", no_wrap=True)
    for column in ("weights", "moments", "gradients\nor pairs", "activations,\nlogits", "peak"):
        table.add_column(column, justify="right")
    table.add_column("fits (GB)")
    if card is not None:
        table.add_column(f"largest batch\non {card} GB", justify="right")
    for each in estimates:
        parts = (
            each.weights_bytes,
            each.moments_bytes,
            each.gradients_bytes,
            each.activations_bytes,
            each.peak_bytes,
        )
        fitting = [size for size in CARDS if each.fits(size)]
        cells = [each.method, *(f"{part / 2**30:.2f}" for part in parts)]
        cells.append(f"{fitting[0]}+" if fitting else "none")
        if card is not None:
            cells.append(str(batches[each.method] or "none"))
        table.add_row(*cells)
    return table


def _as_dict(
    setting: Setting, estimates: list[Estimate], card: int | None, batches: dict[str, int]
) -> dict[str, Any]:
    lines = []
    for each in estimates:
        line: dict[str, Any] = dataclasses.asdict(each)
        line["fits_gb"] = [size for size in CARDS if each.fits(size)]
        if card is not None:
            line["largest_batch"] = batches[each.method]
        lines.append(line)
    return {"setting": dataclasses.asdict(setting), "card_gb": card, "estimates": lines}


def show_paths(model: nn.Module, as_json: bool, console: Console | None = None) -> None:
    """Print the path of every parameter, grouped."""
    console = console or Console()
    entries = preview(model)
    if as_json:
        console.print_json(json.dumps({"coverage": coverage(entries), "parameters": grouped(entries)}))
        return
    console.print(f"{type(model).__name__}: {coverage(entries)}", highlight=False)
    for line in grouped_lines(entries):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
