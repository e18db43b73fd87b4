"""Exceptions in the middle: no stale pairs, no half-updated model that goes unnoticed, and a way on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge_hf import ForgeAdamW, ForgeRefusal, reference

from .models import (
    Checkpointed,
    Mlp,
    ReentrantCheckpointed,
    Shared,
    build,
    loss_of,
    same_bits,
    snapshot,
    train,
    way_off,
)
from .tolerances import WAY_FP32_SMALL


class Boom(Exception):
    """What the tests throw."""


class _Thrower(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        raise Boom


def throw_behind(module: torch.nn.Module) -> Any:
    """Make backward fail just before it reaches `module` (its output's gradient is never delivered)."""
    return module.register_forward_hook(lambda _module, _args, output: _Thrower.apply(output))


def interrupted(model: Any, optimizer: Any, where: str = "middle") -> None:
    """Run a backward that fails before it reaches `where`, and look at once for stale pairs."""
    handle = throw_behind(getattr(model, where))
    try:
        with pytest.raises(Boom):
            loss_of(model, 0).backward()
        assert optimizer.pending_bytes() == 0
    finally:
        handle.remove()


KINDS = [Mlp, Shared, Checkpointed, ReentrantCheckpointed]


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_backward_in_step_mode(kind):
    model, reference_model = build(kind), build(kind)
    optimizer = ForgeAdamW(model)
    before = snapshot(model)
    interrupted(model, optimizer)
    assert same_bits(model, before)
    with pytest.raises(
        ForgeRefusal, match=r"interrupted by an exception, and its gradients were dropped.*zero_grad"
    ):
        optimizer.step()
    with pytest.raises(ForgeRefusal, match="gradients were dropped"):
        optimizer.clip_grad_norm_(1.0)
    model.zero_grad()
    train(model, optimizer, steps=3)
    train(reference_model, torch.optim.AdamW(reference_model.parameters()), steps=3)
    assert way_off(model, reference_model, before) < WAY_FP32_SMALL


def test_backward_that_goes_on_after_a_caught_exception_is_refused_too():
    model = build()
    optimizer = ForgeAdamW(model)
    interrupted(model, optimizer)
    loss_of(model, 1).backward()  # torch would add this to half of the first one
    with pytest.raises(ForgeRefusal, match="gradients were dropped"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, steps=1)


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_backward_in_backward_mode(kind):
    model = build(kind)
    optimizer = ForgeAdamW(model, update="backward")
    saved, state = snapshot(model), optimizer.state_dict()
    interrupted(model, optimizer)
    message = (
        r"interrupted backward\(\) after at least 1 of 3 .*load the last checkpoint .*accept_partial_step"
    )
    with pytest.raises(ForgeRefusal, match=message):
        optimizer.step()
    with pytest.raises(ForgeRefusal, match=message):
        loss_of(model, 1).backward()
    optimizer.zero_grad()  # does not repair the weights
    with pytest.raises(ForgeRefusal, match=message):
        optimizer.step()
    model.load_state_dict(saved.state_dict())
    optimizer.load_state_dict(state)
    other = build(kind)
    train(model, optimizer, steps=3)
    train(other, ForgeAdamW(other, update="backward"), steps=3)
    assert same_bits(model, other)


def test_backward_that_fails_before_any_update_can_simply_be_retried():
    model, other = build(), build()
    optimizer = ForgeAdamW(model, update="backward")
    interrupted(model, optimizer, "head")
    optimizer.zero_grad()
    train(model, optimizer, steps=2)
    train(other, ForgeAdamW(other, update="backward"), steps=2)
    assert same_bits(model, other)


def test_accept_partial_step_drops_every_gradient():
    model = build()
    optimizer = ForgeAdamW(model, update="backward")
    interrupted(model, optimizer)
    assert model.head.bias.grad is not None
    optimizer.accept_partial_step()
    assert all(parameter.grad is None for parameter in model.parameters())
    train(model, optimizer, steps=1)


def test_exception_in_forward_leaves_nothing():
    model, other = build(Shared), build(Shared)
    optimizer = ForgeAdamW(model, update="backward")
    handle = model.head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Boom()))
    with pytest.raises(Boom):
        loss_of(model, 0)
    handle.remove()
    assert optimizer.pending_bytes() == 0
    train(model, optimizer, steps=3)
    train(other, torch.optim.AdamW(other.parameters()), steps=3)
    assert way_off(model, other, build(Shared)) < WAY_FP32_SMALL


