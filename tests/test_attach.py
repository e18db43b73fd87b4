"""Which parameter takes which path, and that attaching can be repeated, taken over and undone."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import forge_hf
from forge_hf import ForgeAdamW, ForgeRefusal, ForgeSGD, detach
from forge_hf.layers import ForgeLinear

from .models import (
    EVERY_MODEL,
    Mlp,
    TiedEmbedding,
    TiedLinears,
    build,
    loss_of,
    same_bits,
    snapshot,
    train,
    way_off,
)
from .tolerances import WAY_FP32_SMALL


def paths(optimizer: Any) -> dict[str, tuple[str, str]]:
    return {entry.name: (entry.path, entry.reason) for entry in optimizer.report()}


class OwnForward(nn.Linear):
    """A linear layer that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Extra(nn.Linear):
    """A linear layer with a second parameter."""

    def __init__(self) -> None:
        super().__init__(12, 12)
        self.side_weight = nn.Parameter(torch.ones(3, 3))


def hooked() -> nn.Linear:
    layer = nn.Linear(12, 12)
    layer.weight.register_hook(lambda g: g / 2)
    return layer


def patched() -> nn.Linear:
    layer = nn.Linear(12, 12)
    layer.forward = lambda x: 3 * nn.functional.linear(x, layer.weight, layer.bias)
    return layer


ODD_LAYERS = {
    "own_forward": (lambda: OwnForward(12, 12), "weight", "OwnForward has a forward of its own"),
    "patched_forward": (patched, "weight", "Linear has a forward of its own"),
    "hooked": (hooked, "weight", "has gradient hooks"),
    "spectral_norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(12, 12)),
        "parametrizations.weight.original",
        "parameter of ParametrizationList",
    ),
    "pruned": (
        lambda: prune.random_unstructured(nn.Linear(12, 12), "weight", 0.3),
        "weight_orig",
        "not the weight that Linear",
    ),
    "conv": (
        lambda: nn.Sequential(nn.Unflatten(-1, (12, 1)), nn.Conv1d(12, 12, 1), nn.Flatten(-2)),
        "1.weight",
        "Conv1d",
    ),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(12)), "0.weight", "parameter of LayerNorm"),
}


