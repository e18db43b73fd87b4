"""`forge-hf demo` and its parts: figures, files, exit codes, and the check that the two runs agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import forge_hf
from forge_hf.cli import app
from forge_hf.hf import demo as demo_module
from forge_hf.hf import demo_worker
from forge_hf.hf.demo import DemoError, DemoSettings, train_in_subprocess, weight_distance
from forge_hf.hf.generated import WORDS, sentences, word_tokenizer

from .subprocesses import environment


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A whole quick demo: its result and the folder that it wrote."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    arguments = ["demo", "--quick", "--output-dir", str(folder)]
    return CliRunner().invoke(app, arguments, env={"OMP_NUM_THREADS": "1", "COLUMNS": "120"}), folder


def test_the_runs_agree_and_the_table_shows_it(quick):
    result, _ = quick
    assert result.exit_code == 0, result.output
    assert "The two runs agree: they end within 0.2 % of the way travelled." in result.output
    rows = [line.split("│") for line in result.output.splitlines() if "│" in line]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert set(cells) == {
        "training loss, last tenth",
        "accuracy on unseen sentences",
        "gradient bytes at the seam",
        "peak memory of training",
        "time per step, median",
        "time in all",
        "distance of the ends / way",
        "largest of a weight matrix",
    }
    assert cells["accuracy on unseen sentences"][0] == cells["accuracy on unseen sentences"][1]
    assert float(cells["distance of the ends / way"][1].removesuffix("%")) < 0.2


def test_figures_and_plot_are_written(quick):
    _, folder = quick
    assert (folder / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    figures = json.loads((folder / "results.json").read_text())
    torch_run, forge_run = figures["runs"]
    assert (torch_run["optim"], forge_run["optim"]) == ("adamw_torch", "forge_adamw")
    assert figures["distance"]["total"] < figures["tolerance"] == 2e-3
    for run in figures["runs"]:
        assert [step for step, _ in run["loss"]] == list(range(1, 21))
        assert len(run["seam_bytes"]) == 20
        assert run["peak_bytes"] > 0
    # Every weight has a dense gradient in the one run; in the other, never more than that.
    assert set(torch_run["seam_bytes"]) == {4 * torch_run["weights"]}
    assert 0 < max(forge_run["seam_bytes"]) < 4 * torch_run["weights"]
    for ours, theirs in zip(forge_run["grad_norm"], torch_run["grad_norm"], strict=True):
        assert ours[1] == pytest.approx(theirs[1], rel=1e-3)


def here(spec, on_step):
    """A run in this process, which is quicker; its peak memory means nothing."""
    Path(spec["directory"]).mkdir(parents=True)
    return demo_worker.train(spec)


def tampered(spec, on_step):
    """A run here; in the second one a matrix is moved a little."""
    result = here(spec, on_step)
    if spec["optim"] == "forge_adamw":
        path = f"{spec['directory']}/end.pt"
        weights = torch.load(path, weights_only=True)
        weights["roberta.encoder.layer.0.output.dense.weight"] += 1e-4
        torch.save(weights, path)
    return result


def test_runs_that_disagree_are_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(demo_module, "train_in_subprocess", tampered)
    result = CliRunner().invoke(app, ["demo", "--quick", "--steps", "4", "--output-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "The two runs disagree: their ends are " in result.output
    assert "worst: roberta.encoder.layer.0.output.dense.weight" in result.output


def test_runs_from_different_starts_are_not_compared(monkeypatch, tmp_path):
    monkeypatch.setattr(
        demo_module,
        "train_in_subprocess",
        lambda spec, on_step: here(spec | {"seed": len(spec["optim"])}, on_step),
    )
    arguments = ["demo", "--quick", "--steps", "2", "--optim", "forge_sgd", "--output-dir", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "did not start from the same weights" in result.output


def test_another_rule_may_end_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setattr(demo_module, "train_in_subprocess", here)
    arguments = ["demo", "--quick", "--steps", "4", "--optim", "forge_lion", "--output-dir", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "forge_lion is another rule than AdamW" in result.output
    assert json.loads((tmp_path / "results.json").read_text())["distance"]["total"] > 2e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--optim", "forge_adam"],
            "Unknown optim 'forge_adam'. The demo knows forge_adamw, forge_lion, forge_sgd; did",
        ),
        (["--steps", "1"], "--steps 1 is too few"),
        (["--seed", "-1"], "--seed -1 is out of range"),
        (["--output-dir", "{file}"], "cannot be made: File exists"),
    ],
)
def test_bad_options(arguments, message, tmp_path):
    (tmp_path / "file").touch()
    arguments = [argument.format(file=tmp_path / "file") for argument in arguments]
    result = CliRunner().invoke(app, ["demo", "--quick", "--output-dir", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert f"forge-hf demo: error: {message}" in result.output.replace(
        "--output-dir " + str(tmp_path / "file") + " ", ""
    )


def test_a_run_that_fails_is_reported_with_its_last_words(tmp_path):
    spec = {"optim": "adamw_torhc", "learning_rate": 1e-3, "steps": 2, "seed": 0, "hidden": 16, "layers": 1}
    spec |= {"batch_size": 2, "eval_rows": 2, "directory": str(tmp_path)}
    with pytest.raises(
        DemoError, match=r"(?s)optim='adamw_torhc' failed \(exit code 1\).*not a valid OptimizerNames"
    ):
        train_in_subprocess(spec, lambda step: None)


def test_weight_distance():
    start = {"a": torch.zeros(2, 2), "b": torch.zeros(2, 2), "bias": torch.zeros(2)}
    one = {"a": torch.full((2, 2), 3.0), "b": torch.full((2, 2), 4.0), "bias": torch.zeros(2)}
    other = {"a": torch.full((2, 2), 3.0), "b": torch.full((2, 2), 4.5), "bias": torch.ones(2)}
    distance = weight_distance(start, one, other)
    # |one - start| = (36 + 64)^(1/2) = 10, |one - other| = (1 + 2)^(1/2); b alone: 1 of 8.
    assert distance.total == pytest.approx(3**0.5 / 10)
    assert (distance.largest, distance.name) == (pytest.approx(1 / 8), "b")
    other["a"][0, 0] = float("nan")
    distance = weight_distance(start, one, other)
    assert not distance.total <= demo_module.TOLERANCE
    assert distance.name == "a"


def test_the_generated_task_needs_negation_and_word_order():
    texts, labels = sentences(4000, seed=5)
    assert (texts, labels) == sentences(4000, seed=5)
    assert 0.48 < sum(labels) / len(labels) < 0.52
    # The word that tells most tells little more than a guess among one sentence's clauses.
    best = 0.0
    for word in WORDS:
        chosen = [label for text, label in zip(texts, labels, strict=True) if word in text.split()]
        best = max(best, abs(sum(chosen) / len(chosen) - 0.5))
    assert 0.05 < best < 0.3
    examples = dict(zip(texts, labels, strict=True))
    polarity = {"good": 1, "bad": 0}
    for text, label in examples.items():
        words = text.split()
        if len(words) == 4 and words[-1] in polarity:
            assert label == polarity[words[-1]]


def test_the_tokenizer_knows_every_word_and_pairs_as_roberta_does():
    tokenizer = word_tokenizer()
    texts, _ = sentences(50, seed=1)
    assert tokenizer.unk_token_id not in set(sum(tokenizer(texts)["input_ids"], []))
    ids = tokenizer("the plot", "was bad")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<s>",
        "the",
        "plot",
        "</s>",
        "</s>",
        "was",
        "bad",
        "</s>",
    ]


def test_version_and_help():
    assert CliRunner().invoke(app, ["--version"]).output == f"forge-hf {forge_hf.__version__}\n"
    assert "--quick" in CliRunner().invoke(app, ["demo", "--help"]).output


def test_the_command_starts_without_torch():
    code = "import sys, forge_hf.cli; print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.strip() == "set()"


def test_quick_settings_are_smaller_in_every_way():
    quick, full = DemoSettings.quick(), DemoSettings()
    for name in ("steps", "hidden", "layers", "batch_size", "eval_rows"):
        assert getattr(quick, name) < getattr(full, name)


def test_without_a_terminal_the_progress_is_lines(capsys):
    """A log that stands still for minutes looks hung."""
    import io

    from rich.console import Console
    from rich.progress import Progress

    out = io.StringIO()
    with Progress(console=Console(file=out, force_terminal=False)) as progress:
        task = progress.add_task("forge_adamw", total=40)
        for step in range(1, 41):
            demo_module._show_step(progress, task, step)
    lines = [line for line in out.getvalue().splitlines() if "step" in line]
    assert lines[:2] == ["forge_adamw: step 4 of 40", "forge_adamw: step 8 of 40"] and len(lines) == 10