def failing(monkeypatch: Any, name: str, call: int, after: bool) -> None:
    """Let the `call`-th use of a backend function fail, before or after its work."""
    original, calls = getattr(reference, name), []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            if after:
                original(*args, **kwargs)
            raise Boom
        return original(*args, **kwargs)

    monkeypatch.setattr(reference, name, wrapper)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "function, call, done", [("wgrad_update_", 1, 0), ("wgrad_update_", 2, 0), ("dense_updates_", 1, 2)]
)
def test_interrupted_step(monkeypatch, function, call, done, after):
    model = build()
    optimizer = ForgeAdamW(model)
    saved, state = snapshot(model), optimizer.state_dict()
    loss_of(model, 0).backward()
    with monkeypatch.context() as patch:
        failing(patch, function, call, after)
        with pytest.raises(Boom):
            optimizer.step()
    assert optimizer.pending_bytes() == 0
    # Updates of one kind run together and are counted together: two pairs, then the rest.
    message = rf"interrupted step\(\) after at least {done} of 7 parameters had been updated"
    for attempt in (
        optimizer.step,
        lambda: loss_of(model, 1).backward(),
        lambda: optimizer.clip_grad_norm_(1.0),
    ):
        with pytest.raises(ForgeRefusal, match=message):
            attempt()
    model.load_state_dict(saved.state_dict())
    optimizer.load_state_dict(state)
    other = build()
    train(model, optimizer, steps=3)
    train(other, ForgeAdamW(other), steps=3)
    assert same_bits(model, other)


def test_interrupted_step_accepted(monkeypatch):
    model = build()
    optimizer = ForgeAdamW(model)
    loss_of(model, 0).backward()
    with monkeypatch.context() as patch:
        failing(patch, "wgrad_update_", 2, False)
        with pytest.raises(Boom):
            optimizer.step()
    optimizer.accept_partial_step()
    assert all(parameter.grad is None for parameter in model.parameters())
    train(model, optimizer, steps=1)


def test_update_that_fails_inside_backward(monkeypatch):
    model = build()
    optimizer = ForgeAdamW(model, update="backward")
    with monkeypatch.context() as patch:
        failing(patch, "wgrad_update_", 2, False)
        with pytest.raises(Boom):
            loss_of(model, 0).backward()
    assert optimizer.pending_bytes() == 0
    with pytest.raises(ForgeRefusal, match=r"interrupted backward\(\) after at least 2 of 3"):
        optimizer.step()


def test_refused_step_moves_nothing_and_must_be_zeroed():
    """A held tensor that was written to: found before the first parameter is updated."""
    model = build()
    optimizer = ForgeAdamW(model)
    before = snapshot(model)
    x = 1.0 * torch.randn(4, 12, requires_grad=True)
    model(x).sum().backward()
    with torch.no_grad():
        x.zero_()
    with pytest.raises(ForgeRefusal, match="The input of 'first.weight' was changed in place"):
        optimizer.step()
    assert same_bits(model, before)
    with pytest.raises(ForgeRefusal, match="gradients were dropped"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, steps=1)
    assert not same_bits(model, before)


def test_sparse_gradient_is_refused_before_anything_moves():
    model = build()
    model.words = torch.nn.Embedding(4, 4, sparse=True)
    optimizer = ForgeAdamW(model)
    before = snapshot(model)
    (loss_of(model, 0) + model.words(torch.tensor([1])).sum()).backward()
    with pytest.raises(ForgeRefusal, match="'words.weight' received a sparse gradient"):
        optimizer.step()
    assert same_bits(model, before)
