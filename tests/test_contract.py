"""The contract of torch.optim.Optimizer as users rely on it: schedulers, groups, hooks, copies, files."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler as schedulers

import forge_hf
from forge_hf import ForgeAdamW, ForgeGaLoreAdamW
from tests.models import TiedEmbedding, build, loss_of
from tests.tolerances import WAY_FP32_SMALL

SETTINGS: dict[str, Any] = {"lr": 5e-3, "weight_decay": 0.1}
STEPS = 12
MODES = ["step", "backward"]


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def train(
    model: Any, optimizer: Any, steps: range, after: Callable[[float, int], None] | None = None
) -> None:
    """Plain loop; `after` gets the loss and the step."""
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(float(loss.detach()), step)


def groups_of(model: nn.Module, names: bool = False) -> list[dict[str, Any]]:
    """Two groups with rates of their own."""
    matrices = [(n, p) if names else p for n, p in model.named_parameters() if p.dim() == 2]
    rest = [(n, p) if names else p for n, p in model.named_parameters() if p.dim() != 2]
    return [{"params": matrices, "lr": 5e-3}, {"params": rest, "lr": 1e-2, "weight_decay": 0.0}]


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda of two groups": lambda o: schedulers.LambdaLR(o, [lambda s: 0.9**s, lambda s: 1.0 / (s + 1)]),
    "one cycle, with betas": lambda o: schedulers.OneCycleLR(o, max_lr=[1e-2, 5e-3], total_steps=STEPS + 1),
    "cosine with restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 5),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 4), schedulers.ExponentialLR(o, 0.9)], [4]
    ),
    "cyclic, with betas": lambda o: schedulers.CyclicLR(o, 1e-3, 1e-2, step_size_up=3, cycle_momentum=True),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers(name, mode):
    start = build()
    ends, rates = [], []
    for make in (torch.optim.AdamW, ForgeAdamW):
        model = copy.deepcopy(start)
        extra = {"attach_to": model, "update": mode} if make is ForgeAdamW else {}
        optimizer = make(groups_of(model), **SETTINGS, **extra)
        schedule, seen = SCHEDULES[name](optimizer), []

        def after(loss: float, step: int, schedule: Any = schedule, seen: list[Any] = seen) -> None:
            schedule.step()
            seen.append([(g["lr"], g["betas"]) for g in schedule.optimizer.param_groups])

        train(model, optimizer, range(STEPS), after)
        ends.append(flat(model))
        rates.append(seen)
    assert rates[0] == rates[1]
    assert (ends[1] - ends[0]).norm() / (ends[0] - flat(start)).norm() < WAY_FP32_SMALL


@pytest.mark.parametrize("mode", MODES)
def test_reduce_on_plateau(mode):
    start = build()
    ends = []
    for make in (torch.optim.AdamW, ForgeAdamW):
        model = copy.deepcopy(start)
        extra = {"attach_to": model, "update": mode} if make is ForgeAdamW else {}
        optimizer = make(list(model.parameters()), **SETTINGS, **extra)
        schedule = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        train(model, optimizer, range(STEPS), lambda loss, step, s=schedule: s.step(1.0 + step % 2))
        ends.append((flat(model), optimizer.param_groups[0]["lr"]))
    assert ends[0][1] == ends[1][1] < SETTINGS["lr"]
    assert (ends[1][0] - ends[0][0]).norm() / (ends[0][0] - flat(start)).norm() < WAY_FP32_SMALL


@pytest.mark.parametrize("mode", MODES)
def test_groups_with_names_and_a_group_that_comes_later(mode):
    """Between two steps, or while a gradient is pending."""
    start = build()
    ends = []
    for make in (torch.optim.AdamW, ForgeAdamW):
        model = copy.deepcopy(start)
        extra = {"attach_to": model, "update": mode} if make is ForgeAdamW else {}
        first, second = groups_of(model, names=True)
        names = [name for name, _ in first["params"]]
        last = {**first, "params": [first["params"].pop()], "lr": 2e-3}
        optimizer = make([first], **SETTINGS, **extra)
        train(model, optimizer, range(4))
        model.zero_grad()  # of those that nobody steps yet, as in any loop
        optimizer.add_param_group(second)
        loss_of(model, 4).backward()
        optimizer.add_param_group(last)  # torch finds its gradient in `.grad`, and so do we
        optimizer.step()
        model.zero_grad()
        train(model, optimizer, range(5, STEPS))
        names = names[:-1]
        assert optimizer.param_groups[0]["param_names"] == names
        ends.append(flat(model))
    assert (ends[1] - ends[0]).norm() / (ends[0] - flat(start)).norm() < WAY_FP32_SMALL


def test_hooks_are_called_in_torchs_order():
    model = build()
    optimizer = ForgeAdamW(model, **SETTINGS)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("step pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("step post"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("save pre"))
    optimizer.register_state_dict_post_hook(lambda o, d: calls.append("save post") or {**d, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, d: calls.append("load pre"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("load post"))
    train(model, optimizer, range(1))
    saved = optimizer.state_dict()
    assert saved["note"] == 1
    optimizer.load_state_dict(saved)
    assert calls == ["step pre", "step post", "save pre", "save post", "load pre", "load post"]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "fp32": lambda model: ForgeAdamW(model, **SETTINGS),
    "bf16": lambda model: ForgeAdamW(model, **SETTINGS, state="bf16"),
    "8bit": lambda model: ForgeAdamW(model, **SETTINGS, state="8bit"),
    "galore": lambda model: ForgeGaLoreAdamW(model, **SETTINGS, rank=3, update_proj_gap=4),
}


@pytest.fixture(autouse=True)
def _small_tensors_are_quantized(monkeypatch):
    monkeypatch.setattr("forge_hf.state.SMALLEST_QUANTIZED", 128)


def same(first: Any, second: Any) -> bool:
    """Equal tensors and numbers, nested."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("api", ["plain", "state_dict", "flattened"])
