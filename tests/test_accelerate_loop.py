"""Raw Accelerate loops with accumulation, clipping, save_state and load_state, against torch.optim.AdamW."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, TensorDataset

import forge_hf
from forge_hf import ForgeAdamW, ForgeRefusal

from .models import IN, OUT, Mlp, Shared, TiedEmbedding, build, same_bits, way_off
from .tolerances import NORM_AUTOCAST, NORM_FP32, WAY_AUTOCAST, WAY_FP32_SMALL

ROWS, BATCH = 26, 4  # seven batches, the last one half full: the last group of three is incomplete


@pytest.fixture(autouse=True)
def _fresh_state():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Run:
    """A loop as the documentation of accelerate shows it."""

    def __init__(
        self, kind: Any, make: Any, precision: str = "no", accumulate: int = 3, seed: int = 1
    ) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        self.accelerator = Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate
        )
        self.net = build(kind, seed)
        optimizer = make(self.net)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(ROWS, 3, IN), torch.randn(ROWS, 3, OUT))
        prepared = self.accelerator.prepare(self.net, optimizer, DataLoader(data, BATCH), scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.norms: list[float] = []
        self.held: list[int] = []

    def epoch(self, max_norm: float | None) -> Run:
        for x, target in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = torch.nn.functional.mse_loss(self.model(x), target)
                self.accelerator.backward(loss)
                if hasattr(self.optimizer.optimizer, "pending_bytes"):
                    self.held.append(self.optimizer.optimizer.pending_bytes())
                if self.accelerator.sync_gradients and max_norm is not None:
                    self.norms.append(
                        self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm).item()
                    )
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self


def forge(mode: str) -> Any:
    return lambda net: ForgeAdamW(net, lr=1e-2, eps=1e-4, update=mode)


def stock(net: Any) -> Any:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)


MODES = [("step", 0.05), ("step", None), ("backward", None), ("backward", math.inf)]


@pytest.mark.parametrize("kind", [Mlp, Shared, TiedEmbedding])
@pytest.mark.parametrize("mode, max_norm", MODES)
def test_fp32(kind, mode, max_norm):
    ours = Run(kind, forge(mode)).epoch(max_norm).epoch(max_norm)
    theirs = Run(kind, stock).epoch(max_norm).epoch(max_norm)
    assert way_off(ours.net, theirs.net, build(kind)) < WAY_FP32_SMALL
    assert ours.norms == pytest.approx(theirs.norms, rel=NORM_FP32)
    if max_norm is not None:
        assert len(ours.norms) == 6
    assert ours.scheduler.get_last_lr() == theirs.scheduler.get_last_lr()


@pytest.mark.parametrize("mode, max_norm", MODES)
def test_bf16(mode, max_norm):
    ours = Run(Shared, forge(mode), "bf16").epoch(max_norm)
    theirs = Run(Shared, stock, "bf16").epoch(max_norm)
    assert way_off(ours.net, theirs.net, build(Shared)) < WAY_AUTOCAST
    assert ours.norms == pytest.approx(theirs.norms, rel=NORM_AUTOCAST)


def test_backward_mode_holds_pairs_only_until_the_last_micro_batch():
    held = Run(Mlp, forge("backward")).epoch(None).held
    assert [bytes_held > 0 for bytes_held in held] == [True, True, False, True, True, False, False]


@pytest.mark.parametrize("mode, max_norm", [("step", 0.05), ("backward", None)])
def test_save_state_and_load_state(tmp_path, mode, max_norm):
    straight = Run(Shared, forge(mode)).epoch(max_norm).epoch(max_norm)
    saved = Run(Shared, forge(mode)).epoch(max_norm)
    saved.accelerator.save_state(str(tmp_path))
    resumed = Run(Shared, forge(mode), seed=5)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.epoch(max_norm)
    assert same_bits(resumed.net, straight.net)


def test_state_saved_by_torchs_optimizer(tmp_path):
    Run(Shared, stock).epoch(None).accelerator.save_state(str(tmp_path))
    ours, theirs = Run(Shared, forge("step"), seed=5), Run(Shared, stock, seed=6)
    for run in (ours, theirs):
        run.accelerator.load_state(str(tmp_path))
        run.epoch(None)
    assert way_off(ours.net, theirs.net, build(Shared)) < WAY_FP32_SMALL


def test_the_wrapped_optimizer_can_be_clipped_by_name():
    run = Run(Mlp, forge("step"), accumulate=1)
    run.model(torch.ones(2, 3, IN)).sum().backward()
    norm = forge_hf.clip_grad_norm_(run.optimizer, 1.0)
    assert norm.item() > 1.0
    assert run.optimizer.optimizer.clip_grad_norm_(math.inf).item() == pytest.approx(1.0, rel=1e-4)


def test_clipping_by_value_is_refused():
    run = Run(Mlp, forge("step"), accumulate=1)
    run.model(torch.ones(2, 3, IN)).sum().backward()
    with pytest.raises(ForgeRefusal, match="clip_grad_value_"):
        run.accelerator.clip_grad_value_(run.model.parameters(), 1.0)
