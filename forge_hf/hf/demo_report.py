"""What `forge-hf demo` shows: the table, its notes and the plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["notes", "plot", "table"]


def _mib(count: float) -> str:
    return f"{count / 2**20:.{2 if count < 10 * 2**20 else 0}f} MiB"


def _final_loss(result: dict[str, Any]) -> float:
    """Mean of the last tenth of the training losses; one batch alone is mostly noise."""
    losses = [loss for _, loss in result["loss"]]
    tail = losses[-max(1, len(losses) // 10) :]
    return float(sum(tail) / len(tail))


#: Label, figure of one run, how it is printed, and whether the difference is a percentage.
_ROWS: tuple[tuple[str, Callable[[dict[str, Any]], float], Callable[[float], str], bool], ...] = (
    ("training loss, last tenth", _final_loss, "{:.4f}".format, False),
    ("accuracy on unseen sentences", lambda run: run["accuracy"], "{:.3f}".format, False),
    ("gradient bytes at the seam", lambda run: max(run["seam_bytes"]), _mib, True),
    ("peak memory of training", lambda run: run["peak_bytes"], _mib, True),
    ("time per step, median", lambda run: run["step_ms"], "{:.0f} ms".format, True),
    ("time in all", lambda run: run["seconds"], "{:.1f} s".format, True),
)


def table(runs: list[dict[str, Any]], distance: float, largest: float) -> Any:
    """The two runs side by side, as a rich table.

    Args:
        runs: The figures of the two runs, the baseline first.
        distance: Distance of their end points over the way travelled.
        largest: The largest such fraction of a weight matrix.
    """
    from rich.table import Table

    one, two = runs
    out = Table(show_edge=False, pad_edge=False)
    out.add_column("the same training, twice", no_wrap=True)
    for heading in (one["optim"], two["optim"], "difference"):
        out.add_column(heading, justify="right", no_wrap=True)
    for label, figure, form, in_percent in _ROWS:
        a, b = figure(one), figure(two)
        out.add_row(
            label, form(a), form(b), f"{100 * (b - a) / a:+.1f} %" if in_percent and a else f"{b - a:+.4f}"
        )
    out.add_row("distance of the ends / way", "", f"{100 * distance:.4f} %", "")
    out.add_row("  largest of a weight matrix", "", f"{100 * largest:.4f} %", "")
    return out


def notes(runs: list[dict[str, Any]], batch_size: int, steps: int) -> str:
    """What was trained, and what the figures of the table mean."""
    one = runs[0]
    memory = (
        "resident memory of the run's own process, above its level before training"
        if one["device"] == "CPU"
        else "tensors on the GPU, above what was allocated before training"
    )
    return (
        f"Model: RoBERTa class, {one['weights'] / 1e6:.1f} M fp32 weights, fp32 moments in both runs; "
        f"{steps} steps of {batch_size} sentences, clipping at 1.0, warm-up and decay, on {one['device']}.\n"
        f"Accuracy: always guessing the commoner label scores {one['majority']:.3f}.\n"
        "Seam: most gradient bytes alive between backward and step (.grad, and what is held instead).\n"
        f"Peak memory: {memory}; it contains moments, activations and gradients, not the weights.\n"
        "Times: one run after the other, so whatever else the machine does counts for one of them only."
    )


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Loss, accuracy and bytes at the seam of both runs, over steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (loss, accuracy, seam) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    styles: tuple[dict[str, Any], ...] = ({"lw": 5, "alpha": 0.35}, {"lw": 1.3})
    for run, style in zip(runs, styles, strict=True):
        loss.plot(*zip(*run["loss"], strict=True), label=run["optim"], **style)
        accuracy.plot(*zip(*run["accuracy_curve"], strict=True), label=run["optim"], **style)
        seam.plot([size / 2**20 for size in run["seam_bytes"]], label=run["optim"], **style)
    accuracy.axhline(runs[0]["majority"], color="grey", ls=":", label="commoner label")
    titles = {"training loss": loss, "accuracy": accuracy, "gradients held at the seam, MiB": seam}
    for title, axes in titles.items():
        axes.set(title=title, xlabel="step")
        axes.legend()
    seam.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
    plt.close(figure)
