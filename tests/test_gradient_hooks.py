"""Hooks and parametrizations that come while a model trains move a weight to ordinary gradients, in time."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from forge_hf import ForgeAdamW, ForgeGaLoreAdamW, ForgeRefusal, dense_grad
from forge_hf.layers import ForgeLinear, receiver_of
from tests.models import TiedEmbedding, build, loss_of, train, way_off
from tests.tolerances import WAY_FP32_SMALL

MODES = ["step", "backward"]
SETTINGS: dict[str, Any] = {"lr": 5e-3, "weight_decay": 0.1}


def both(kind: Any, mode: str) -> list[tuple[Any, Any]]:
    """torch's AdamW and ours, each with a model that starts alike."""
    theirs, ours = build(kind), build(kind)
    return [
        (theirs, torch.optim.AdamW(theirs.parameters(), **SETTINGS)),
        (ours, ForgeAdamW(ours, **SETTINGS, update=mode)),
    ]


class Halve(nn.Module):
    """A parametrization, and what a hook does."""

    def forward(self, value: Tensor) -> Tensor:
        return 0.5 * value


def hook(weight: Tensor, kind: str, seen: list[float]) -> Any:
    """Register a hook that notes the norm of what it gets, and halves it."""

    def gradient(grad: Tensor) -> Tensor:
        seen.append(float(grad.norm()))
        return 0.5 * grad

    def accumulated(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(float(parameter.grad.norm()))
        parameter.grad.mul_(0.5)

    if kind == "gradient":
        return weight.register_hook(gradient)
    return weight.register_post_accumulate_grad_hook(accumulated)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
@pytest.mark.parametrize("when", ["before the forward", "before the backward"])
@pytest.mark.parametrize("model_kind", [None, TiedEmbedding])
def test_registered_between_micro_batches(model_kind, when, kind, mode):
    """A pair is already held: a post-accumulate hook sees its sum with what comes, as in torch."""
    seen: list[list[float]] = []
    pairs = both(model_kind or type(build()), mode)
    for model, optimizer in pairs:
        found: list[float] = []
        with optimizer.no_sync() if hasattr(optimizer, "no_sync") else contextlib.nullcontext():
            loss_of(model, 0).backward()
        if when == "before the backward":
            loss = loss_of(model, 1)
        handle = hook(model.middle.weight, kind, found)
        if when == "before the forward":
            loss = loss_of(model, 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, steps=2, first_step=2)
        handle.remove()
        train(model, optimizer, steps=2, first_step=4)
        seen.append(found)
    assert len(seen[0]) == 3
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)
    assert way_off(pairs[1][0], pairs[0][0], build(model_kind or type(build()))) < WAY_FP32_SMALL


def test_a_projection_cannot_be_given_to_a_hook():
    model = build()
    optimizer = ForgeGaLoreAdamW(model, **SETTINGS, rank=1)
    model(torch.randn(30, 12)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(torch.randn(30, 12)).square().sum().backward()
    model.first.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ForgeRefusal, match="projection of the gradient of 'first.weight' is left"):
        model(torch.randn(30, 12))


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "halved": lambda layer: parametrize.register_parametrization(layer, "weight", Halve()),
    "weight norm": lambda layer: parametrizations.weight_norm(layer),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PARAMETRIZATIONS)
@pytest.mark.parametrize("later", [False, True])
def test_parametrizations(later, name, mode):
    """Present when the optimizer is built or registered later; taken off again, the weight goes on."""
    ends = []
    for make in (torch.optim.AdamW, ForgeAdamW):
        model = build()
        if not later:
            PARAMETRIZATIONS[name](model.middle)
        extra = {"attach_to": model, "update": mode} if make is ForgeAdamW else {}
        optimizer = make(list(model.parameters()), **SETTINGS, **extra)
        train(model, optimizer, steps=2)
        if later:
            PARAMETRIZATIONS[name](model.middle)
        train(model, optimizer, steps=2, first_step=2)
        if later:
            loss_of(copy.deepcopy(model), 7).backward()  # a copy's gradients are its own
            parametrize.remove_parametrizations(model.middle, "weight", leave_parametrized=True)
            train(model, optimizer, steps=2, first_step=4)
        ends.append(model)
    start = build()
    if not later:
        PARAMETRIZATIONS[name](start.middle)
    assert way_off(ends[1], ends[0], start) < WAY_FP32_SMALL