class WithOdd(Mlp):
    """The plain model with one odd layer before it."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.odd = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.odd(x.reshape(-1, 12)).reshape(2, 3, 12))


@pytest.mark.parametrize("mode", ["step", "backward"])
@pytest.mark.parametrize("name", ODD_LAYERS)
def test_odd_layers_take_the_dense_path_and_train_as_with_torch(name, mode):
    make, parameter, reason = ODD_LAYERS[name]
    model, reference = (build(lambda: WithOdd(make)) for _ in range(2))
    optimizer = ForgeAdamW(model, lr=1e-2, update=mode)
    path, why = paths(optimizer)[f"odd.{parameter}"]
    assert path == "dense"
    assert reason in why
    train(model, optimizer, steps=4)
    train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), steps=4)
    assert way_off(model, reference, build(lambda: WithOdd(make))) < WAY_FP32_SMALL


def test_report_of_a_plain_model():
    model = build()
    model.norm.weight.requires_grad_(False)
    optimizer = ForgeAdamW(model)
    assert paths(optimizer) == {
        "first.weight": ("pair", "linear layer"),
        "first.bias": ("dense", "bias"),
        "middle.weight": ("pair", "linear layer"),
        "norm.weight": ("frozen", "requires_grad is False"),
        "norm.bias": ("dense", "parameter of LayerNorm"),
        "head.weight": ("pair", "linear layer"),
        "head.bias": ("dense", "bias"),
    }
    assert [entry.shape for entry in optimizer.report()][:2] == [(24, 12), (24,)]


def test_report_of_shared_weights_and_left_out_ones():
    assert paths(ForgeAdamW(build(TiedLinears)))["middle.weight"] == ("pair", "2 linear layers")
    assert paths(ForgeAdamW(build(TiedEmbedding)))["middle.weight"] == (
        "pair",
        "tied: 1 embedding and 1 linear layer",
    )
    model = build()
    partial = ForgeAdamW([model.head.weight], attach_to=model)
    assert paths(partial)["first.weight"] == ("frozen", "not in the optimizer's groups")
    assert paths(ForgeAdamW(nn.Sequential(Extra())))["0.side_weight"] == (
        "dense",
        "not the weight that Extra reads",
    )


def test_explain_names_paths_and_reasons():
    model = nn.Sequential(*(build() for _ in range(2)))
    lines = ForgeAdamW(model, update="backward").explain().splitlines()
    assert lines[0].startswith("ForgeAdamW: update=backward, clip=exact, state=auto, rounding=stochastic. ")
    assert "92.8% of 2,172 trained weights need no stored gradient" in lines[0]
    assert "  pair   *.first.weight x2 [24, 12]: linear layer" in lines
    assert "  dense  *.norm.bias x2 [24]: parameter of LayerNorm" in lines


def test_parameters_and_keys_stay_the_same_objects():
    model = build(TiedLinears)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    keys = list(model.state_dict())
    optimizer = ForgeAdamW(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert list(model.state_dict()) == keys
    assert type(model.middle) is ForgeLinear
    optimizer.detach()
    assert type(model.middle) is nn.Linear
    assert "_forge_receiver" not in model.middle.__dict__


@pytest.mark.parametrize("kind", EVERY_MODEL)
def test_detach_in_the_middle_of_a_run(kind):
    """The same optimizer goes on with ordinary gradients."""
    model, reference = build(kind), build(kind)
    optimizer = ForgeAdamW(model, lr=1e-2)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for net, each in ((model, optimizer), (reference, theirs)):
        train(net, each, steps=3)
        if net is model:
            detach(model)
        loss_of(net, 99).backward()
        assert net.head.weight.grad is not None
        each.step()
        each.zero_grad()
    assert way_off(model, reference, build(kind)) < WAY_FP32_SMALL


@pytest.mark.parametrize("mode", ["step", "backward"])
def test_second_optimizer_takes_over_and_the_first_refuses(mode):
    model, reference = build(), build()
    first = ForgeAdamW(model, lr=1e-2, update=mode)
    train(model, first, steps=2)
    train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), steps=2)
    second = ForgeSGD(model, lr=0.1, update=mode)
    train(model, second, steps=3)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), steps=3)
    assert way_off(model, reference, build()) < WAY_FP32_SMALL
    with pytest.raises(ForgeRefusal, match="no longer owns 'first.weight'"):
        first.step()
    before = snapshot(model)
    loss_of(model, 0).backward()
    with pytest.raises(ForgeRefusal, match="no longer owns"):
        first.step()
    if mode == "step":
        assert same_bits(model, before)
    second.step()


def test_pending_gradients_of_the_first_optimizer_are_not_inherited():
    model = build()
    first = ForgeAdamW(model)
    loss_of(model, 0).backward()
    assert first.pending_bytes() > 0
    second = ForgeAdamW(model)
    assert first.pending_bytes() == second.pending_bytes() == 0


def test_torch_optimizer_over_our_weights_refuses():
    model = build()
    optimizer = ForgeAdamW(model)
    other = torch.optim.AdamW(model.parameters())
    loss_of(model, 0).backward()
    with pytest.raises(
        ForgeRefusal, match=r"AdamW was about to step over 3 weights .*forge_hf.detach\(model\)"
    ):
        other.step()
    optimizer.zero_grad()
    forge_hf.detach(model)
    loss_of(model, 0).backward()
    other.step()
    assert not same_bits(model, build())


def test_torch_optimizer_over_other_weights_steps():
    model, other = build(), build()
    optimizer = ForgeAdamW(model)
    theirs = torch.optim.AdamW(other.parameters())
    (loss_of(model, 0) + loss_of(other, 0)).backward()
    theirs.step()
    optimizer.step()
    assert way_off(model, other, build()) < WAY_FP32_SMALL


def test_two_optimizers_share_a_model():
    """Each trains its own layers, as with torch."""
    model, reference = build(), build()

    def pair(net: Any, ours: bool) -> list[Any]:
        halves = [
            list(net.first.parameters()),
            [*net.middle.parameters(), *net.norm.parameters(), *net.head.parameters()],
        ]
        if ours:
            return [ForgeAdamW(halves[0], attach_to=net), ForgeSGD(halves[1], lr=0.1, attach_to=net)]
        return [torch.optim.AdamW(halves[0]), torch.optim.SGD(halves[1], lr=0.1)]

    for net in (model, reference):
        optimizers = pair(net, net is model)
        for step in range(4):
            loss_of(net, step).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.2)
            for optimizer in optimizers:
                optimizer.step()
            net.zero_grad()
    assert way_off(model, reference, build()) < WAY_FP32_SMALL


@pytest.mark.parametrize("mode", ["step", "backward"])
def test_parameters_added_later_train_as_with_torch(mode):
    """Gradual unfreezing: the head first, then the rest with another rate."""
    model, reference = build(), build()
    for net in (model, reference):
        net.requires_grad_(False)
        net.head.requires_grad_(True)
        head = list(net.head.parameters())
        optimizer = ForgeAdamW(head, attach_to=net, update=mode) if net is model else torch.optim.AdamW(head)
        train(net, optimizer, steps=2)
        net.requires_grad_(True)
        rest = [*net.first.parameters(), *net.middle.parameters(), *net.norm.parameters()]
        optimizer.add_param_group({"params": rest, "lr": 3e-3})
        train(net, optimizer, steps=3)
        if net is model:
            assert paths(optimizer)["middle.weight"] == ("pair", "linear layer")
    assert way_off(model, reference, build()) < WAY_FP32_SMALL


def test_adding_a_group_keeps_what_is_pending():
    model, reference = build(), build()
    for net in (model, reference):
        head = list(net.head.parameters())
        optimizer = ForgeAdamW(head, attach_to=net) if net is model else torch.optim.AdamW(head)
        loss_of(net, 0).backward()
        optimizer.add_param_group({"params": [net.norm.weight]})
        optimizer.step()
    assert way_off(model.head, reference.head, build().head) < WAY_FP32_SMALL


def test_rebuilding_optimizers_does_not_stack():
    model, reference = build(), build()
    for _ in range(3):
        optimizer = ForgeAdamW(model, lr=1e-2)
    gc.collect()
    train(model, optimizer, steps=3)
    train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), steps=3)
    assert way_off(model, reference, build()) < WAY_FP32_SMALL
    assert len(optimizer.tape.slots) == 3


def test_explain_takes_the_model_the_optimizer_or_its_wrapper():
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = forge_hf.ForgeAdamW(model, lr=1e-3)
    text = forge_hf.explain(optimizer)
    assert forge_hf.explain(model) == text == optimizer.explain()
    assert "pair   *.weight [4, 4]: linear layer" in text
    with pytest.raises(TypeError, match="no forge optimizer in this Linear"):
        forge_hf.explain(nn.Linear(2, 2))
