"""Plain loops at the edges of what torch allows: the run is torch's, or a refusal says why not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_hf import ForgeAdamW, ForgeRefusal
from tests.models import HIDDEN, IN, OUT, Mlp, build, flat, loss_of, way_off
from tests.tolerances import WAY_FP32_SMALL

MODES = ["step", "backward"]
SETTINGS = {"lr": 1e-2, "weight_decay": 0.3}


def assert_same_run(
    loop: Callable[[Any, Any], None], kind: Callable[[], nn.Module] = Mlp, mode: str = "step"
) -> None:
    """`loop(model, optimizer)` with both optimizers ends at the same weights."""
    models = []
    for forge in (False, True):
        model = build(kind)
        torch.manual_seed(2)
        loop(
            model,
            ForgeAdamW(model, update=mode, **SETTINGS)
            if forge
            else torch.optim.AdamW(model.parameters(), **SETTINGS),
        )
        models.append(model)
    assert way_off(models[1], models[0], build(kind)) < WAY_FP32_SMALL


class _Cut(torch.autograd.Function):
    """Identity whose gradient is undefined, as behind a stop-gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:
        return None


class Cut(Mlp):
    """A layer whose output gets no gradient every other time."""

    calls = 0

    def body(self, h: Tensor) -> Tensor:
        self.calls += 1
        y = self.middle(h)
        return h + (_Cut.apply(y) if self.calls % 2 else y)


@pytest.mark.parametrize("mode", MODES)
def test_an_undefined_gradient_is_none_and_not_zero(mode):
    # Zeros would decay the weight and move it by its momentum; torch leaves it alone.
    def loop(model, optimizer):
        for step in range(5):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_same_run(loop, Cut, mode)


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Mlp(), nn.Sequential(nn.Linear(OUT, HIDDEN), nn.Linear(HIDDEN, 1))


@pytest.mark.parametrize("mode", MODES)
def test_two_networks_that_train_through_each_other(mode):
    """The generator's loss reaches the critic between the critic's step and its next zero_grad()."""
    models = []
    for forge in (False, True):
        model = build(_Pair)
        parts = (model.generator, model.critic)
        optimizers = [
            ForgeAdamW(part, update=mode, **SETTINGS)
            if forge
            else torch.optim.AdamW(part.parameters(), **SETTINGS)
            for part in parts
        ]
        for step in range(4):
            torch.manual_seed(step)
            made = model.generator(torch.randn(5, IN))
            model.critic.zero_grad()
            (model.critic(made.detach()).mean() - model.critic(torch.randn(5, OUT)).mean()).backward()
            optimizers[1].step()
            model.generator.zero_grad()
            model.critic(made).square().mean().backward()
            optimizers[0].step()
        models.append(model)
    assert way_off(models[1], models[0], build(_Pair)) < WAY_FP32_SMALL


