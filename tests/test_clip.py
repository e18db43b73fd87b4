"""Clipping by the joint norm of pairs and ordinary gradients; what would be partial is refused."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import forge_hf
from forge_hf import ForgeAdamW, ForgeRefusal, ForgeSGD

from .models import Mlp, Outside, Shared, TiedEmbedding, build, loss_of, same_bits, snapshot, train, way_off
from .tolerances import NORM_FP32, WAY_FP32_SMALL


def norms(kind: Any, clip: Any, micro_batches: int = 1) -> tuple[float, float]:
    """Norm by `clip(optimizer, model)`, and torch's on the stock model."""
    model, reference = build(kind), build(kind)
    optimizer = ForgeAdamW(model)
    for part in range(micro_batches):
        loss_of(model, part).backward()
        loss_of(reference, part).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item()
    return clip(optimizer, model).item(), expected


WAYS = {
    "torch": lambda optimizer, model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "torch_module": lambda optimizer, model: torch.nn.utils.clip_grad.clip_grad_norm_(
        model.parameters(), 1.0
    ),
    "forge": lambda optimizer, model: forge_hf.clip_grad_norm_(optimizer, 1.0),
    "method": lambda optimizer, model: optimizer.clip_grad_norm_(1.0),
    "keywords": lambda optimizer, model: torch.nn.utils.clip_grad_norm_(
        parameters=list(model.parameters()), max_norm=1.0, norm_type=2, foreach=False
    ),
}


@pytest.mark.parametrize("micro_batches", [1, 5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Mlp, Shared, TiedEmbedding, Outside])
def test_norm(kind, way, micro_batches):
    ours, expected = norms(kind, WAYS[way], micro_batches)
    assert ours == pytest.approx(expected, rel=NORM_FP32)


def test_clipping_a_part_of_the_model():
    model, reference = build(), build()
    optimizer = ForgeSGD(model, lr=1.0)
    theirs = torch.optim.SGD(reference.parameters(), lr=1.0)
    result = []
    for net in (model, reference):
        loss_of(net, 0).backward()
        result.append(torch.nn.utils.clip_grad_norm_(net.middle.weight, 1e-3).item())
        result.append(torch.nn.utils.clip_grad_norm_(net.head.parameters(), 1e-2).item())
    optimizer.step()
    theirs.step()
    assert result[:2] == pytest.approx(result[2:], rel=NORM_FP32)
    assert way_off(model, reference, build()) < WAY_FP32_SMALL


def test_second_clip_sees_the_clipped_gradient():
    model = build()
    optimizer = ForgeSGD(model)
    loss_of(model, 0).backward()
    optimizer.clip_grad_norm_(0.01)
    assert optimizer.clip_grad_norm_(math.inf).item() == pytest.approx(0.01, rel=1e-4)


def test_accumulating_after_a_clip_adds_to_the_clipped_gradient():
    model, reference = build(), build()
    pairs = (model, ForgeSGD(model, lr=1.0)), (reference, torch.optim.SGD(reference.parameters(), lr=1.0))
    for net, optimizer in pairs:
        loss_of(net, 0).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        loss_of(net, 1).backward()
        optimizer.step()
    assert way_off(model, reference, build()) < WAY_FP32_SMALL


def test_clip_inside_autocast_measures_in_fp32():
    values = []
    for inside in (False, True):
        model = build()
        optimizer = ForgeAdamW(model)
        loss_of(model, 0).backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            values.append(optimizer.clip_grad_norm_(1.0))
            optimizer.step()
        values.append(model.middle.weight.detach().clone())
    assert torch.equal(values[0], values[2])
    assert torch.equal(values[1], values[3])


