"""The scripts of benchmarks/ where no GPU is needed: what counts as a result, filters, plots."""

from __future__ import annotations

import csv
import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the source distribution has no benchmarks/")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ("", ["1x512", "1x2048 checkpointing", "4x2048 checkpointing", "fp32 1x512 checkpointing"]),
        ("1x512", ["1x512"]),  # an exact name, though it is part of another
        ("2048", ["1x2048 checkpointing", "4x2048 checkpointing"]),
        ("fp32, 4x", ["4x2048 checkpointing", "fp32 1x512 checkpointing"]),
        ("8x", []),
    ],
)
def test_filters_choose_exact_names_first(filters: str, expected: list[str]) -> None:
    step = script("step")
    assert step.chosen(list(step.SETTINGS), filters) == expected


def test_only_lack_of_memory_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    step = script("step")
    line, setting = step.BF16_LINES["adamw_torch_fused clip 1.0"], step.SETTINGS["1x512"]

    def fail(message: str) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(step, "measure", lambda *_: fail("CUDA out of memory. Tried to allocate 2.00 GiB."))
    row = step.one(line, setting, "tiny", 1, 0)
    assert (row["result"], row["clip"], row["moments"]) == ("out of memory", 1.0, "bf16")
    monkeypatch.setattr(step, "measure", lambda *_: fail("an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        step.one(line, setting, "tiny", 1, 0)


def test_missing_packages_are_results(monkeypatch: pytest.MonkeyPatch) -> None:
    step = script("step")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in step.PACKAGES else find(name, *rest)
    )
    results = {
        name: step.one(line, step.SETTINGS["1x512"], "tiny", 1, 0)["result"]
        for name, line in step.BF16_LINES.items()
        if line.kind in step.PACKAGES
    }
    assert len(results) == 5 and set(results.values()) == {"not installed"}


def test_plots_know_the_committed_files_and_refuse_others(tmp_path: Path) -> None:
    plots = script("plots")
    for name, known in (
        ("h200_llama8b_memory", True),
        ("h200_kernels", True),
        ("h200_glue_compare", False),
    ):
        shutil.copy(FOLDER / "results" / f"{name}.csv", tmp_path)
        assert plots.draw(tmp_path / f"{name}.csv", tmp_path) is known
        assert (tmp_path / f"{name}.png").exists() is known


def test_a_line_without_figures_is_drawn_as_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, plots = script("step"), script("plots")
    rows = [
        {"setting": "fp32", "line": "adamw_torch_fused", "result": "out of memory"},
        {"setting": "fp32", "line": "forge_adamw", "result": "ok", "step_ms": 700.0, "peak_gib": 50.25},
    ]
    step.write(rows, tmp_path / "step.csv")
    texts: list[str] = []
    monkeypatch.setattr(
        plots, "save", lambda figure, _: texts.extend(t.get_text() for a in figure.axes for t in a.texts)
    )
    with (tmp_path / "step.csv").open(newline="") as file:
        plots.plot_steps(list(csv.DictReader(file)), tmp_path / "step.png")
    assert texts == ["out of memory", "700", "out of memory", "50.25"]


def test_estimates_are_checked_without_a_gpu_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = script("estimate_check")
    monkeypatch.setattr("sys.argv", ["estimate_check.py", "--smoke", "--output", str(tmp_path)])
    assert check.main() == 0
    row = next(csv.DictReader((tmp_path / "estimate_check.csv").open()))
    assert (row["model"], row["method"]) == ("tiny", "forge_adamw") and float(row["predicted_gib"]) > 0
    assert "tiny" in capsys.readouterr().out
    assert len(check.PAIRS) >= 8 and {pair.model for pair in check.PAIRS} >= {"0.1B", "8B"}


@pytest.mark.parametrize("optim", ["forge_adamw", "galore_adamw"])
def test_a_short_soak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], optim: str
) -> None:
    soak = script("soak")
    monkeypatch.setattr("sys.argv", ["soak.py", "--steps", "12", "--optim", optim])
    assert soak.main() == 0
    text = capsys.readouterr().out
    assert "adamw_torch" in text and optim in text and "compiled late 0" in text
