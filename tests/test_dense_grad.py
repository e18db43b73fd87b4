"""`forge_hf.dense_grad`: what `p.grad` would hold, for callbacks and loops that look at gradients."""

from __future__ import annotations

import pytest
import torch
from transformers import TrainerCallback

import forge_hf
from forge_hf import ForgeAdamW, ForgeGaLoreAdamW, ForgeRefusal, dense_grad
from tests.models import EVERY_MODEL, batch, build
from tests.trainer_runs import train


def backward(model: torch.nn.Module, seed: int = 0) -> None:
    x, y = batch(seed)
    (model(x) - y).square().mean().backward()


@pytest.mark.parametrize("kind", EVERY_MODEL)
def test_every_parameter(kind):
    """Before and after clipping, over two micro-batches, and nothing is used up by asking."""
    model, other = build(kind), build(kind)
    optimizer = ForgeAdamW(model)
    assert all(dense_grad(optimizer, p) is None for p in model.parameters())
    for each in (model, other):
        backward(each, 0)
        backward(each, 1)
    for clip in (False, True):
        if clip:
            for each in (model, other):
                torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            grad = dense_grad(optimizer, p)
            assert grad.dtype == p.dtype and grad.shape == p.shape
            assert torch.allclose(grad, q.grad, rtol=1e-4, atol=1e-6)
    pairs = [p for p in model.parameters() if p.dim() == 2]
    assert dense_grad(optimizer, pairs[0]) is not dense_grad(optimizer, pairs[0])
    assert optimizer.pending_bytes() > 0


def test_bf16_weights_have_bf16_gradients():
    model = build(dtype=torch.bfloat16)
    optimizer = ForgeAdamW(model)
    x, y = batch(0, torch.bfloat16)
    (model(x) - y).square().mean().backward()
    assert all(dense_grad(optimizer, p).dtype == torch.bfloat16 for p in model.parameters())


def test_when_it_is_gone():
    model = build()
    optimizer = ForgeAdamW(model, update="backward")
    backward(model)
    with pytest.raises(ForgeRefusal, match="'first.weight' was used up .* update='step'"):
        dense_grad(optimizer, model.first.weight)
    assert dense_grad(optimizer, model.first.bias) is model.first.bias.grad
    optimizer.step()
    with pytest.raises(ForgeRefusal, match="'first.weight' was used up"):
        dense_grad(optimizer, model.first.weight)
    optimizer.zero_grad()
    assert dense_grad(optimizer, model.first.weight) is None


def test_other_peoples_parameters_and_optimizers():
    model = build()
    optimizer = ForgeAdamW(model)
    with pytest.raises(ForgeRefusal, match="none of this optimizer's param groups"):
        dense_grad(optimizer, torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(TypeError, match="dense_grad takes a forge optimizer, not SGD"):
        dense_grad(torch.optim.SGD(model.parameters(), lr=0.1), model.first.weight)


def test_a_projected_gradient_is_no_matrix():
    model = build()
    optimizer = ForgeGaLoreAdamW(model, rank=1)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    model(torch.randn(30, 12)).square().sum().backward()
    with pytest.raises(ForgeRefusal, match="projection of the gradient of 'first.weight' is left.*target"):
        dense_grad(optimizer, model.first.weight)


class NormOf(TrainerCallback):
    """A callback that logs the norm of one weight's gradient, as people write them."""

    def __init__(self, name: str, read) -> None:
        self.name, self.read, self.norms = name, read, []

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        grad = self.read(optimizer, model.get_parameter(self.name))
        self.norms.append(float(grad.norm()))


def test_in_a_callback_of_the_trainer(tmp_path):
    name = "model.layers.0.self_attn.q_proj.weight"
    norms = []
    for optim, read in (("adamw_torch", lambda _, p: p.grad), ("forge_adamw", forge_hf.dense_grad)):
        callback = NormOf(name, read)
        train(tmp_path / optim, "llama", optim, trainer_options={"callbacks": [callback]}, max_steps=3)
        norms.append(callback.norms)
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert len(norms[0]) == 3
