"""transformers' Conv1D, a linear layer with the weight (K, N), on the pair path."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D

import forge_hf
from forge_hf import ForgeAdamW, ForgeGaLoreAdamW, ForgeRefusal, dense_grad
from forge_hf.layers import swap_class_
from tests.models import way_off
from tests.tolerances import NORM_FP32, WAY_FP32_SMALL, WAY_GALORE


class Collector:
    """A receiver that keeps the last pair."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.pair: tuple[torch.Tensor, torch.Tensor] | None = None

    def active(self) -> bool:
        return True

    def expect(self) -> None:
        pass

    def open_forward(self) -> None:
        pass

    def open_backward(self) -> None:
        pass

    def receive(self, dy: torch.Tensor, x: torch.Tensor, borrowed: bool, exchanged: bool) -> None:
        assert exchanged
        self.pair = dy, x


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (0, 7)])
@pytest.mark.parametrize("autocast", [False, True])
def test_layer(shape, autocast):
    """Output, dX and db are the stock layer's; the pair's product is dW."""
    layer = Conv1D(11, 7)
    torch.nn.init.normal_(layer.bias)
    swapped = copy.deepcopy(layer)
    collector = Collector(swapped.weight)
    swap_class_(swapped, collector)
    results = []
    for module in (layer, swapped):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = module(x=1.0 * x)
        y.float().square().sum().backward()
        results.append((y, x.grad, module.bias.grad))
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.allclose(ours, theirs, rtol=1e-2 if autocast else 1e-6, atol=1e-2 if autocast else 1e-6)
    assert swapped.weight.grad is None and collector.pair is not None
    dy, x = (tensor.float() for tensor in collector.pair)
    assert torch.allclose(x.t() @ dy, layer.weight.grad, rtol=1e-2, atol=5e-2 if autocast else 1e-5)


class Shared(torch.nn.Module):
    """A Conv1D and a linear layer that share a weight (19, 37), and a Conv1D of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = Conv1D(37, 19), torch.nn.Linear(37, 19)
        self.narrow.weight = self.wide.weight
        self.last = Conv1D(5, 19)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.narrow(torch.tanh(self.wide(x)))))


MODELS = {
    "apart": lambda: torch.nn.Sequential(Conv1D(37, 19), torch.nn.Tanh(), Conv1D(5, 37)),
    "shared": Shared,
}


@pytest.mark.parametrize("mode", ["step", "backward"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_exchanged_operands_in_the_kernels(monkeypatch, backend, kind, mode):
    """Ragged sizes, several steps, clipping in step mode: against torch.optim.AdamW."""
    monkeypatch.setenv("FORGE_HF_BACKEND", backend)
    torch.manual_seed(0)
    model = MODELS[kind]()
    other, start = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = ForgeAdamW(model, lr=1e-2, update=mode)
    plain = torch.optim.AdamW(other.parameters(), lr=1e-2)
    assert [e.path for e in optimizer.report() if e.name.endswith("weight")] == ["pair", "pair"]
    for step in range(3):
        x = torch.randn(9, 19, generator=torch.Generator().manual_seed(step))
        for each, stepper in ((model, optimizer), (other, plain)):
            each(x).square().sum().backward()
            if mode == "step":
                torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            stepper.step()
            stepper.zero_grad()
    assert way_off(model, other, start) < WAY_FP32_SMALL


@pytest.mark.parametrize("held", ["one pair", "two pairs", "two layers"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_norm_where_inputs_hardly_differ(monkeypatch, backend, held):
    """The Gram form cancels unless it centres the inputs, on whichever side of the pair they are."""
    monkeypatch.setenv("FORGE_HF_BACKEND", backend)
    monkeypatch.setattr("forge_hf.kernels.norm_plan.gram_is_cheaper", lambda *_: True)
    torch.manual_seed(0)
    layers = [Conv1D(96, 64) for _ in range(1 + (held == "two layers"))]
    model = torch.nn.ModuleList(layers)
    optimizer = ForgeAdamW(model)
    other = copy.deepcopy(model).double()
    row, pairs = 3.0 * torch.randn(64), 1 + (held == "two pairs")
    for _ in range(pairs):
        x = row + 1e-3 * torch.randn(16, 64)
        weights = torch.randn(16, 96)
        weights -= weights.mean(0)
        for layer, exact in zip(layers, other, strict=True):
            (layer(1.0 * x) * weights).sum().backward()
            (exact(x.double()) * weights.double()).sum().backward()
    assert all(len(layer._forge_receiver.gradient.segments) == pairs for layer in layers)
    expected = torch.cat([p.grad.flatten() for p in other.parameters()]).norm().item()
    norm = forge_hf.clip_grad_norm_(optimizer, float("inf")).item()
    assert norm == pytest.approx(expected, rel=NORM_FP32)


def test_dense_grad_has_the_weights_shape():
    """Over two uses of a weight, one exchanged and one not, before and after clipping."""
    torch.manual_seed(0)
    model = Shared()
    other = copy.deepcopy(model)
    optimizer = ForgeAdamW(model)
    for each in (model, other):
        each(torch.randn(3, 19, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    for clip in (False, True):
        if clip:
            for each in (model, other):
                torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(dense_grad(optimizer, p), q.grad, rtol=1e-4, atol=1e-6)
    assert optimizer.pending_bytes() > 0


@pytest.mark.parametrize("subspace", ["svd", "power"])
def test_galore_is_that_of_the_transposed_linear_layer(subspace):
    """GaLore projects the shorter side, whichever of rows and columns it is."""
    torch.manual_seed(0)
    first, second = Conv1D(24, 12), torch.nn.Linear(12, 24)
    with torch.no_grad():
        second.weight.copy_(first.weight.t())
        second.bias.copy_(first.bias)
    start = first.weight.detach().clone()
    settings = {"lr": 1e-2, "rank": 4, "update_proj_gap": 3, "scale": 1.0, "subspace": subspace}
    for layer in (first, second):
        optimizer = ForgeGaLoreAdamW(layer, **settings)
        for step in range(8):
            x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
            layer(x).square().sum().backward()
            forge_hf.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    way = (first.weight - start).norm()
    assert (first.weight - second.weight.t()).norm() / way < WAY_GALORE


class Named(Conv1D):
    """A subclass that adds nothing to forward."""


class Doubled(Conv1D):
    """A subclass that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(x)