def test_a_copy_of_a_parametrized_layer_has_no_optimizer():
    """torch copies the __dict__ of such layers, without asking them."""
    model = build()
    optimizer = ForgeAdamW(model)
    PARAMETRIZATIONS["halved"](model.middle)
    copied = copy.deepcopy(model)
    assert receiver_of(model.middle) is not None and receiver_of(copied.middle) is None
    parametrize.remove_parametrizations(copied.middle, "weight")
    loss_of(copied, 0).backward()
    assert copied.middle.weight.grad is not None
    assert optimizer.pending_bytes() == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("change", ["hook", "parametrization"])
def test_a_group_that_is_added_afterwards(change, pending, mode):
    """Attaching anew, for the group, finds the hook; a gradient that is held stays."""
    ends = []
    for make in (torch.optim.AdamW, ForgeAdamW):
        model = build()
        rest = [parameter for name, parameter in model.named_parameters() if not name.startswith("head")]
        extra = {"attach_to": model, "update": mode} if make is ForgeAdamW else {}
        optimizer = make(rest, **SETTINGS, **extra)
        train(model, optimizer, steps=2)
        loss_of(model, 2).backward()
        if not pending:
            optimizer.step()
            model.zero_grad()
        if change == "hook":
            hook(model.middle.weight, "accumulated", [])
        else:
            PARAMETRIZATIONS["halved"](model.middle)
        optimizer.add_param_group({"params": list(model.head.parameters())})
        if pending:
            optimizer.step()
            model.zero_grad()
        train(model, optimizer, steps=3, first_step=3)
        ends.append(model)
    start = build()
    if change != "hook":
        PARAMETRIZATIONS["halved"](start.middle)
    assert way_off(ends[1], ends[0], start) < WAY_FP32_SMALL


def test_the_report_says_what_has_changed():
    model = build()
    optimizer = ForgeAdamW(model)

    def line(name: str) -> tuple[str, str]:
        return next((entry.path, entry.reason) for entry in optimizer.report() if entry.name == name)

    assert line("middle.weight") == ("pair", "linear layer")
    handle = hook(model.middle.weight, "gradient", [])
    PARAMETRIZATIONS["halved"](model.first)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    assert line("middle.weight") == ("dense", "has gradient hooks, before: linear layer")
    assert line("first.weight") == ("dense", "parameter of ParametrizationList, before: linear layer")
    assert line("head.weight") == ("dense", "no longer in the model, before: linear layer")
    assert "has gradient hooks" in optimizer.explain()
    handle.remove()
    assert line("middle.weight") == ("pair", "linear layer")
    assert type(model.middle) is ForgeLinear


@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
def test_dense_grad_of_a_weight_with_a_hook(kind):
    """What the hook left in `.grad`, and before that what was held."""
    model, other = build(), build()
    optimizer = ForgeAdamW(model)
    for each in (model, other):
        loss_of(each, 0).backward()
        hook(each.middle.weight, kind, [])
    grad = dense_grad(optimizer, model.middle.weight)
    assert grad is not None and torch.allclose(grad, other.middle.weight.grad, rtol=1e-4, atol=1e-7)
    for each in (model, other):
        loss_of(each, 1).backward()
    grad = dense_grad(optimizer, model.middle.weight)
    assert grad is not None and torch.allclose(grad, other.middle.weight.grad, rtol=1e-4, atol=1e-7)
