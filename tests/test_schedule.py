"""A changing schedule compiles nothing, and a step does not wait for the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import forge_hf
from forge_hf.kernels import launch, rules
from tests.kernel_cases import BF16, DEVICE, RULES, poison, randn, scalars_of, setup  # noqa: F401

STEPS = 12


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("name", list(RULES))
def test_lr_step_and_clipping_change_only_what_is_in_memory(name):
    """Everything that can make Triton compile anew is equal in all steps: one plan for all of them."""
    w, moments = setup(name, 64, 128, BF16, BF16)
    pair = [(randn(8, 64, dtype=BF16), randn(8, 128, dtype=BF16, seed=1))]
    seen = set()
    for step in range(1, STEPS):
        s = scalars_of(name, step, lr=1e-3 / step)
        coefficient = torch.tensor(1.0 / step, device=DEVICE)
        launch.wgrad_update_(
            w, pair, moments, RULES[name][0], s, rng_key=(step * 0x9E3779B1) % 2**32, coefficient=coefficient
        )
        arguments = rules.rule_arguments(
            RULES[name][0], s, coefficient, step, moments, None, torch.device(DEVICE)
        )
        seen.add((arguments.constants, arguments.kinds()))
    assert len(launch._KNOWN) == len(seen) == 1


def test_the_numbers_of_a_step_are_copied_once():
    s = scalars_of("adamw", 5)
    device = torch.device(DEVICE)
    first = rules.device_numbers("adamw", s, device, 0)
    assert rules.device_numbers("adamw", s, device, 0) is first
    assert rules.device_numbers("adamw", s._replace(lr=2.0), device, 0) is not first
    want = [
        s.lr / s.bias_correction1, 1 - s.lr * s.weight_decay, 0.9, 0.1, 0.999, 0.001,
        1 / s.bias_correction2_sqrt, 1e-8,
    ]  # fmt: skip
    assert first.tolist() == torch.tensor(want, dtype=torch.float32).tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_step_does_not_synchronise(update, state):
    model = nn.Sequential(nn.Embedding(50, 96), nn.Linear(96, 80), nn.LayerNorm(80)).cuda().bfloat16()
    optimizer = forge_hf.ForgeAdamW(model, update=update, state=state)
    ids = torch.arange(16, device="cuda")
    for step in range(4):
        if step == 2:  # the kernels are compiled by now
            torch.cuda.set_sync_debug_mode("error")
        try:
            model(ids).square().mean().backward()
            if update == "step":
                forge_hf.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
