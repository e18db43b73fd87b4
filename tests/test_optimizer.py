"""ForgeOptimizer keeps torch's optimizer contract."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_hf import ForgeAdamW, ForgeLion, ForgeRefusal, ForgeSGD

from .models import Shared, build, loss_of, same_bits, snapshot, train, way_off
from .tolerances import WAY_FP32_SMALL, WAY_SCALER


def test_it_is_a_torch_optimizer_with_torchs_groups_and_defaults():
    model = build()
    ours, theirs = ForgeAdamW(model, lr=0.5), torch.optim.AdamW(model.parameters(), lr=0.5)
    assert isinstance(ours, torch.optim.Optimizer)
    assert ours.defaults == theirs.defaults
    assert [set(group) for group in ours.param_groups] == [set(group) for group in theirs.param_groups]
    assert repr(ours).startswith("ForgeAdamW (\nParameter Group 0")
    sgd = ForgeSGD(build(), momentum=0.9)
    assert sgd.defaults == torch.optim.SGD(model.parameters(), momentum=0.9).defaults
    assert ForgeLion(build()).defaults["betas"] == (0.9, 0.99)


def test_state_grows_with_the_parameters_that_were_updated():
    model, reference = build(), build()
    optimizer, theirs = ForgeAdamW(model), torch.optim.AdamW(reference.parameters())
    assert len(optimizer.state) == 0
    for net, each in ((model, optimizer), (reference, theirs)):
        net.head(torch.ones(24)).sum().backward()
        each.step()
    assert set(optimizer.state) == {model.head.weight, model.head.bias}
    ours, expected = optimizer.state[model.head.weight], theirs.state[reference.head.weight]
    assert list(ours) == list(expected) == ["step", "exp_avg", "exp_avg_sq"]
    for key in ours:
        assert torch.allclose(ours[key], expected[key], rtol=1e-5)


@pytest.mark.parametrize(
    "weight, option, expected",
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float16, "auto", torch.bfloat16),
        (torch.bfloat16, "fp32", torch.float32),
        (torch.float32, "bf16", torch.bfloat16),
    ],
)
def test_state_formats(weight, option, expected):
    model = nn.Sequential(nn.Linear(4, 3)).to(weight)
    optimizer = ForgeAdamW(model, state=option)
    model(torch.ones(2, 4, dtype=weight)).sum().backward()
    optimizer.step()
    for entry in optimizer.state.values():
        assert {entry["exp_avg"].dtype, entry["exp_avg_sq"].dtype} == {expected}
        assert entry["step"].dtype == torch.float32


def test_step_hooks_and_scheduler_order_warning_work():
    model = build()
    optimizer = ForgeAdamW(model, lr=1.0)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, steps=2, scheduler=scheduler)
    assert calls == ["pre", "post"] * 2
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_learning_rate_may_be_a_tensor_and_zero():
    model, reference = build(), build()
    train(model, ForgeAdamW(model, lr=torch.tensor(0.01)), steps=2)
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), steps=2)
    assert way_off(model, reference, build()) < WAY_FP32_SMALL
    before = snapshot(model)
    train(model, ForgeAdamW(model, lr=0.0), steps=1)
    assert same_bits(model, before)


def test_named_parameters_as_groups():
    model, reference = build(), build()
    train(model, ForgeAdamW(list(model.named_parameters()), attach_to=model), steps=2)
    train(reference, torch.optim.AdamW(list(reference.named_parameters())), steps=2)
    assert way_off(model, reference, build()) < WAY_FP32_SMALL


def test_parameters_outside_the_model_are_trained_too():
    scales = [nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))]
    model, reference = build(), build()
    optimizers = (
        ForgeAdamW([*model.parameters(), scales[0]], attach_to=model),
        torch.optim.AdamW([*reference.parameters(), scales[1]]),
    )
    for step in range(3):
        for net, scale, optimizer in zip((model, reference), scales, optimizers, strict=True):
            (loss_of(net, step) * scale).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(*scales, atol=1e-6)
    assert not torch.equal(scales[0], torch.ones(()))


@pytest.mark.parametrize("make", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_of_model_and_optimizer(make):
    """Copied together they go on like the originals, on ordinary gradients."""
    model = build(Shared)
    optimizer = ForgeAdamW(model, lr=1e-2)
    train(model, optimizer, steps=2)
    other, copied = make((model, optimizer))
    assert type(copied) is ForgeAdamW
    assert copied.config == optimizer.config
    assert copied.pending_bytes() == 0
    train(model, optimizer, steps=3, first_step=2)
    train(other, copied, steps=3, first_step=2)
    assert way_off(other, model, build(Shared)) < WAY_FP32_SMALL
    assert len(optimizer.tape.slots) == 3


def test_seed_decides_the_rounding():
    def run(seed: int) -> Any:
        model = build(dtype=torch.bfloat16)
        train(model, ForgeAdamW(model, lr=1e-2, seed=seed), steps=3, dtype=torch.bfloat16)
        return model

    assert same_bits(run(1), run(1))
    assert not same_bits(run(1), run(2))


def test_modes_give_the_same_bits():
    """The mode moves the update in time and changes nothing else, stochastic rounding included."""
    models = []
    for mode in ("step", "backward"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32, bias=False)).bfloat16()
        optimizer = ForgeAdamW(model, lr=1e-2, update=mode)
        for _ in range(4):
            model(
                torch.randn(3, 32).bfloat16()
            ).float().square().mean().backward()  # pairs stay below the bound
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert same_bits(*models)


def test_small_updates_do_not_vanish_in_bf16():
    """A weight decay of 1e-3 per step is far below bf16's spacing; nearest rounding never moves."""
    sizes = {}
    for rounding in ("stochastic", "nearest"):
        model = nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16()
        nn.init.ones_(model[0].weight)
        optimizer = ForgeSGD(model, lr=1e-3, weight_decay=1.0, rounding=rounding)
        for _ in range(100):
            (model(torch.zeros(1, 64, dtype=torch.bfloat16)).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        sizes[rounding] = model[0].weight.float().mean().item()
    assert sizes["nearest"] == 1.0
    assert sizes["stochastic"] == pytest.approx((1 - 1e-3) ** 100, abs=3e-3)


class Scaled:
    """A loop with an fp16 loss scale; `overflow` names the steps whose loss is made infinite."""

    def __init__(
        self, model: Any, optimizer: Any, autocast: bool, clip: float | None, overflow: set[int]
    ) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.scales: list[float] = []
        self.norms: list[float] = []
        for step in range(8):
            for part in range(2):
                with torch.autocast("cpu", torch.float16, enabled=autocast):
                    loss = loss_of(model, 10 * step + part) / 2
                if step in overflow and part == 0:
                    loss = loss * math.inf
                scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                self.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            scaler.step(optimizer)
            scaler.update()
            self.scales.append(scaler.get_scale())
            (optimizer if step % 2 else model).zero_grad()


@pytest.mark.parametrize("overflow", [set(), {0}, {2, 3, 7}])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("autocast", [False, True])
def test_fp16_scaler(autocast, clip, overflow):
    model, reference = build(Shared), build(Shared)
    settings = {"lr": 0.1, "momentum": 0.9}
    ours = Scaled(model, ForgeSGD(model, **settings), autocast, clip, overflow)
    theirs = Scaled(reference, torch.optim.SGD(reference.parameters(), **settings), autocast, clip, overflow)
    assert ours.scales == theirs.scales
    finite = [pair for pair in zip(ours.norms, theirs.norms, strict=True) if math.isfinite(pair[1])]
    assert len(ours.norms) == len(theirs.norms)
    assert all(a == pytest.approx(b, rel=WAY_SCALER if autocast else 1e-5) for a, b in finite)
    assert way_off(model, reference, build(Shared)) < (WAY_SCALER if autocast else WAY_FP32_SMALL)


@pytest.mark.parametrize("layer", ["first", "middle", "head"])
def test_scaler_sees_an_overflow_in_one_layer_only(layer):
    model = build()
    optimizer = ForgeAdamW(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = snapshot(model)
    scaler.scale(loss_of(model, 0)).backward()
    slot = getattr(model, layer)._forge_receiver
    slot.gradient.add_pair(
        torch.full((1, slot.parameter.shape[0]), math.inf), torch.ones(1, slot.parameter.shape[1])
    )
    scaler.step(optimizer)
    scaler.update()
    assert same_bits(model, before)
    assert scaler.get_scale() == 2.0


def test_scaler_with_nothing_but_pairs():
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    optimizer = ForgeSGD(model, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    expected = model[0].weight.detach() - torch.ones(3, 4)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    assert torch.allclose(model[0].weight, expected)


def test_scaler_in_backward_mode_is_refused():
    model = build()
    optimizer = ForgeAdamW(model, update="backward")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(ForgeRefusal, match="update='backward' applies them at once"):
        scaler.step(optimizer)


class ReadTwice(nn.Module):
    """A table and a layer whose weights are read outside them as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(x) + F.linear(x, self.table.weight) + F.linear(x.square(), self.head.weight)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_gradient_from_outside_the_layer_is_unscaled_once(clip):
    """Autograd's part is in `.grad`, which the scaler knows; ours is not: their sum is unscaled together."""
    ends = []
    for cls in (torch.optim.SGD, ForgeSGD):
        torch.manual_seed(0)
        model = ReadTwice()
        optimizer = cls(model.parameters() if cls is torch.optim.SGD else model, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        norms = []
        for step in range(3):
            torch.manual_seed(step)
            ids = torch.randint(0, 50, (2, 7))
            scaler.scale(F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())).backward()
            if clip:
                scaler.unscale_(optimizer)
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append((norms, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])))
    assert ends[1][0] == pytest.approx(ends[0][0], rel=1e-5)
    torch.testing.assert_close(ends[1][1], ends[0][1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_members_of_groups_may_be_exchanged_in_place(update):
    """Settings are those of the group that a parameter is in now, as torch reads them in every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    first, second = model[0].weight, model[1].weight
    groups = [{"params": [first], "lr": 0.0}, {"params": [second], "lr": 1.0}]
    optimizer = ForgeSGD(groups, attach_to=model, update=update)

    def moved() -> tuple[bool, bool]:
        before = first.clone(), model[1].weight.clone()
        model(torch.ones(3, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return not torch.equal(first, before[0]), not torch.equal(model[1].weight, before[1])

    assert moved() == (False, True)
    optimizer.param_groups[0]["params"][0], optimizer.param_groups[1]["params"][0] = second, first
    assert moved() == (True, False)
    # One that replaces a member has no slot, and is trained on its ordinary gradient.
    model[1].weight = optimizer.param_groups[0]["params"][0] = nn.Parameter(second.detach().clone())
    optimizer.param_groups[0]["lr"] = 1.0
    assert moved() == (True, True)
