"""A run that is killed twenty times at random moments ends, bit for bit, where an undisturbed one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


def tensors(tree: object, name: str = "") -> dict[str, object]:
    """All values of nested dicts and lists by their path."""
    if isinstance(tree, dict):
        parts = tree.items()
    elif isinstance(tree, (list, tuple)):
        parts = enumerate(tree)
    else:
        return {name: tree}
    return {key: value for part, inside in parts for key, value in tensors(inside, f"{name}/{part}").items()}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("optim, dtype, seed", [("forge_adamw", "fp32", 1), ("forge_adamw_8bit", "bf16", 2)])
def test_ten_kills(tmp_path, optim, dtype, seed):
    """Between and inside the parts of a step and of a checkpoint; two runs of ten."""
    kills = 10
    command = [sys.executable, "-W", "ignore", "tests/kill_driver.py", str(tmp_path), optim, dtype]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(kills), str(seed)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    done, lives = map(int, result.stdout.split()[-2:])
    assert done >= kills and lives > done
    whole, killed = (
        tensors(torch.load(tmp_path / name / "end.pt", weights_only=True)) for name in ("whole", "killed")
    )
    assert whole.keys() == killed.keys()
    for key, value in whole.items():
        other = killed[key]
        same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
        assert same and type(value) is type(other), key
    assert any("exp_avg" in key for key in whole)
