"""Whole runs of the forge optimizers against torch's own, weight for weight."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from forge_hf import ForgeAdamW, ForgeLion, ForgeSGD

from .models import EVERY_MODEL, Mlp, Shared, TiedEmbedding, build, decay_groups, train, way_off
from .tolerances import (
    NORM_AUTOCAST,
    NORM_FP32,
    THREE_WAY,
    THREE_WAY_STOCHASTIC,
    WAY_AUTOCAST,
    WAY_FP32_SMALL,
    WAY_LION,
)

LR = 1e-2
MODES = ["step", "backward"]
# A weight read outside its module, or in an embedding, delivers part of its gradient through autograd.
LATE = {"Outside"}


def compare(
    kind: Any,
    ours: Any,
    theirs: Any,
    limit: float = WAY_FP32_SMALL,
    schedule: Any = None,
    eval_mode: bool = False,
    **loop: Any,
) -> tuple[Any, Any]:
    """Train two copies and hold their end points together; returns the norms of both."""
    start, model, reference = build(kind), build(kind), build(kind)
    if eval_mode:
        model.eval()
        reference.eval()
    optimizers = ours(model), theirs(reference)
    schedulers = [schedule(optimizer) if schedule else None for optimizer in optimizers]
    norms = [
        train(net, optimizer, scheduler=scheduler, **loop)
        for net, optimizer, scheduler in zip((model, reference), optimizers, schedulers, strict=True)
    ]
    assert way_off(model, reference, start) < limit
    return tuple(norms)


def forge(mode: str, **settings: Any) -> Any:
    return lambda model: ForgeAdamW(model, lr=LR, update=mode, **settings)


def torch_adamw(**settings: Any) -> Any:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=LR, **settings)


@pytest.mark.parametrize("eval_mode", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", EVERY_MODEL)
def test_every_use_of_a_weight(kind, mode, eval_mode):
    if mode == "backward" and kind.__name__ in LATE:
        pytest.skip("refused: see test_tape.py")
    compare(kind, forge(mode), torch_adamw(), eval_mode=eval_mode)


@pytest.mark.parametrize("micro_batches", [(3,), (4, 4, 1)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", EVERY_MODEL)
def test_accumulation_and_an_incomplete_last_group(kind, mode, micro_batches):
    if mode == "backward" and kind.__name__ in LATE:
        pytest.skip("refused: see test_tape.py")
    compare(kind, forge(mode), torch_adamw(), steps=6, micro_batches=micro_batches)


@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1.0, math.inf])
@pytest.mark.parametrize("kind", EVERY_MODEL)
def test_clipping_with_a_rule_that_feels_the_scale(kind, max_norm):
    ours, theirs = compare(
        kind,
        lambda model: ForgeSGD(model, lr=0.3, momentum=0.9),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        max_norm=max_norm,
        micro_batches=(2,),
    )
    assert ours == pytest.approx(theirs, rel=NORM_FP32)


@pytest.mark.parametrize("max_norm", [1e-3, 1.0])
def test_clipping_with_adamw_and_a_large_eps(max_norm):
    settings = {"eps": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.2}
    ours, theirs = compare(Mlp, forge("step", **settings), torch_adamw(**settings), max_norm=max_norm)
    assert ours == pytest.approx(theirs, rel=NORM_FP32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "settings",
    [
        {"betas": (0.0, 0.5)},
        {"betas": (0.95, 0.9999), "eps": 1e-4},
        {"weight_decay": 0.0},
        {"weight_decay": 2.0, "eps": 0.1},
    ],
)
def test_settings(mode, settings):
    compare(Mlp, forge(mode, **settings), torch_adamw(**settings))


@pytest.mark.parametrize("mode", MODES)
def test_decay_groups_with_their_own_rate(mode):
    compare(
        Shared,
        lambda model: ForgeAdamW(decay_groups(model), lr=LR, attach_to=model, update=mode),
        lambda model: torch.optim.AdamW(decay_groups(model), lr=LR),
    )


SCHEDULES = {
    "warmup": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4)),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "one_cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 3 * LR, total_steps=12),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(mode, name):
    compare(Mlp, forge(mode), torch_adamw(), schedule=SCHEDULES[name])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(mode, nesterov, momentum):
    if nesterov and not momentum:
        pytest.skip("refused by torch and by us")
    settings = {"lr": 0.05, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.1}
    compare(
        Shared,
        lambda model: ForgeSGD(model, update=mode, **settings),
        lambda model: torch.optim.SGD(model.parameters(), **settings),
    )


class Lion64(torch.optim.Optimizer):
    """Lion as in Chen et al. 2023, Algorithm 2, on a float64 model."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("exp_avg", torch.zeros_like(weight))
                direction = torch.sign(beta1 * momentum + (1 - beta1) * weight.grad)
                weight -= lr * (direction + group["weight_decay"] * weight)
                momentum.mul_(beta2).add_((1 - beta2) * weight.grad)


@pytest.mark.parametrize("mode", MODES)
def test_lion_against_float64(mode):
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    start, model, reference = build(), build(), build(dtype=torch.float64)
    train(model, ForgeLion(model, update=mode, **settings))
    train(reference, Lion64(reference.parameters(), **settings), dtype=torch.float64)
    assert way_off(model, reference, start) < WAY_LION


def distances_to_fp32(
    kind: Any, lr: float, steps: int, settings: dict[str, Any], **low: Any
) -> tuple[float, float]:
    """Ways off the fp32 run in a low precision, summed over two seeds: ours and torch's."""
    ours, theirs = 0.0, 0.0
    for seed in range(2):
        dtype = low.get("dtype", torch.float32)
        start, exact = (build(kind, seed, dtype).float() for _ in range(2))
        train(exact, torch.optim.AdamW(exact.parameters(), lr=lr), steps)
        model, reference = (build(kind, seed, dtype) for _ in range(2))
        train(model, ForgeAdamW(model, lr=lr, **settings), steps, **low)
        train(reference, torch.optim.AdamW(reference.parameters(), lr=lr), steps, **low)
        ours += way_off(model, exact, start)
        theirs += way_off(reference, exact, start)
    return ours, theirs


@pytest.mark.parametrize("kind", [Mlp, Shared, TiedEmbedding])
def test_bf16_autocast_is_as_close_to_fp32_as_torch(kind):
    ours, theirs = distances_to_fp32(kind, LR, 10, {}, autocast=torch.bfloat16)
    assert ours < THREE_WAY * theirs


def test_bf16_autocast_norms_and_clipping():
    ours, theirs = compare(
        Shared,
        lambda model: ForgeSGD(model, lr=0.3),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.3),
        limit=WAY_AUTOCAST,
        autocast=torch.bfloat16,
        max_norm=0.5,
        micro_batches=(2,),
    )
    assert ours == pytest.approx(theirs, rel=NORM_AUTOCAST)


@pytest.mark.parametrize("kind, mode", [(Mlp, "backward"), (Shared, "step")])
@pytest.mark.parametrize("settings", [{}, {"state": "fp32"}, {"rounding": "nearest", "state": "fp32"}])
def test_pure_bf16_is_closer_to_fp32_than_torch(kind, mode, settings):
    ours, theirs = distances_to_fp32(kind, 1e-3, 20, {"update": mode, **settings}, dtype=torch.bfloat16)
    assert ours < theirs * (THREE_WAY if "rounding" in settings else THREE_WAY_STOCHASTIC)
