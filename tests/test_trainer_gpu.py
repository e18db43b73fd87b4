"""What only a GPU can show: the fp16 scaler in the Trainer, and the Triton kernels under whole runs."""

from __future__ import annotations

import pytest
import torch

import forge_hf  # noqa: F401 - registers the names where autoload is off
from forge_hf.dispatch import backend_name
from tests.tolerances import GRAD_NORM, WAY_AUTOCAST, WAY_FP32
from tests.trainer_runs import distance, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("kind", ["llama", "roberta"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_fp16_scaler(tmp_path, kind, clip):
    # The scaler starts at 2**16, which overflows in the first steps of these models: skipped steps are part
    # of the test.
    settings = {"fp16": True, "max_grad_norm": clip, "max_steps": 24, "lr_scheduler_type": "constant"}
    baseline = train(tmp_path / "torch", kind, "adamw_torch", **settings)
    run = train(tmp_path / "forge", kind, "forge_adamw", **settings)
    assert run.trainer.optimizer.optimizer.update_mode == "step"
    assert run.trainer.accelerator.scaler.get_scale() == baseline.trainer.accelerator.scaler.get_scale()
    assert distance(run, baseline) < WAY_AUTOCAST
    for ours, theirs in zip(run.logged("grad_norm"), baseline.logged("grad_norm"), strict=True):
        assert ours == pytest.approx(theirs, rel=GRAD_NORM, nan_ok=True)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_backends_give_the_same_run(tmp_path, backend, monkeypatch):
    baseline = train(tmp_path / "torch", "llama", "adamw_torch")
    monkeypatch.setenv("FORGE_HF_BACKEND", backend)
    run = train(tmp_path / "forge", "llama", "forge_adamw")
    assert backend_name(run.trainer.model.lm_head.weight) == backend
    assert distance(run, baseline) < WAY_FP32