def test_no_gradient_at_all():
    model = build()
    optimizer = ForgeAdamW(model)
    assert optimizer.clip_grad_norm_(1.0).item() == 0.0
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_norm(value):
    model = build()
    optimizer = ForgeAdamW(model)
    (loss_of(model, 0) * value).backward()
    with pytest.raises(RuntimeError, match="total norm .* cannot be clipped"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert not torch.isfinite(optimizer.clip_grad_norm_(1.0))


@pytest.mark.parametrize("norm_type", [1.0, math.inf])
def test_other_norms_are_refused(norm_type):
    model = build()
    optimizer = ForgeAdamW(model)
    loss_of(model, 0).backward()
    with pytest.raises(ForgeRefusal, match=f"norm_type={norm_type} was asked"):
        optimizer.clip_grad_norm_(1.0, norm_type)
    with pytest.raises(ForgeRefusal, match=f"norm_type={norm_type} was asked"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type)
    stock = build()
    loss_of(stock, 0).backward()
    assert torch.isfinite(torch.nn.utils.clip_grad_norm_(stock.parameters(), 1.0, norm_type))


def test_clip_by_value_is_refused_for_our_weights_only():
    model, stock = build(), build()
    optimizer = ForgeAdamW(model)
    loss_of(model, 0).backward()
    with pytest.raises(ForgeRefusal, match="clip_grad_value_ needs every element"):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    loss_of(stock, 0).backward()
    torch.nn.utils.clip_grad_value_(stock.parameters(), 1e-4)
    assert stock.head.weight.grad.abs().max() <= 1e-4
    assert optimizer.pending_bytes() > 0


def test_a_copy_of_torchs_function_imported_earlier_is_refused():
    code = """
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.clip_grad import clip_grad_value_
import torch
import forge_hf
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
optimizer = forge_hf.ForgeAdamW(model)
model(torch.ones(2, 3)).sum().backward()
for clip in (clip_grad_norm_, clip_grad_value_):
    bias = model[0].bias.grad.clone()
    try:
        clip(model.parameters(), 0.01)
        print("partial")
    except forge_hf.ForgeRefusal as error:
        print(error, torch.equal(bias, model[0].bias.grad))
other = torch.nn.Linear(3, 4)
other(torch.ones(2, 3)).sum().backward()
print(clip_grad_norm_(other.parameters(), 0.01).item() > 0)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    by_norm, by_value, other = result.stdout.strip().splitlines()
    assert "2 of these weights have their gradient held by forge_hf" in by_norm
    assert "forge_hf.clip_grad_norm_(optimizer, max_norm)" in by_norm
    assert by_norm.endswith("True")
    assert "clip_grad_value_ needs every element" in by_value
    assert other == "True"


def test_exact_clipping_in_backward_mode_is_refused_with_three_ways_out():
    model = build()
    optimizer = ForgeAdamW(model, update="backward")
    loss_of(model, 0).backward()
    message = r"max_norm=1.0 needs .*max_grad_norm=0 .*update=step.*clip=lagged"
    with pytest.raises(ForgeRefusal, match=message):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ForgeRefusal, match=message):
        optimizer.clip_grad_norm_(1.0)


@pytest.mark.parametrize("micro_batches", [(1,), (3,), (20,)])
@pytest.mark.parametrize("kind", [Mlp, Shared, TiedEmbedding])
def test_backward_mode_measures_the_true_norm(kind, micro_batches):
    model, reference = build(kind), build(kind)
    settings = {"max_norm": math.inf, "micro_batches": micro_batches, "steps": 4}
    ours = train(model, ForgeAdamW(model, update="backward"), **settings)
    theirs = train(reference, torch.optim.AdamW(reference.parameters()), **settings)
    assert ours == pytest.approx(theirs, rel=NORM_FP32)


class LaggedSGD(torch.optim.SGD):
    """SGD that clips with the coefficient of the step before; the first step is exact."""

    lagged: torch.Tensor | None = None

    def clip(self, model: nn.Module, max_norm: float) -> float:
        grads = [p.grad for p in model.parameters()]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        fresh = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        used = fresh if self.lagged is None else self.lagged
        for grad in grads:
            grad.mul_(used)
        self.lagged = fresh
        return norm.item()


@pytest.mark.parametrize("micro_batches", [1, 3, 20])
def test_lagged_clipping(micro_batches):
    """Both with pairs (1, 3) and with dense sums (20 micro-batches)."""
    start, model, reference = build(), build(), build()
    ours = ForgeSGD(model, lr=0.5, update="backward", clip="lagged")
    theirs = LaggedSGD(reference.parameters(), lr=0.5)
    for step in range(6):
        for part in range(micro_batches):
            seed = 100 * step + part
            if part < micro_batches - 1:
                with ours.no_sync():
                    loss_of(model, seed).backward()
            else:
                loss_of(model, seed).backward()
            loss_of(reference, seed).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        assert norm == pytest.approx(theirs.clip(reference, 0.1), rel=NORM_FP32)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert way_off(model, reference, start) < WAY_FP32_SMALL


def test_two_lagged_optimizers_keep_their_own_coefficients():
    model = nn.ModuleList([build(seed=1), build(seed=2)])
    optimizers = [
        ForgeSGD(list(part.parameters()), attach_to=part, lr=0.1, update="backward", clip="lagged")
        for part in model
    ]
    optimizers[1].tape.lagged_coefficient = torch.tensor(0.5)
    for part in model:
        loss_of(part, 0).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert optimizers[0].tape.lagged_coefficient.item() < 0.1
    assert torch.equal(optimizers[0].tape.lagged_coefficient, optimizers[1].tape.lagged_coefficient)


def test_clip_grad_norm_takes_forge_optimizers_only():
    model = build()
    with pytest.raises(TypeError, match="takes a forge optimizer, not SGD"):
        forge_hf.clip_grad_norm_(torch.optim.SGD(model.parameters(), lr=0.1), 1.0)


def test_stock_models_are_clipped_by_torch_itself():
    model, stock = build(), build()
    optimizer = ForgeAdamW(model)
    loss_of(stock, 0).backward()
    copy = snapshot(stock)
    loss_of(copy, 0).backward()
    first = torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.1)
    second = torch.nn.utils.clip_grad.clip_grad_norm_.__wrapped__(copy.parameters(), 0.1)
    assert torch.equal(first, second)
    assert torch.equal(stock.head.weight.grad, copy.head.weight.grad)
    assert same_bits(model, build())
    assert optimizer.pending_bytes() == 0
