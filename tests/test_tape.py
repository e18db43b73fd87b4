"""When an update may run: counting of uses, accumulation, and what is refused because it would be inexact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forge_hf import ForgeAdamW, ForgeRefusal, ForgeSGD
from forge_hf.optim import set_last_micro_batch_probe

from .models import HIDDEN, Mlp, Outside, Shared, build, loss_of, same_bits, snapshot, train, way_off
from .tolerances import WAY_FP32_SMALL


def updated_in_backward(optimizer: Any) -> list[str]:
    """Names of the weights that this step's backward has already updated."""
    return [slot.name for slot in optimizer.tape.slots if slot.updated]


def test_backward_mode_updates_in_backward_and_step_mode_does_not():
    for mode, moved in (("backward", True), ("step", False)):
        model = build()
        optimizer = ForgeAdamW(model, update=mode)
        before = snapshot(model)
        loss_of(model, 0).backward()
        for name in ("first", "middle", "head"):
            weight, old = getattr(model, name).weight, getattr(before, name).weight
            assert torch.equal(weight, old) is not moved
        assert len(updated_in_backward(optimizer)) == (3 if moved else 0)


def test_shared_layer_is_updated_once_and_on_its_last_use():
    model = build(Shared)
    optimizer = ForgeSGD(model, update="backward")
    weight, seen = model.middle.weight, []
    before = weight.detach().clone()
    handle = model.middle.register_forward_hook(
        lambda module, args, output: output.register_hook(lambda _: seen.append(weight.detach().clone())) and None
    )
    loss_of(model, 0).backward()
    handle.remove()
    assert len(seen) == 3  # before each use's own backward
    assert all(torch.equal(value, before) for value in seen)
    assert not torch.equal(weight, before)
    assert optimizer.pending_bytes() == 0
    assert int(optimizer.state[weight]["step"]) == 1


def test_forwards_without_backward_only_delay_the_update():
    model, reference = build(), build()
    optimizer = ForgeAdamW(model, lr=1e-2, update="backward")
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(4):
        for net, each in ((model, optimizer), (reference, theirs)):
            with torch.no_grad():
                loss_of(net, 50 + step)  # a reference pass in train mode, as DPO runs it
            if step % 2:
                loss_of(net, 60 + step)  # a graph that is thrown away
            loss_of(net, step).backward()
            if each is optimizer:
                assert updated_in_backward(optimizer) == []
            each.step()
            each.zero_grad()
    assert way_off(model, reference, build()) < WAY_FP32_SMALL
    loss_of(model, 9).backward()
    assert len(updated_in_backward(optimizer)) == 3  # the counts start anew with every step


def test_evaluation_between_steps_does_not_delay():
    model = build()
    optimizer = ForgeAdamW(model, update="backward")
    model.eval()
    with torch.no_grad():
        loss_of(model, 1)
    model.train()
    loss_of(model, 0).backward()
    assert len(updated_in_backward(optimizer)) == 3


