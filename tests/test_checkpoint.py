"""Checkpoints: bit-equal resume, and interchange with torch's optimizers."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from forge_hf import ForgeAdamW, ForgeLion, ForgeSGD

from .models import Shared, build, decay_groups, loss_of, same_bits, train, way_off
from .tolerances import WAY_FP32_SMALL


def through_a_file(state: Any) -> Any:
    """Save and load as a Trainer does, with `weights_only=True`."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, map_location="cpu")


OPTIMIZERS = {
    "adamw": lambda model, **options: ForgeAdamW(decay_groups(model), lr=1e-2, attach_to=model, **options),
    "lion": lambda model, **options: ForgeLion(decay_groups(model), lr=1e-3, attach_to=model, **options),
    "sgd": lambda model, **options: ForgeSGD(decay_groups(model), momentum=0.9, attach_to=model, **options),
    "plain_sgd": lambda model, **options: ForgeSGD(decay_groups(model), attach_to=model, **options),
}


@pytest.mark.parametrize("mode", ["step", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"state": "bf16"}, {"state": "fp32", "rounding": "nearest"}])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume_is_bit_equal(name, options, dtype, mode):
    make = OPTIMIZERS[name]
    loop = {"dtype": dtype, "micro_batches": (2, 1), "max_norm": 0.5 if mode == "step" else None}
    straight = build(Shared, dtype=dtype)
    train(straight, make(straight, update=mode, **options), steps=6, **loop)
    first = build(Shared, dtype=dtype)
    optimizer = make(first, update=mode, **options)
    train(first, optimizer, steps=3, **loop)
    saved, weights = through_a_file(optimizer.state_dict()), copy.deepcopy(first.state_dict())
    second = build(Shared, seed=9, dtype=dtype)
    resumed = make(second, update=mode, **options)
    second.load_state_dict(weights)
    resumed.load_state_dict(saved)
    train(second, resumed, steps=3, first_step=3, **loop)
    assert same_bits(second, straight)


def test_schedulers_resume_too():
    def pair(model: Any) -> tuple[Any, Any]:
        optimizer = ForgeAdamW(model, lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)

    straight, first, second = build(), build(), build(seed=4)
    optimizer, scheduler = pair(straight)
    train(straight, optimizer, steps=6, scheduler=scheduler)
    optimizer, scheduler = pair(first)
    train(first, optimizer, steps=3, scheduler=scheduler)
    files = through_a_file([optimizer.state_dict(), scheduler.state_dict(), first.state_dict()])
    optimizer, scheduler = pair(second)
    optimizer.load_state_dict(files[0])
    scheduler.load_state_dict(files[1])
    second.load_state_dict(files[2])
    train(second, optimizer, steps=3, first_step=3, scheduler=scheduler)
    assert same_bits(second, straight)


def test_lagged_coefficient_survives_resume():
    loop = {"max_norm": 0.05}
    straight, first, second = build(), build(), build(seed=4)
    options = {"lr": 0.5, "update": "backward", "clip": "lagged"}
    train(straight, ForgeSGD(straight, **options), steps=4, **loop)
    optimizer = ForgeSGD(first, **options)
    train(first, optimizer, steps=2, **loop)
    resumed = ForgeSGD(second, **options)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    train(second, resumed, steps=2, first_step=2, **loop)
    assert same_bits(second, straight)


TORCH = {
    "adamw": (torch.optim.AdamW, ForgeAdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, ForgeSGD, {"lr": 0.1, "momentum": 0.9}),
    "plain_sgd": (torch.optim.SGD, ForgeSGD, {"lr": 0.1}),
}


@pytest.mark.parametrize("mode", ["step", "backward"])
@pytest.mark.parametrize("name", TORCH)
def test_torch_to_forge_and_back(name, mode):
    stock, ours, settings = TORCH[name]
    model, reference = build(), build()
    before = stock(model.parameters(), **settings)
    train(model, before, steps=3)
    middle = ours(model, update=mode, **settings)
    middle.load_state_dict(through_a_file(before.state_dict()))
    train(model, middle, steps=3, first_step=3)
    saved = through_a_file(middle.state_dict())
    middle.detach()
    after = stock(model.parameters(), **settings)
    after.load_state_dict(saved)
    train(model, after, steps=3, first_step=6)
    train(reference, stock(reference.parameters(), **settings), steps=9)
    assert way_off(model, reference, build()) < WAY_FP32_SMALL
    assert set(after.state_dict()["param_groups"][0]) <= set(before.state_dict()["param_groups"][0])


def test_state_has_torchs_keys_and_its_own_dtypes():
    model = build(dtype=torch.bfloat16)
    optimizer = ForgeAdamW(model, state="fp32")
    train(model, optimizer, steps=2, dtype=torch.bfloat16)
    stock = build()
    reference = torch.optim.AdamW(stock.parameters())
    train(stock, reference, steps=2)
    ours, theirs = through_a_file(optimizer.state_dict()), reference.state_dict()
    assert [list(entry) for entry in ours["state"].values()] == [
        list(entry) for entry in theirs["state"].values()
    ]
    assert set(ours["param_groups"][0]) == set(theirs["param_groups"][0])
    other = ForgeAdamW(build(dtype=torch.bfloat16), state="fp32")
    other.load_state_dict(ours)
    for index, entry in other.state_dict()["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert entry[key].dtype == torch.float32
            assert torch.equal(entry[key], ours["state"][index][key])
        assert entry["step"].item() == 2.0


def test_loaded_moments_are_copies_in_the_weights_layout():
    model = build()
    optimizer = ForgeAdamW(model)
    train(model, optimizer, steps=1)
    saved = copy.deepcopy(optimizer.state_dict())
    moment = saved["state"][0]["exp_avg"]
    saved["state"][0]["exp_avg"] = moment.t().contiguous().t()
    optimizer.load_state_dict(saved)
    loaded = optimizer.state[model.first.weight]["exp_avg"]
    assert torch.equal(loaded, moment)
    assert loaded.stride() == model.first.weight.stride()
    moment.zero_()
    assert loaded.any()


def test_loading_between_backward_and_step_keeps_the_gradient_as_torch_does():
    model, reference = build(), build()
    pairs = (model, ForgeAdamW(model)), (reference, torch.optim.AdamW(reference.parameters()))
    for net, optimizer in pairs:
        train(net, optimizer, steps=2)
        loss_of(net, 7).backward()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
    assert way_off(model, reference, build()) < WAY_FP32_SMALL


def test_hooks_of_load_state_dict_run():
    model = build()
    optimizer = ForgeAdamW(model)
    calls = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append("pre") or {**state})
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("post"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "post"]