def test_norm_of_used_up_gradients_is_refused_and_not_the_rest_of_them():
    model = build()
    optimizer = ForgeAdamW(model)
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(ForgeRefusal, match=r"after step\(\) had used it up"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")) > 0


def _refill(buffer: Tensor, how: str) -> None:
    if how == "numpy":
        buffer.numpy()[:] = torch.randn(buffer.shape).numpy()
    elif how.startswith("data"):
        buffer.data.copy_(torch.randn(buffer.shape))
    else:
        buffer.copy_(torch.randn(buffer.shape))


@pytest.mark.parametrize("how", ["numpy", "data", "tensor", "data of a leaf with grad"])
def test_input_buffers_may_be_filled_anew_before_the_step(how):
    def loop(model, optimizer):
        # Few tokens, so that pairs and not dense sums are held.
        buffer = torch.zeros(2, IN, requires_grad="leaf" in how)
        for _ in range(3):
            for _ in range(2):
                _refill(buffer, how)
                model(buffer).square().mean().backward()
            _refill(buffer, how)
            optimizer.step()
            optimizer.zero_grad()

    assert_same_run(loop)


class Placed(Mlp):
    """Adds a parameter to an output so that autograd reuses the output's gradient as the parameter's."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(2, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        place = self.place.view(1, 2, HIDDEN)
        return self.head(self.middle(self.first(x)) + place)


def test_clipping_does_not_write_into_a_pair_through_another_gradient():
    def loop(model, optimizer):
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(1, 2, IN)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
            optimizer.zero_grad()

    assert_same_run(loop, Placed)


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_that_needs_no_weight_survives_a_step(mode):
    """Without an input that needs grad, torch saves no weight, so such a graph may be older than the step."""

    def loop(model, optimizer):
        for _ in range(3):
            losses = [model(torch.randn(5, IN)).square().mean() for _ in range(2)]
            for loss in losses:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    assert_same_run(loop, lambda: nn.Linear(IN, OUT), mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_taken_out_of_its_group_is_not_trained(mode):
    def loop(model, optimizer):
        for step in range(4):
            if step == 2:
                group = optimizer.param_groups[0]
                group["params"] = [member for member in group["params"] if member is not model.middle.weight]
            loss_of(model, step).backward()
            optimizer.step()
            model.zero_grad()

    assert_same_run(loop, mode=mode)


class _Heads(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(HIDDEN, OUT)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_forward_between_backward_and_step_reads_the_old_weights_or_is_refused(mode, training):
    def loop(model, optimizer):
        for step in range(3):
            loss_of(model, step).backward()
            model.train(training)
            with torch.no_grad():
                features = model.middle(model.first(torch.randn(5, IN)))
            model.other(features).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    refused = pytest.raises(ForgeRefusal, match=r"another forward before step\(\)")
    with refused if mode == "backward" else contextlib.nullcontext():
        assert_same_run(loop, _Heads, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("setting", [{"lr": 1e-3}, {"weight_decay": 0.0}, {"betas": (0.5, 0.9)}])
def test_settings_that_change_between_backward_and_step_act_or_are_refused(mode, setting):
    def loop(model, optimizer):
        for step in range(3):
            loss_of(model, step).backward()
            if step == 1:
                optimizer.param_groups[0].update(setting)
            optimizer.step()
            optimizer.zero_grad()

    refused = pytest.raises(ForgeRefusal, match=r"changed between backward\(\) and step\(\)")
    with refused if mode == "backward" else contextlib.nullcontext():
        assert_same_run(loop, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_on_ordinary_gradients(mode, backend):
    compiled = {}

    def loop(model, optimizer):
        torch._dynamo.reset()
        compiled[type(optimizer)] = run = torch.compile(model, backend=backend)
        for rows in (2, 3, 4):
            run(torch.randn(rows, IN)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9 if mode == "backward" else 0.1)
            optimizer.step()
            optimizer.zero_grad()

    assert_same_run(loop, mode=mode)
    assert len(compiled) == 2


@pytest.mark.parametrize("mode", MODES)
def test_averaged_weights_and_their_scheduler(mode):
    def loop(model, optimizer):
        average = torch.optim.swa_utils.AveragedModel(model)
        schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=5e-3)
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            with torch.inference_mode():
                model(torch.randn(3, IN))
            schedule.step()
        model.load_state_dict(average.module.state_dict())

    assert_same_run(loop, mode=mode)


@pytest.mark.parametrize("shape", [(1, IN), (IN,), (0, IN)])
@pytest.mark.parametrize("mode", MODES)
def test_one_token_and_none(mode, shape):
    def loop(model, optimizer):
        for step in range(4):
            x = torch.randn(shape if step == 2 else (3, IN))
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_same_run(loop, mode=mode)


def test_the_optimizer_lives_on_when_its_groups_are_counted_anew():
    model = build()
    optimizer = ForgeAdamW(model, update="backward", **SETTINGS)
    before = flat(model)
    optimizer.param_groups[0]["params"] = list(reversed(optimizer.param_groups[0]["params"]))
    loss_of(model, 0).backward()
    optimizer.step()
    # Adam's first step moves every element that has a gradient by about lr.
    assert ((flat(model) - before).abs() > SETTINGS["lr"] / 2).double().mean() > 0.9