@pytest.mark.parametrize("mode", ["step", "backward"])
def test_zero_grad_between_forward_and_backward(mode):
    model, reference = build(), build()
    pairs = (model, ForgeAdamW(model, update=mode)), (reference, torch.optim.AdamW(reference.parameters()))
    for step in range(3):
        for net, optimizer in pairs:
            loss = loss_of(net, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert way_off(model, reference, build()) < WAY_FP32_SMALL


@pytest.mark.parametrize("mode", ["step", "backward"])
def test_step_between_forward_and_backward_is_refused_as_torch_refuses_it(mode):
    model = build()
    optimizer = ForgeAdamW(model, update=mode)
    train(model, optimizer, steps=1)
    stale = loss_of(model, 1)
    train(model, optimizer, steps=1, first_step=2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


@pytest.mark.parametrize("mode", ["step", "backward"])
def test_a_loss_term_on_the_weights_themselves(mode):
    model, reference = build(), build()
    optimizers = ForgeAdamW(model, lr=1e-2, update=mode), torch.optim.AdamW(reference.parameters(), lr=1e-2)
    late = False
    for step in range(4):
        for net, optimizer in zip((model, reference), optimizers, strict=True):
            loss = loss_of(net, step) + 0.1 * sum(p.square().sum() for p in net.parameters())
            try:
                loss.backward()
                optimizer.step()
            except (ForgeRefusal, RuntimeError):
                assert net is model
                assert mode == "backward"
                late = True
                break
            optimizer.zero_grad()
        if late:
            break
    assert late or way_off(model, reference, build()) < WAY_FP32_SMALL


@pytest.mark.parametrize("mode", ["step", "backward"])
@pytest.mark.parametrize("regulariser", [lambda w: w.sum(), lambda w: w.square().sum()])
def test_weight_read_outside_is_exact_or_refused(mode, regulariser):
    """Both orders of autograd: the outside gradient may come before the pair or after it."""
    for first in (True, False):
        model, reference = build(), build()
        optimizer = ForgeSGD(model, lr=0.1, update=mode)
        theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
        losses = []
        for net in (model, reference):
            parts = [lambda net=net: loss_of(net, 0), lambda net=net: regulariser(net.middle.weight)]
            a, b = (part() for part in (parts if first else parts[::-1]))
            losses.append(a + b)
        losses[1].backward()
        theirs.step()
        try:
            losses[0].backward()
            optimizer.step()
        except RuntimeError as error:
            assert mode == "backward"
            assert "already updated" in str(error) or "inplace operation" in str(error)
            with pytest.raises(ForgeRefusal, match="An exception interrupted"):
                optimizer.step()
        else:
            assert way_off(model, reference, build()) < WAY_FP32_SMALL


def test_outside_read_in_backward_mode_is_refused_and_never_wrong():
    model = build(Outside)
    optimizer = ForgeAdamW(model, update="backward")
    with pytest.raises(RuntimeError, match="already updated|inplace operation"):
        loss_of(model, 0).backward()
        optimizer.step()


def test_two_backwards_in_backward_mode_are_refused_with_the_fix():
    model = build()
    optimizer = ForgeAdamW(model, update="backward")
    loss_of(model, 0).backward()
    with pytest.raises(ForgeRefusal, match=r"gradient for 'head.weight' arrived after .*optimizer.no_sync\(\)"):
        loss_of(model, 1).backward()
    with pytest.raises(ForgeRefusal, match="An exception interrupted backward"):
        optimizer.step()


def test_second_graph_of_a_weight_is_refused_before_it_reads_the_new_weight():
    model = build()
    optimizer = ForgeAdamW(model, update="backward")
    first, second = loss_of(model, 0), loss_of(model, 1)
    first.backward()  # two uses are expected, so nothing moves yet
    assert updated_in_backward(optimizer) == []
    second.backward()
    assert len(updated_in_backward(optimizer)) == 3
    third = loss_of(model, 2)
    with pytest.raises(ForgeRefusal, match="already updated"):
        third.backward()


def test_step_without_zero_grad_is_refused_where_torch_would_add():
    model = build()
    optimizer = ForgeAdamW(model)
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(ForgeRefusal, match=r"after step\(\) without zero_grad\(\)"):
        loss_of(model, 1).backward()


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
    """A GAN's generator step, or a skipped batch: torch would drop these gradients, here they are in the weights."""
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
    model, reference = build(), build()
    pairs = (model, ForgeAdamW(model)), (reference, torch.optim.AdamW(reference.parameters()))
    for net, optimizer in pairs:
        for step in range(5):
            loss_of(net, step).backward()
            if step % 2:
                optimizer.step()
            net.zero_grad()
    assert way_off(model, reference, build()) < WAY_FP32_SMALL


@pytest.mark.parametrize("owner", ["model", "optimizer"])
@pytest.mark.parametrize("mode", ["step", "backward"])
def test_zero_grad_to_zeros_keeps_torchs_decay_of_unused_layers(mode, owner):
    model, reference = build(), build()
    pairs = (
        (model, ForgeAdamW(model, weight_decay=0.3, update=mode)),
        (reference, torch.optim.AdamW(reference.parameters(), weight_decay=0.3)),
    )
    for net, optimizer in pairs:
        for step in range(4):
            if step == 2:
                net.head(torch.ones(HIDDEN)).sum().backward()  # the other layers take no part
            else:
                loss_of(net, step).backward()
            optimizer.step()
            (net if owner == "model" else optimizer).zero_grad(set_to_none=False)
    assert way_off(model, reference, build()) < WAY_FP32_SMALL


@pytest.fixture
def probe():
    flag = {"last": True}
    set_last_micro_batch_probe(lambda: flag["last"])
    yield flag
    set_last_micro_batch_probe(lambda: True)


def test_last_micro_batch_probe(probe):
    model, reference = build(), build()
    optimizer = ForgeAdamW(model, update="backward")
    theirs = torch.optim.AdamW(reference.parameters())
    for part in range(3):
        probe["last"] = part == 2
        loss_of(model, part).backward()
        loss_of(reference, part).backward()
        assert bool(updated_in_backward(optimizer)) is (part == 2)
    optimizer.step()
    theirs.step()
    assert way_off(model, reference, build()) < WAY_FP32_SMALL


class Mixed(Mlp):
    """Eval mode, one shared layer inside and outside a reentrant checkpoint."""

    def body(self, h: torch.Tensor) -> torch.Tensor:
        return self.middle(checkpoint(lambda y: torch.tanh(self.middle(y)), h, use_reentrant=True))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", ["step", "backward"])
def test_reentrant_checkpoint_of_a_shared_layer_is_exact_or_refused(mode, training):
    model, reference = build(Mixed), build(Mixed)
    model.train(training)
    reference.train(training)
    try:
        train(model, ForgeAdamW(model, lr=1e-2, update=mode), steps=4)
    except ForgeRefusal as error:
        # Without grad in eval mode the use looks like an evaluation; it is noticed when it comes back.
        assert (mode, training) == ("backward", False)
        assert "already updated" in str(error)
        return
    train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), steps=4)
    assert way_off(model, reference, build(Mixed)) < WAY_FP32_SMALL


def test_frozen_then_unfrozen():
    model, reference = build(), build()
    pairs = (
        (model, ForgeAdamW(list(model.parameters()), attach_to=model, lr=1e-2)),
        (reference, torch.optim.AdamW(reference.parameters(), lr=1e-2)),
    )
    for net, optimizer in pairs:
        for frozen in (False, True, False):
            net.middle.weight.requires_grad_(not frozen)
            train(net, optimizer, steps=2)
    assert way_off(model, reference, build()) < WAY_FP32_SMALL
    assert model.middle.weight.grad is None


def test_closure():
    model, reference = build(), build()
    for net, optimizer in ((model, ForgeAdamW(model)), (reference, torch.optim.AdamW(reference.parameters()))):
        for step in range(3):

            def closure(net: nn.Module = net, optimizer: Any = optimizer, step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(net, step)
                loss.backward()
                return loss

            assert torch.is_tensor(optimizer.step(closure))
    assert way_off(model, reference, build()) < WAY_FP32_SMALL
