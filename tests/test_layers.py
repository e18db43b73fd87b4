"""The swapped layer: stock outputs and input gradients; the stock path where a pair would not be exact."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from forge_hf import ForgeAdamW, ForgeRefusal, ForgeSGD, detach
from forge_hf.layers import ForgeLinear

from .models import Mlp, build, loss_of, same_bits
from .tolerances import GEMM_FP32


def linear(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, ForgeSGD]:
    torch.manual_seed(3)
    layer = nn.Linear(5, 7, bias=bias).to(dtype)
    return layer, ForgeSGD(layer, lr=1.0)


def stock(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(5, 7, bias=bias).to(dtype)


INPUTS = {
    "one_vector": lambda: torch.randn(5),
    "matrix": lambda: torch.randn(4, 5),
    "one_row": lambda: torch.randn(1, 5),
    "three_dims": lambda: torch.randn(2, 3, 5),
    "four_dims": lambda: torch.randn(2, 3, 2, 5),
    "no_tokens": lambda: torch.randn(0, 5),
    "no_tokens_three_dims": lambda: torch.randn(2, 0, 5),
    "transposed": lambda: torch.randn(5, 4).t(),
    "every_other_row": lambda: torch.randn(8, 5)[::2],
    "expanded": lambda: torch.randn(1, 5).expand(4, 5),
}


@pytest.mark.parametrize("reduction", ["sum", "square"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", INPUTS)
def test_output_gradients_and_update_of_any_input(name, bias, reduction):
    x = INPUTS[name]()
    layer, optimizer = linear(bias)
    reference = stock(bias)
    inputs = [x.clone().requires_grad_() if name != "expanded" else x.requires_grad_() for _ in range(2)]
    outputs = [net(value) for net, value in zip((layer, reference), inputs, strict=True)]
    assert torch.equal(*outputs)
    gradients = []
    for output, value in zip(outputs, inputs, strict=True):
        value.grad = None
        (output.sum() if reduction == "sum" else output.square().sum()).backward()
        gradients.append(value.grad)
    assert torch.allclose(*gradients, atol=1e-6)
    assert layer.weight.grad is None
    if bias:
        assert torch.allclose(layer.bias.grad, reference.bias.grad, atol=1e-5)
    expected = reference.weight - reference.weight.grad
    optimizer.step()
    assert torch.allclose(layer.weight, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_stock_output_and_a_gradient_at_least_as_good(dtype):
    layer, optimizer = linear()
    reference = stock()
    x = torch.randn(40, 5)
    with torch.autocast("cpu", dtype):
        ours, theirs = layer(x), reference(x)
    assert torch.equal(ours, theirs)
    assert ours.dtype == dtype
    dy = torch.randn(40, 7).to(dtype)
    before = layer.weight.detach().double().clone()
    ours.backward(dy)
    theirs.backward(dy)
    exact = dy.double().t() @ x.to(dtype).double()
    optimizer.step()
    error = ((before - layer.weight.double()) - exact).norm()
    baseline = (reference.weight.grad.double() - exact).norm()
    assert error <= min(baseline.item(), GEMM_FP32 * dy.double().norm() * x.double().norm() + 1e-6)


def test_activations_saved_under_autocast_have_the_stock_size():
    layer, _ = linear()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with torch.autocast("cpu", torch.bfloat16):
            layer(torch.randn(4, 5))
    assert sorted((tuple(t.shape), t.dtype) for t in saved if t is not layer.weight) == [
        ((4, 5), torch.bfloat16)
    ]


def test_input_gradient_alone_touches_no_weight():
    layer, optimizer = linear()
    x = torch.randn(4, 5, requires_grad=True)
    (gx,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert torch.allclose(gx, 2 * layer(x) @ layer.weight, atol=1e-5)
    assert optimizer.pending_bytes() == 0
    layer(x).sum().backward(inputs=[x])
    assert optimizer.pending_bytes() == 0


@pytest.mark.parametrize("also", ["nothing", "input"])
def test_autograd_grad_for_a_weight(also):
    layer, optimizer = linear()
    x = torch.randn(4, 5, requires_grad=True)
    wanted = [layer.weight] + ([x] if also == "input" else [])
    gradients = torch.autograd.grad(layer(x).square().sum(), wanted)
    expected = torch.autograd.grad(F.linear(x, layer.weight, layer.bias).square().sum(), wanted)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(gradients, expected, strict=True))
    assert optimizer.pending_bytes() == 0


def test_backward_to_some_weights_only():
    model, reference = build(), build()
    optimizer = ForgeAdamW(model)
    loss_of(model, 0).backward(inputs=[model.middle.weight])
    loss_of(reference, 0).backward(inputs=[reference.middle.weight])
    optimizer.step()
    torch.optim.AdamW([reference.middle.weight], lr=1e-3).step()
    assert torch.allclose(model.middle.weight, reference.middle.weight, atol=1e-7)
    assert torch.equal(model.first.weight, reference.first.weight)


@pytest.mark.parametrize("mode", ["step", "backward"])
def test_retained_graph_and_several_backwards(mode):
    model, reference = build(), build()
    optimizer = ForgeAdamW(model, lr=1e-2, update=mode)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(3):
        loss = loss_of(model, step)
        with optimizer.no_sync():
            loss.backward(retain_graph=True)
        (2 * loss).backward()
        expected = loss_of(reference, step)
        expected.backward(retain_graph=True)
        (2 * expected).backward()
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
    assert all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(model.parameters(), reference.parameters(), strict=True)
    )


def penalty(model: nn.Module, seed: int) -> torch.Tensor:
    """Loss plus the squared norm of its gradient for the input."""
    torch.manual_seed(seed)
    x = torch.randn(4, 12, requires_grad=True)
    loss = model(x).square().mean()
    (gx,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gx.square().sum()


def test_gradient_penalty_is_exact_in_step_mode():
    model, reference = build(), build()
    optimizers = ForgeAdamW(model, lr=1e-2), torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(4):
        for net, optimizer in zip((model, reference), optimizers, strict=True):
            penalty(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(
        torch.allclose(a, b, atol=1e-5)
        for a, b in zip(model.parameters(), reference.parameters(), strict=True)
    )


def test_create_graph_for_weights():
    layer, _ = linear()
    x = torch.randn(4, 5)
    (g,) = torch.autograd.grad(layer(x).square().sum(), layer.weight, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), layer.weight)
    weight = layer.weight.detach().clone().requires_grad_()
    (g2,) = torch.autograd.grad(F.linear(x, weight, layer.bias).square().sum(), weight, create_graph=True)
    (h2,) = torch.autograd.grad(g2.square().sum(), weight)
    assert torch.allclose(h, h2, rtol=1e-4)


def test_double_backward_under_autocast_is_refused():
    layer, _ = linear()
    with torch.autocast("cpu", torch.bfloat16):
        loss = layer(torch.randn(4, 5, requires_grad=True)).square().sum()
    with pytest.raises(ForgeRefusal, match="create_graph=True"):
        loss.backward(create_graph=True)


@pytest.mark.parametrize("when", ["before_forward", "before_backward"])
@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_on_the_weight_are_honoured(hook, when):
    layer, optimizer = linear()
    reference = stock()
    seen = []

    def half(value: torch.Tensor) -> torch.Tensor | None:
        seen.append(tuple(value.shape))
        if hook == "register_hook":
            return value / 2
        value.grad.div_(2)
        return None

    x = torch.randn(4, 5)
    for net in (layer, reference):
        if when == "before_forward":
            handle = getattr(net.weight, hook)(half)
        loss = net(x).square().sum()
        if when == "before_backward":
            handle = getattr(net.weight, hook)(half)
        loss.backward()
        handle.remove()
    expected = reference.weight - reference.weight.grad
    optimizer.step()
    assert seen == [(7, 5)] * 2
    assert torch.allclose(layer.weight, expected, atol=1e-5)
    optimizer.zero_grad()
    layer(x).sum().backward()
    assert layer.weight.grad is None  # the hook is gone, so the pair path is back


def test_weight_frozen_between_forward_and_backward_gets_no_gradient():
    layer, optimizer = linear()
    before = layer.weight.detach().clone()
    loss = layer(torch.randn(4, 5)).sum()
    layer.weight.requires_grad_(False)
    loss.backward()
    optimizer.step()
    assert torch.equal(layer.weight, before)


def test_functional_call_and_transforms_see_a_stock_layer():
    layer, optimizer = linear()
    x = torch.randn(4, 5)
    other = {name: torch.randn_like(value) for name, value in layer.named_parameters()}
    assert torch.equal(functional_call(layer, other, x), F.linear(x, other["weight"], other["bias"]))
    leaves = {name: nn.Parameter(value) for name, value in other.items()}
    functional_call(layer, leaves, x).sum().backward()
    assert torch.allclose(leaves["weight"].grad, x.sum(0).expand(7, 5), atol=1e-5)
    loss = lambda params: functional_call(layer, params, x).square().sum()  # noqa: E731
    ours = grad(loss)(dict(layer.named_parameters()))
    expected = grad(lambda params: F.linear(x, params["weight"], params["bias"]).square().sum())(
        dict(layer.named_parameters())
    )
    assert torch.allclose(ours["weight"], expected["weight"], atol=1e-5)
    assert torch.allclose(vmap(layer)(x), layer(x), atol=1e-6)
    assert optimizer.pending_bytes() == 0


def test_traced_layer_is_stock():
    layer, _ = linear()
    traced = torch.jit.trace(layer, torch.randn(4, 5))
    x = torch.randn(2, 5)
    assert torch.equal(traced(x), F.linear(x, layer.weight, layer.bias))


class Sub(nn.Linear):
    """A subclass that adds nothing to forward."""

    marker = "kept"


def test_subclass_keeps_its_type():
    model = nn.Sequential(Sub(5, 7))
    ForgeAdamW(model)
    assert isinstance(model[0], Sub)
    assert isinstance(model[0], ForgeLinear)
    assert model[0].marker == "kept"
    assert type(copy.deepcopy(model)[0]) is Sub
    detach(model)
    assert type(model[0]) is Sub


def test_copies_are_stock_layers_with_the_same_bits():
    model = build(Mlp)
    optimizer = ForgeAdamW(model)
    loss_of(model, 0).backward()
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for other in copies:
        assert type(other.first) is nn.Linear
        assert same_bits(other, model)
        loss_of(other, 1).backward()
        assert other.first.weight.grad is not None
    assert type(model.first) is ForgeLinear


def test_saved_model_loads_without_forge_hf(tmp_path):
    layer, _ = linear()
    torch.save(layer, tmp_path / "model.pt")
    code = (
        "import sys, torch; sys.modules['forge_hf'] = None\n"
        f"layer = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "print(type(layer).__module__, layer(torch.ones(5)).shape[0])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["torch.nn.modules.linear", "7"]
