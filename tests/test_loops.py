"""Orders of forward, backward, step and zero_grad: as in torch, or refused where a gradient would be lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from forge_hf import ForgeAdamW, ForgeRefusal

from .models import HIDDEN, build, loss_of, same_bits, snapshot, train, way_off
from .tolerances import WAY_FP32_SMALL


@pytest.mark.parametrize("mode", ["step", "backward"])
def test_zero_grad_between_forward_and_backward(mode):
    model, stock = build(), build()
    pairs = (model, ForgeAdamW(model, update=mode)), (stock, torch.optim.AdamW(stock.parameters()))
    for step in range(3):
        for net, optimizer in pairs:
            loss = loss_of(net, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert way_off(model, stock, build()) < WAY_FP32_SMALL


@pytest.mark.parametrize("mode", ["step", "backward"])
def test_step_between_forward_and_backward_is_refused_as_torch_refuses_it(mode):
    model = build()
    optimizer = ForgeAdamW(model, update=mode)
    train(model, optimizer, steps=1)
    stale = loss_of(model, 1)
    train(model, optimizer, steps=1, first_step=2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_step_without_zero_grad_is_refused_where_torch_would_add():
    model = build()
    optimizer = ForgeAdamW(model)
    loss_of(model, 0).backward()
    optimizer.step()
    before = snapshot(model)
    loss_of(model, 1).backward()
    with pytest.raises(ForgeRefusal, match=r"after step\(\) without zero_grad\(\)"):
        optimizer.step()
    assert same_bits(model, before)


def test_second_step_without_backward_is_refused_and_moves_nothing():
    model = build()
    optimizer = ForgeAdamW(model)
    loss_of(model, 0).backward()
    optimizer.step()
    before = snapshot(model)
    with pytest.raises(ForgeRefusal, match="without a new backward"):
        optimizer.step()
    assert same_bits(model, before)
    optimizer.zero_grad()
    optimizer.step()
    assert same_bits(model, before)


def test_zero_grad_after_updates_in_backward_is_refused():
    """A GAN's generator step, or a skipped batch: torch would drop these gradients; here they are applied."""
    for drop in ("optimizer", "model"):
        model = build()
        optimizer = ForgeAdamW(model, update="backward")
        loss_of(model, 0).backward()
        with pytest.raises(ForgeRefusal, match="already applied to 3 of 3 weights"):
            (optimizer if drop == "optimizer" else model).zero_grad()
        with pytest.raises(ForgeRefusal, match="already applied"):
            optimizer.step()
        optimizer.accept_partial_step()
        train(model, optimizer, steps=1)


def test_step_mode_may_drop_gradients_freely():
    model, stock = build(), build()
    pairs = (model, ForgeAdamW(model)), (stock, torch.optim.AdamW(stock.parameters()))
    for net, optimizer in pairs:
        for step in range(5):
            loss_of(net, step).backward()
            if step % 2:
                optimizer.step()
            net.zero_grad()
    assert way_off(model, stock, build()) < WAY_FP32_SMALL


@pytest.mark.parametrize("owner", ["model", "optimizer"])
@pytest.mark.parametrize("mode", ["step", "backward"])
def test_zero_grad_to_zeros_keeps_torchs_decay_of_unused_layers(mode, owner):
    model, stock = build(), build()
    pairs = (
        (model, ForgeAdamW(model, weight_decay=0.3, update=mode)),
        (stock, torch.optim.AdamW(stock.parameters(), weight_decay=0.3)),
    )
    for net, optimizer in pairs:
        for step in range(4):
            if step == 2:
                net.head(torch.ones(HIDDEN)).sum().backward()  # the other layers take no part
            else:
                loss_of(net, step).backward()
            optimizer.step()
            (net if owner == "model" else optimizer).zero_grad(set_to_none=False)
    assert way_off(model, stock, build()) < WAY_FP32_SMALL


@pytest.mark.parametrize("frozen_first", [False, True])
def test_frozen_then_unfrozen(frozen_first):
    model, stock = build(), build()
    for net in (model, stock):
        net.middle.weight.requires_grad_(not frozen_first)
    pairs = (
        (model, ForgeAdamW(model, lr=1e-2)),
        (stock, torch.optim.AdamW(stock.parameters(), lr=1e-2)),
    )
    for net, optimizer in pairs:
        for frozen in (frozen_first, not frozen_first, False):
            net.middle.weight.requires_grad_(not frozen)
            train(net, optimizer, steps=2)
    assert way_off(model, stock, build()) < WAY_FP32_SMALL


def test_closure():
    model, stock = build(), build()
    pairs = (model, ForgeAdamW(model)), (stock, torch.optim.AdamW(stock.parameters()))
    for net, optimizer in pairs:
        for step in range(3):

            def closure(net: nn.Module = net, optimizer: Any = optimizer, step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(net, step)
                loss.backward()
                return loss

            assert torch.is_tensor(optimizer.step(closure))
    assert way_off(model, stock, build()) < WAY_FP32_SMALL
