"""Updates that wait in backward for others of their kind, so that one launch can serve them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from forge_hf import ForgeAdamW, ForgeRefusal, optimizer, reference

from .embedding_models import (
    EVERY_MODEL,
    Checkpointed,
    Outside,
    ReentrantCheckpointed,
    Untied,
    build,
    loss_of,
    train,
)
from .models import same_bits


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Let the reference backend ask for company; the sizes of the groups that it gets."""
    sizes: list[int] = []
    run = reference.wgrad_updates_

    def wgrad_updates_(updates: Any, want_norm_sq: bool = False) -> Any:
        sizes.append(len(updates))
        return run(updates, want_norm_sq)

    monkeypatch.setattr(reference, "waits_for_company", lambda update: True)
    monkeypatch.setattr(reference, "wgrad_updates_", wgrad_updates_)
    return sizes


def adamw(model: nn.Module) -> ForgeAdamW:
    return ForgeAdamW(model, lr=1e-2, update="backward")


@pytest.mark.parametrize("window", [0, 300, 1 << 30])
@pytest.mark.parametrize("kind", [kind for kind in EVERY_MODEL if kind is not Outside])
def test_waiting_changes_nothing(kind, window, calls, monkeypatch):
    """The same bits and norms as without, for any number of bytes that may wait."""
    monkeypatch.setattr(optimizer, "WAITING_BYTES", window)
    ours, plain = build(kind), build(kind)
    loop: dict[str, Any] = {"steps": 4, "micro_batches": (1, 2), "max_norm": float("inf")}
    norms = train(ours, adamw(ours), **loop)
    monkeypatch.setattr(reference, "waits_for_company", lambda update: False)
    assert norms == pytest.approx(train(plain, adamw(plain), **loop), rel=1e-6)
    assert same_bits(ours, plain)


@pytest.mark.parametrize("kind", [Untied, Checkpointed, ReentrantCheckpointed])
def test_all_layers_of_a_backward_are_one_group(kind, calls):
    model = build(kind)
    train(model, adamw(model), steps=2)
    assert calls and len(calls) <= 4 and max(calls) >= 1
    if kind is Untied:
        assert calls == [2, 2]  # block and head


def test_a_window_that_is_full_is_run(calls, monkeypatch):
    monkeypatch.setattr(optimizer, "WAITING_BYTES", 1)
    model = build(Untied)
    train(model, adamw(model), steps=1)
    assert calls == [1, 1]


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken")


def test_a_backward_that_fails_before_the_updates_leaves_the_model_as_it_was(calls):
    """Nothing was applied yet, so the step may be repeated."""
    model, twin = build(Untied), build(Untied)
    ours = adamw(model)
    hook = model.words.register_forward_hook(lambda module, args, out: Broken.apply(out))
    with pytest.raises(RuntimeError, match="broken"):
        loss_of(model, 0).backward()
    assert same_bits(model, twin) and not calls and not ours._waiting
    hook.remove()
    ours.zero_grad()
    train(model, ours, steps=2)
    train(twin, adamw(twin), steps=2)
    assert same_bits(model, twin)


@pytest.mark.parametrize("window", [1, 1 << 30])
def test_updates_that_fail_mark_the_optimizer(window, calls, monkeypatch):
    """Inside backward and at its end."""
    monkeypatch.setattr(optimizer, "WAITING_BYTES", window)

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(reference, "wgrad_updates_", fail)
    model = build(Untied)
    ours = adamw(model)
    with pytest.raises(RuntimeError, match="no memory"):
        loss_of(model, 0).backward()
    with pytest.raises(ForgeRefusal, match="half-updated|interrupted"):
        ours.step()
    assert not ours._waiting and not any(slot.gradient for slot in ours.tape.slots)


def test_a_pair_that_is_written_to_while_it_waits_is_refused(calls):
    model = build(Untied)
    ours = adamw(model)
    kept: list[torch.Tensor] = []

    def keep(dy: torch.Tensor) -> None:
        kept.append(dy)

    def spoil(_: torch.Tensor) -> None:
        kept[0].mul_(2.0)

    hooks = ((model.head, keep), (model.block, spoil))
    for layer, hook in hooks:
        layer.register_forward_hook(lambda module, args, out, hook=hook: out.register_hook(hook) and None)
    with pytest.raises(ForgeRefusal, match="output gradient"):
        loss_of(model, 0).backward()
    assert kept and not ours._waiting


def test_several_backwards_per_step_do_not_mix(calls):
    """The update waits for the end of the backward that completes it, not for the next one."""
    model = build(Untied)
    ours = adamw(model)
    before = model.head.weight.clone()
    loss_of(model, 0).backward()
    assert not torch.equal(model.head.weight, before) and not ours._waiting
    ours.step()
