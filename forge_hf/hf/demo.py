"""`forge-hf demo`: the same small RoBERTa trained twice by the stock Trainer, and what differed.

The first run takes `optim="adamw_torch"`, the second ours; seed, data and all other arguments are the same. Each run is
a process of its own (see `demo_worker.py`). This file starts them, compares the weights that they end with, and shows
loss, accuracy, memory and time side by side.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["DemoError", "DemoSettings", "LEARNING_RATES", "run_demo", "weight_distance"]

BASELINE = "adamw_torch"

#: Learning rate by `optim`; Lion's signed updates want a smaller one, plain gradient steps a larger one.
LEARNING_RATES = {"forge_adamw": 2e-4, "forge_lion": 3e-5, "forge_sgd": 0.1}

#: How far apart two exact runs may end, as a fraction of the way from start to end. Between two of torch's own AdamW
#: implementations, which differ in rounding only, this model and seed 0 give 1e-5.
TOLERANCE = 2e-3


class DemoError(RuntimeError):
    """The demo cannot run or a run failed; the message says why."""


@dataclass(frozen=True)
class DemoSettings:
    """What to train.

    Attributes:
        optim: The optimizer to compare with `adamw_torch`.
        steps: Optimizer steps per run.
        seed: Seed of weights, data and order.
        output_dir: Where `results.json` and `demo.png` go.
        hidden: Width of the model.
        layers: Its layers.
        batch_size: Sentences per step. About 11 tokens each: few, as with any large model on a small card, so that the
            factors of a gradient are smaller than the gradient.
        eval_rows: Unseen sentences for the accuracy.
    """

    optim: str = "forge_adamw"
    steps: int = 320
    seed: int = 0
    output_dir: Path = Path("forge_hf_demo")
    hidden: int = 512
    layers: int = 2
    batch_size: int = 8
    eval_rows: int = 500

    @classmethod
    def quick(cls, **values: Any) -> DemoSettings:
        """A much smaller model and few steps: seconds, for tests."""
        return cls(**{"steps": 20, "hidden": 64, "layers": 1, "batch_size": 4, "eval_rows": 40} | values)


@dataclass(frozen=True)
class Distance:
    """How far two runs ended from each other, as fractions of the way that the first one travelled.

    Attributes:
        total: Over all weights together.
        largest: The largest over the weight matrices.
        name: Whose that is.
    """

    total: float
    largest: float
    name: str


def weight_distance(start: dict[str, Any], one: dict[str, Any], other: dict[str, Any]) -> Distance:
    """`|one - other| / |one - start|` over all weights, and its largest value among the weight matrices.

    Vectors count in the total only: the gradient of an attention key's bias is zero but for rounding, so the way that it
    travels is noise in any run.
    """
    apart_sq = way_sq = 0.0
    largest, name = 0.0, ""
    for key, weight in one.items():
        apart = float((weight.double() - other[key].double()).norm())
        way = float((weight.double() - start[key].double()).norm())
        apart_sq, way_sq = apart_sq + apart**2, way_sq + way**2
        fraction = apart / way if way else (float("inf") if apart else 0.0)
        # `not <=` rather than `>`, so that NaN counts as the largest.
        if weight.ndim > 1 and not fraction <= largest:
            largest, name = fraction, key
    total = (apart_sq / way_sq) ** 0.5 if way_sq else (float("inf") if apart_sq else 0.0)
    return Distance(total, largest, name)


def train_in_subprocess(spec: dict[str, Any], on_step: Callable[[int], None]) -> dict[str, Any]:
    """Run `demo_worker` on `spec` and return its figures.

    Raises:
        DemoError: the process failed; the message ends with what it wrote last.
    """
    directory = Path(spec["directory"])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "spec.json").write_text(json.dumps(spec))
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "forge_hf.hf.demo_worker", str(directory / "spec.json")]
    result: dict[str, Any] | None = None
    with open(directory / "stderr.txt", "w+", encoding="utf-8") as stderr:
        environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line) if line.startswith('{"event"') else {}
                if event.get("event") == "step":
                    on_step(event["step"])
                elif event.get("event") == "done":
                    result = event["result"]
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if code or result is None:
            stderr.seek(0)
            last = "".join(stderr.readlines()[-12:]).strip()
            raise DemoError(f"The run with optim='{spec['optim']}' failed (exit code {code}):\n{last}")
    return result


def _train_both(settings: DemoSettings, directory: Path, console: Any) -> list[dict[str, Any]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = []
    with Progress(*columns, console=console) as progress:
        for optim in (BASELINE, settings.optim):
            task = progress.add_task(optim, total=settings.steps)
            values = asdict(settings) | {"optim": optim, "directory": str(directory / optim)}
            values["learning_rate"] = LEARNING_RATES["forge_adamw" if optim == BASELINE else optim]
            del values["output_dir"]
            results.append(
                train_in_subprocess(values, lambda step, task=task: progress.update(task, completed=step))
            )
    return results


def _distance(settings: DemoSettings, directory: Path) -> Distance:
    import torch

    def load(optim: str, name: str) -> dict[str, Any]:
        return torch.load(directory / optim / f"{name}.pt", weights_only=True)

    start, other_start = load(BASELINE, "start"), load(settings.optim, "start")
    if any(not torch.equal(start[name], other_start[name]) for name in start):
        raise DemoError("The two runs did not start from the same weights, so they cannot be compared.")
    return weight_distance(start, load(BASELINE, "end"), load(settings.optim, "end"))


def _mib(count: float) -> str:
    return f"{count / 2**20:.2f} MiB" if count < 10 * 2**20 else f"{count / 2**20:.0f} MiB"


def _final_loss(result: dict[str, Any]) -> float:
    """Mean of the last tenth of the training losses; one batch alone is mostly noise."""
    losses = [loss for _, loss in result["loss"]]
    tail = losses[-max(1, len(losses) // 10) :]
    return float(sum(tail) / len(tail))


def table(results: list[dict[str, Any]], distance: Distance) -> Any:
    """The two runs side by side, as a rich table."""
    from rich.table import Table

    one, two = results
    out = Table(title="The same training twice", show_edge=False, pad_edge=False)
    out.add_column("")
    out.add_column(one["optim"], justify="right")
    out.add_column(two["optim"], justify="right")
    out.add_column("difference", justify="right")

    def row(
        label: str, key: Callable[[dict[str, Any]], float], form: Callable[[float], str], percent: bool
    ) -> None:
        a, b = key(one), key(two)
        change = f"{100 * (b - a) / a:+.1f} %" if percent and a else f"{b - a:+.4f}"
        out.add_row(label, form(a), form(b), change)

    row("training loss, last tenth", _final_loss, lambda value: f"{value:.4f}", False)
    row("accuracy on unseen sentences", lambda r: r["accuracy"], lambda value: f"{value:.3f}", False)
    row("gradient bytes held at the seam", lambda r: max(r["seam_bytes"]), _mib, True)
    row("peak memory of training", lambda r: r["peak_bytes"], _mib, True)
    row("time per step (median)", lambda r: r["step_ms"], lambda value: f"{value:.0f} ms", True)
    row("time in all", lambda r: r["seconds"], lambda value: f"{value:.1f} s", True)
    out.add_row("distance of the end points / way travelled", "", f"{100 * distance.total:.4f} %", "")
    out.add_row("  largest over the weight matrices", "", f"{100 * distance.largest:.4f} %", "")
    return out


def _notes(settings: DemoSettings, results: list[dict[str, Any]]) -> str:
    one = results[0]
    memory = (
        "tensors on the GPU above what was allocated before training"
        if one["device"] != "CPU"
        else "resident memory of the run's own process above its level before training"
    )
    return (
        f"RoBERTa class, {one['weights'] / 1e6:.1f} M fp32 weights, {settings.batch_size} sentences per step, "
        f"{settings.steps} steps, clipping at 1.0, warm-up and decay, on {one['device']}.\n"
        f"Always guessing the commoner label scores {one['majority']:.3f}. Both runs keep fp32 moments. Seam: between "
        f"backward and the optimizer's step (sum of .grad, plus pairs held instead).\n"
        f"Peak memory: {memory}; weights are not in it, activations, gradients and moments are."
    )


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Loss, accuracy and bytes at the seam of both runs, over steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (loss, accuracy, seam) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for result, style in zip(results, ({"lw": 4, "alpha": 0.35}, {"lw": 1.3}), strict=True):
        loss.plot(*zip(*result["loss"], strict=True), label=result["optim"], **style)
        accuracy.plot(*zip(*result["accuracy_curve"], strict=True), label=result["optim"], **style)
        seam.plot([size / 2**20 for size in result["seam_bytes"]], label=result["optim"], **style)
    accuracy.axhline(results[0]["majority"], color="grey", ls=":", label="commoner label")
    for axes, title in (
        (loss, "training loss"),
        (accuracy, "accuracy"),
        (seam, "gradients held at the seam, MiB"),
    ):
        axes.set(title=title, xlabel="step")
        axes.legend()
    seam.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _check(settings: DemoSettings) -> None:
    if settings.optim not in LEARNING_RATES:
        near = difflib.get_close_matches(settings.optim, LEARNING_RATES, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        raise DemoError(f"Unknown optim '{settings.optim}'. The demo knows {', '.join(LEARNING_RATES)}{hint}")
    if settings.steps < 2:
        raise DemoError(f"--steps {settings.steps} is too few; give 2 or more.")
    try:
        settings.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"--output-dir {settings.output_dir} cannot be made: {error.strerror}.") from error


def run_demo(settings: DemoSettings, console: Any) -> int:
    """Train twice, show and write the comparison.

    Args:
        settings: What to train.
        console: A rich console to print on.

    Returns:
        The exit code: 1 if the runs disagree though they must not (`forge_adamw`), else 0.

    Raises:
        DemoError: a setting is wrong or a run failed.
    """
    _check(settings)
    console.print(
        f"Training a small RoBERTa twice through the stock Trainer: {BASELINE}, then {settings.optim}."
    )
    with tempfile.TemporaryDirectory(prefix="forge_hf_demo_") as temporary:
        results = _train_both(settings, Path(temporary), console)
        distance = _distance(settings, Path(temporary))
    figures = {"runs": results, "distance": asdict(distance), "tolerance": TOLERANCE, "steps": settings.steps}
    (settings.output_dir / "results.json").write_text(json.dumps(figures, indent=1) + "\n")
    plot(results, settings.output_dir / "demo.png")
    console.print(table(results, distance))
    console.print(_notes(settings, results), highlight=False)
    console.print(
        f"Plot and figures: {settings.output_dir / 'demo.png'}, {settings.output_dir / 'results.json'}"
    )
    if settings.optim != "forge_adamw":
        console.print(f"{settings.optim} is another rule than AdamW, so its weights end elsewhere.")
        return 0
    if distance.total <= TOLERANCE:
        console.print(
            f"[green]The two runs agree[/]: they end within {100 * TOLERANCE:g} % of the way travelled."
        )
        return 0
    console.print(
        f"[bold red]The two runs disagree[/]: they end {100 * distance.total:.3g} % of the way travelled apart, and at most "
        f"{100 * TOLERANCE:g} % is rounding (worst: {distance.name}, {100 * distance.largest:.3g} %). "
        f"Please report this with {settings.output_dir / 'results.json'}."
    )
    return 1