def test_distributed_checkpoint_round_trip(tmp_path, kind, api):
    """One process of torch.distributed.checkpoint: formats come back bit for bit, and train on alike."""
    model = build(TiedEmbedding)
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, range(5))
    saved = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    again = build(TiedEmbedding)
    other = OPTIMIZERS[kind](again)
    if api == "plain":
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
        train(again, other, range(1))  # dcp loads into tensors that exist
        into = {"optimizer": copy.deepcopy(other.state_dict())}
        dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
        other.load_state_dict(into["optimizer"])
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=api == "flattened")
        state = get_optimizer_state_dict(model, optimizer, options=options)
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
        start = flat(again)
        into = get_optimizer_state_dict(again, other, options=options)
        assert torch.equal(start, flat(again))  # torch makes states that are missing by a step at rate 0
        dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
        set_optimizer_state_dict(again, other, into, options=options)
    again.load_state_dict(weights)
    assert same(other.state_dict()["state"], saved["state"])
    train(model, optimizer, range(5, 9))
    train(again, other, range(5, 9))
    assert torch.equal(flat(model), flat(again))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_whole_optimizer_in_a_file(kind):
    """torch.save of the optimizer itself; what comes back has its groups, state and options."""
    model = build()
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    for copied in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is type(optimizer) and copied.config == optimizer.config
        assert same(copied.state_dict(), optimizer.state_dict())


def test_copies_of_a_model_with_pending_gradients_are_stock():
    model = build(TiedEmbedding)
    optimizer = ForgeAdamW(model, **SETTINGS)
    loss_of(model, 0).backward()
    assert optimizer.pending_bytes() > 0
    copied = copy.deepcopy(model)
    assert {type(m) for m in copied.modules()} == {type(m) for m in build(TiedEmbedding).modules()}
    assert copied.middle.weight is copied.words.weight
    plain = torch.optim.AdamW(copied.parameters(), **SETTINGS)
    loss_of(copied, 0).backward()
    plain.step()
    optimizer.step()
    assert torch.allclose(flat(copied), flat(model), atol=1e-6)


def test_weights_that_are_assigned_anew():
    """`load_state_dict(assign=True)` puts other Parameters in; torch's optimizer would train the old ones."""
    model = build()
    optimizer = ForgeAdamW(model, **SETTINGS)
    train(model, optimizer, range(1))
    other = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(other, assign=True)
    before = flat(model)
    loss_of(model, 1).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    assert torch.equal(before, flat(model))  # as with torch: the optimizer holds the old ones
    again = ForgeAdamW(model, **SETTINGS)
    again.zero_grad()
    train(model, again, range(1, 2))
    assert not torch.equal(before, flat(model))


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("mode", ["step", "backward"])
@pytest.mark.parametrize("hook", ["gradient", "accumulated"])
def test_gradient_hooks_move_a_weight_to_ordinary_gradients(hook, mode, later):
    """Present when the optimizer is built, or registered later: the hook runs, and its result is used."""
    start = build()
    models = [copy.deepcopy(start) for _ in range(2)]
    seen: list[list[float]] = [[], []]

    def register(model: Any, found: list[float]) -> None:
        if hook == "gradient":
            model.middle.weight.register_hook(lambda grad: found.append(float(grad.norm())) or 0.5 * grad)
        else:

            def halve(parameter: Any) -> None:
                found.append(float(parameter.grad.norm()))
                parameter.grad.mul_(0.5)

            model.middle.weight.register_post_accumulate_grad_hook(halve)

    optimizers = []
    for model, found, make in zip(models, seen, (torch.optim.AdamW, ForgeAdamW), strict=True):
        if not later:
            register(model, found)
        extra = {"update": mode} if make is ForgeAdamW else {}
        optimizer = make(model if make is ForgeAdamW else model.parameters(), **SETTINGS, **extra)
        train(model, optimizer, range(2))
        if later:
            register(model, found)
        train(model, optimizer, range(2, 6))
        optimizers.append(optimizer)
    assert len(seen[0]) == (4 if later else 6)
    assert seen[1] == pytest.approx(seen[0], rel=1e-4)
    away = (flat(models[1]) - flat(models[0])).norm() / (flat(models[0]) - flat(start)).norm()
    assert away < WAY_FP32_SMALL
    assert forge_hf.dense_grad(optimizers[1], models[1].middle.weight) is None