def hooked() -> Conv1D:
    layer = Conv1D(12, 12)
    layer.weight.register_hook(lambda grad: 0.5 * grad)
    return layer


LAYERS = {
    "subclass": (lambda: Named(12, 12), "pair", "linear layer"),
    "own forward": (lambda: Doubled(12, 12), "dense", "Doubled has a forward of its own"),
    "hook": (hooked, "dense", "has gradient hooks"),
    "parametrized": (
        lambda: parametrizations.orthogonal(Conv1D(12, 12)),
        "dense",
        "parameter of ParametrizationList",
    ),
}


@pytest.mark.parametrize("mode", ["step", "backward"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_rules_are_those_of_linear_layers(name, mode):
    make, path, reason = LAYERS[name]
    torch.manual_seed(0)
    model, other, start = (torch.nn.Sequential(torch.nn.Linear(12, 12), make()) for _ in range(3))
    cls = type(model[1])
    for each in (other, start):
        each.load_state_dict(model.state_dict())
    optimizer = ForgeAdamW(model, lr=1e-2, update=mode)
    entry = next(e for e in optimizer.report() if e.name.startswith("1.") and len(e.shape) == 2)
    assert (entry.path, entry.reason) == (path, reason)
    plain = torch.optim.AdamW(other.parameters(), lr=1e-2)
    for each, stepper in ((model, optimizer), (other, plain)):
        for step in range(3):
            x = torch.randn(4, 12, generator=torch.Generator().manual_seed(step))
            each(x).square().sum().backward()
            stepper.step()
            stepper.zero_grad()
    assert way_off(model, other, start) < WAY_FP32_SMALL
    forge_hf.detach(model)
    assert type(model[1]) is cls


def test_an_input_that_its_owner_overwrites():
    """A leaf input may be filled anew before step(); the held pair keeps its own copy."""
    layer = Conv1D(5, 7)
    other = copy.deepcopy(layer)
    optimizer = ForgeAdamW(layer, lr=1e-2)
    x = torch.randn(3, 7)
    other(x).sum().backward()
    layer(x).sum().backward()
    x.data.zero_()
    torch.optim.AdamW(other.parameters(), lr=1e-2).step()
    optimizer.step()
    assert torch.allclose(layer.weight, other.weight, atol=1e-6)


@pytest.mark.parametrize("what", ["input", "output gradient"])
def test_a_held_side_that_is_written_to(what):
    """The message names the right side."""
    layer = Conv1D(5, 7)
    optimizer = ForgeAdamW(layer)
    held = {"input": 1.0 * torch.randn(2, 7).requires_grad_()}
    y = layer(held["input"])
    y.register_hook(lambda grad: held.update({"output gradient": grad}))
    y.square().sum().backward()
    held[what].detach().zero_()
    with pytest.raises(ForgeRefusal, match=f"The {what} of 'weight' was changed in place"):
        optimizer.step()
