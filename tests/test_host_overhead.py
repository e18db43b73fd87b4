"""The engine's own work per linear layer, counted in calls, so that no machine's speed matters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from forge_hf import FactoredGradient, ForgeAdamW, ForgeConfigError, gradient, reference, update
from forge_hf.dispatch import backend_for, backend_name

from .models import build, loss_of, same_bits, snapshot

WIDTH, TOKENS = 16, 4
PHASES = ("forward", "backward", "clip", "step", "zero_grad")


class Operations(TorchDispatchMode):
    """Counts what reaches torch's dispatcher."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(part: Callable[[], Any]) -> int:
    with Operations() as counter:
        part()
    return counter.count


def calls(part: Callable[[], Any]) -> int:
    """Functions that `part` enters, in Python and C."""
    count = 0

    def count_one(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count_one)
    try:
        part()
    finally:
        sys.setprofile(before)
    return count


class Stub(SimpleNamespace):
    """As hashable as a module."""

    __hash__ = object.__hash__


@pytest.fixture
def no_kernels(monkeypatch):
    """A backend that does nothing: what remains is the engine."""
    norm_sq = torch.ones(())
    stub = Stub(
        wgrad_updates_=lambda updates, *_: [norm_sq] * len(updates),
        dense_updates_=lambda _: None,
        waits_for_company=lambda _: True,
        wgrad_norm_sq=lambda *_: norm_sq,
        wgrad_norms_sq=lambda pairs: norm_sq.expand(len(pairs)),
    )
    for module in (update, gradient):
        monkeypatch.setattr(module, "backend_for", lambda _: stub)


def phases(layers: int, mode: str) -> dict[str, Callable[[], Any]]:
    """The parts of a step of a stack of layers without biases; "stock" has no optimizer of ours."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer: Any = None if mode == "stock" else ForgeAdamW(model, update=mode)
    leaf, result = torch.randn(1, TOKENS, WIDTH, requires_grad=True), []

    def clip() -> None:
        optimizer.clip_grad_norm_(1.0 if mode == "step" else float("inf"))

    parts: list[Callable[[], Any]] = [
        lambda: result.append(model(leaf * 1.0).sum()),
        lambda: result.pop().backward(),
    ]
    if optimizer is not None:
        parts += [clip, optimizer.step, optimizer.zero_grad]
    return dict(zip(PHASES, parts, strict=False))


def per_layer(count: Callable[[Callable[[], Any]], int], mode: str) -> dict[str, float]:
    """Counts of a second step (the first one allocates), by what ten more layers add."""
    totals: list[dict[str, int]] = []
    for layers in (10, 20):
        parts = phases(layers, mode)
        for part in parts.values():
            part()
        totals.append({name: count(part) for name, part in parts.items()})
    return {name: (totals[1][name] - totals[0][name]) / 10 for name in totals[0]}


def test_operations_per_layer(no_kernels):
    stock = per_layer(operations, "stock")
    step, backward = per_layer(operations, "step"), per_layer(operations, "backward")
    assert step["forward"] <= stock["forward"]
    assert step["backward"] <= stock["backward"] - 3  # the pair instead of dW
    assert step["clip"] == 0  # one stack for all layers
    assert step["step"] <= 3  # the weight without grad, and the step counter read and written
    assert backward["backward"] <= step["backward"] + step["step"]
    assert (backward["clip"], backward["step"]) == (0, 0)
    assert (step["zero_grad"], backward["zero_grad"]) == (0, 0)


# About a tenth more than Python 3.11 with torch 2.13 counted; stock modules enter 7 functions in forward.
CALLS = {
    "step": {"forward": 48, "backward": 62, "clip": 22, "step": 56, "zero_grad": 4},
    "backward": {"forward": 48, "backward": 100, "clip": 10, "step": 10, "zero_grad": 4},
}


@pytest.mark.parametrize("mode", list(CALLS))
def test_calls_per_layer(no_kernels, mode):
    counted = per_layer(calls, mode)
    for phase, limit in CALLS[mode].items():
        assert 0 < counted[phase] <= limit, phase


def test_numbers_of_a_group_are_computed_once_per_step(monkeypatch):
    model = build()
    optimizer = ForgeAdamW(model)
    asked: list[int] = []
    rule = type(optimizer.rule)
    scalars = rule.scalars
    monkeypatch.setattr(rule, "scalars", lambda self, *args: asked.append(args[1]) or scalars(self, *args))
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert asked == [1, 2]


def test_new_settings_act_in_the_next_step_of_either_mode():
    for mode in ("step", "backward"):
        model = build()
        optimizer = ForgeAdamW(model, update=mode, weight_decay=0.0)
        for step, lr in enumerate((1e-2, 0.0, 1e-2)):
            optimizer.param_groups[0]["lr"] = lr
            before = model.middle.weight.detach().clone()
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(before, model.middle.weight) is (lr == 0.0)


def test_numbers_are_forgotten_with_the_step_that_a_checkpoint_undoes():
    moved = []
    for undone in (False, True):
        model = build()
        optimizer = ForgeAdamW(model, update="backward", weight_decay=0.0)
        weights, state = snapshot(model), optimizer.state_dict()
        if undone:
            optimizer.param_groups[0]["lr"] = 0.5
            loss_of(model, 0).backward()
            model.load_state_dict(weights.state_dict())
            optimizer.load_state_dict(state)
            optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 1e-2
        loss_of(model, 0).backward()
        optimizer.step()
        moved.append(model)
    assert same_bits(*moved)


def test_backend_variable_is_read_again_after_a_step_and_for_a_new_optimizer(monkeypatch):
    model = build()
    optimizer = ForgeAdamW(model)
    assert backend_name(model.head.weight) == "reference"
    loss_of(model, 0).backward()
    optimizer.step()
    monkeypatch.setenv("FORGE_HF_BACKEND", "nonsense")
    for _ in range(2):  # a refusal is not remembered as an answer
        with pytest.raises(ForgeConfigError, match="'nonsense' is unknown"):
            backend_for(model.head.weight)
    monkeypatch.setenv("FORGE_HF_BACKEND", "reference")
    assert backend_for(model.head.weight) is reference
    monkeypatch.setenv("FORGE_HF_BACKEND", "nonsense")
    ForgeAdamW(build())
    with pytest.raises(ForgeConfigError, match="'nonsense' is unknown"):
        backend_for(model.head.weight)


def test_weights_share_the_clip_coefficient_and_a_given_one_is_copied():
    model = build()
    optimizer = ForgeAdamW(model)
    loss_of(model, 0).backward()
    optimizer.clip_grad_norm_(1e-3)
    held = [slot.gradient.coefficient for slot in optimizer.tape.slots]
    assert all(coefficient is held[0] for coefficient in held)
    assert 0.0 < held[0].item() < 1.0
    alone = FactoredGradient(model.head.weight)
    alone.add_pair(torch.ones(1, 6), torch.ones(1, 24))
    mine: Tensor = torch.tensor(0.5)
    alone.scale_(mine)
    mine.zero_()
    assert alone.dense().unique().tolist() == [0.5]


def test_step_counters_are_tensors_of_their_own():
    model = build()
    optimizer = ForgeAdamW(model)
    counters = []
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        counters.append([state["step"] for state in optimizer.state.values()])
    assert all(first is last for first, last in zip(counters[0], counters[2], strict=True))
    assert len({counter.data_ptr() for counter in counters[2]}) == len(counters[2])
    assert [counter.item() for counter in counters[2]] == [3.0] * len(counters[2])
