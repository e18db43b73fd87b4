"""The norms of all gradients at once: every held form, either backend, what is kept, what scales together."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_hf import FactoredGradient, ForgeRefusal, ForgeSGD, dispatch
from forge_hf.gradient import norms_sq, scale_all_

from .models import flat
from .tolerances import NORM_FP32, NORM_GRAM

WORDS, WIDTH = 60, 16


class Mixed(nn.Module):
    """Pairs of three shapes, one weight used twice, a table, a tied table, and biases in `.grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(40, WIDTH)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wide = nn.Linear(WIDTH, 50, bias=False)
        self.narrow = nn.Linear(50, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids) + self.places(torch.arange(ids.shape[-1]))
        for layer in self.layers:
            h = h + F.gelu(layer(h))
        h = torch.tanh(self.twice(torch.tanh(self.twice(h))))
        return self.head(self.narrow(F.gelu(self.wide(h))))


@pytest.fixture(params=["reference", "triton"])
def backend(request, monkeypatch):
    if request.param == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("FORGE_HF_BACKEND", request.param)
    dispatch.reread_environment()
    yield request.param
    monkeypatch.undo()
    dispatch.reread_environment()


def build() -> Mixed:
    torch.manual_seed(3)
    return Mixed()


def backward(model: nn.Module, seed: int, tokens: int = 4) -> None:
    ids = torch.randint(WORDS, (1, tokens), generator=torch.Generator().manual_seed(seed))
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()


def both(parts: int) -> tuple[Mixed, ForgeSGD, Mixed]:
    """Our model and a stock one after the same backwards; in the first part one weight is left dense."""
    model, stock = build(), build()
    optimizer = ForgeSGD(model, lr=1.0)
    for part in range(parts):
        for net in (model, stock):
            backward(net, part)
    return model, optimizer, stock


def forms(optimizer: ForgeSGD) -> set[str]:
    found = set()
    for slot in optimizer.tape.slots:
        gradient = slot.gradient
        if gradient.buffer is not None:
            found.add("dense")
        elif gradient.segments and gradient.looked_up:
            found.add("tied")
        elif gradient.looked_up:
            found.add("lookups")
        else:
            found.add("pair" if len(gradient.segments) == 1 else "segments")
    return found


def make_dense(model: Mixed, stock: Mixed) -> None:
    """A gradient beside the held one of one weight, as a penalty on it leaves."""
    for net in (model, stock):
        grad = net.layers[1].weight.grad
        extra = torch.linspace(-0.1, 0.1, WIDTH * WIDTH).view(WIDTH, WIDTH)
        net.layers[1].weight.grad = extra if grad is None else grad + extra


@pytest.mark.usefixtures("backend")
def test_clipping_twice_is_torchs_norm_whatever_is_held():
    model, optimizer, stock = both(1)
    assert forms(optimizer) == {"pair", "segments", "lookups", "tied"}
    make_dense(model, stock)
    for max_norm in (math.inf, 0.5, 0.01, math.inf):
        ours = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        theirs = torch.nn.utils.clip_grad_norm_(stock.parameters(), max_norm)
        assert ours.item() == pytest.approx(theirs.item(), rel=NORM_GRAM)
    assert forms(optimizer) == {"pair", "segments", "lookups", "tied", "dense"}
    for slot in optimizer.tape.slots:
        expected = slot.parameter.shape, dict(stock.named_parameters())[slot.name].grad
        torch.testing.assert_close(slot.gradient.dense(), expected[1], rtol=1e-4, atol=1e-8)
        norm = slot.gradient.norm_sq().sqrt().item()
        assert norm == pytest.approx(expected[1].norm().item(), rel=NORM_GRAM)


@pytest.mark.usefixtures("backend")
def test_a_clipped_step_after_many_parts_is_torchs():
    model, optimizer, stock = both(6)
    assert "dense" in forms(optimizer)
    start = flat(model)
    theirs = torch.optim.SGD(stock.parameters(), lr=1.0)
    for net, stepper in ((model, optimizer), (stock, theirs)):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        torch.nn.utils.clip_grad_norm_(net.layers.parameters(), 0.02)
        backward(net, 9)  # added to what was clipped
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        stepper.step()
    way = (flat(stock) - start).norm()
    assert (flat(model) - flat(stock)).norm() <= 1e-4 * way


def held(count: int = 4, T: int = 3) -> list[FactoredGradient]:
    generator = torch.Generator().manual_seed(1)
    gradients = []
    for _ in range(count):
        gradient = FactoredGradient(torch.zeros(7, 9))
        gradient.add_pair(
            torch.randn(T, 7, generator=generator), torch.randn(T, 9, generator=generator), bounded=False
        )
        gradients.append(gradient)
    return gradients


def total(vectors: list[Tensor]) -> float:
    assert all(vector.ndim == 1 and vector.dtype == torch.float32 for vector in vectors)
    return float(sum(vector.double().sum() for vector in vectors))


def exact(gradients: list[FactoredGradient]) -> float:
    return float(sum(gradient.dense(torch.float64).square().sum() for gradient in gradients))


def test_norms_are_kept_and_added_to(monkeypatch):
    gradients = held()
    (first,) = norms_sq(gradients)
    alone = held()
    assert torch.equal(first, torch.stack([gradient.norm_sq() for gradient in alone]))
    assert torch.equal(first, torch.stack([gradient.norm_sq() for gradient in gradients]))
    assert torch.equal(first[2], gradients[2].unscaled_norm_sq())
    (again,) = norms_sq(gradients)
    assert again is first  # nothing is measured, and nothing is put together
    (turned,) = norms_sq(gradients[::-1])
    assert turned is first
    (part,) = norms_sq([gradients[3], gradients[1]])
    assert torch.equal(part, first[[3, 1]])
    gradients[1].add_pair(torch.ones(1, 7), torch.ones(1, 9))
    vectors = norms_sq(gradients)
    assert total(vectors) == pytest.approx(exact(gradients), rel=NORM_FP32)
    assert gradients[1].norm_sq().item() == pytest.approx(exact(gradients[1:2]), rel=NORM_FP32)
    assert torch.equal(first[3], gradients[3].norm_sq())


def test_a_gradient_counts_as_often_as_it_is_given():
    gradients = held()
    twice = [*gradients, gradients[0]]
    assert total(norms_sq(twice)) == pytest.approx(exact(twice), rel=NORM_FP32)
    scale_all_(twice, torch.tensor(0.5))
    coefficients = [gradient.coefficient.item() for gradient in gradients]
    assert coefficients == [0.25, 0.5, 0.5, 0.5]
    assert total(norms_sq(twice)) == pytest.approx(exact(twice), rel=NORM_FP32)


def test_coefficients_are_shared_copied_and_squared():
    gradients, factor = held(), torch.tensor(0.5)
    gradients[2].scale_(torch.tensor(3.0))
    scale_all_(gradients, factor)
    factor.zero_()
    assert [gradient.coefficient.item() for gradient in gradients] == [0.5, 0.5, 1.5, 0.5]
    scale_all_(gradients, torch.tensor(0.25))
    assert [gradient.coefficient.item() for gradient in gradients] == [0.125, 0.125, 0.375, 0.125]
    assert len({id(gradient.coefficient) for gradient in gradients}) == 2
    assert [len(vector) for vector in norms_sq(gradients)] == [3, 1]
    assert total(norms_sq(gradients)) == pytest.approx(exact(gradients), rel=NORM_FP32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_buffers_have_the_norm_that_one_has(dtype):
    """fp16 squares beyond the range of fp16, and a weight without rows."""
    gradients = [FactoredGradient(torch.zeros(shape, dtype=dtype)) for shape in ((7, 9), (300, 5), (0, 4))]
    for number, gradient in enumerate(gradients):
        values = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(number))
        gradient.add_dense((3e4 * values.clamp(-2, 2)).to(dtype))
    nothing = FactoredGradient(torch.zeros(3, 4, dtype=dtype))
    dense, none = norms_sq([*gradients, nothing])
    for norm, gradient in zip(dense, gradients, strict=True):
        one = torch.linalg.vector_norm(gradient.buffer, dtype=torch.float32).square()
        torch.testing.assert_close(norm, one, rtol=1e-6, atol=0)
        assert torch.equal(gradient.norm_sq(), norm)
    assert none.tolist() == [0.0]
    assert norms_sq([]) == []


def test_dtypes_may_be_mixed():
    gradients = held(2)
    for dtype in (torch.float32, torch.bfloat16):
        gradients.append(FactoredGradient(torch.zeros(7, 9, dtype=dtype)))
        gradients[-1].add_dense(torch.ones(7, 9, dtype=dtype))
    assert total(norms_sq(gradients)) == pytest.approx(exact(gradients), rel=NORM_FP32)


def test_a_pair_that_was_written_to_is_refused():
    gradients = held()
    gradients[2].segments[0].dy_TN.add_(1.0)
    with pytest.raises(ForgeRefusal, match="output gradient"):
        norms_sq(gradients)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("bad", [math.inf, math.nan, None])
def test_unscaling_finds_what_is_not_finite_and_leaves_norms_right(bad):
    model, optimizer, stock = both(1)
    make_dense(model, stock)
    if bad is not None:
        slot = next(slot for slot in optimizer.tape.slots if slot.name == "narrow.weight")
        slot.gradient.add_pair(torch.full((1, WIDTH), bad), torch.ones(1, 50))
    inverse = torch.tensor(0.25)
    found = optimizer.unscale_held_(inverse, {})
    assert {device.type: flag.item() for device, flag in found.items()} == {"cpu": float(bad is not None)}
    inverse.zero_()
    if bad is None:
        # What is in `.grad`, beside held pairs too, is the scaler's own part.
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.25)
        for parameter in stock.parameters():
            parameter.grad.mul_(0.25)
        for max_norm in (0.05, math.inf):
            ours = optimizer.clip_grad_norm_(max_norm).item()
            theirs = torch.nn.utils.clip_grad_norm_(stock.parameters(), max_norm).item()
            assert ours == pytest.approx(theirs, rel=NORM_GRAM)


def test_flags_of_the_scaler_are_kept():
    _, optimizer, _ = both(1)
    device = torch.device("cpu")
    found = optimizer.unscale_held_(torch.tensor(1.0), {device: torch.tensor(1.0)})
    assert found[device].item() == 1.0
