"""Settings, parameters and models that cannot be trained exactly are refused before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import forge_hf
from forge_hf import ForgeAdamW, ForgeConfigError, ForgeLion, ForgeRefusal, ForgeSGD

from .models import build, loss_of


@pytest.mark.parametrize(
    "cls, settings, message",
    [
        (ForgeAdamW, {"lr": -1e-3}, r"lr=-0.001 is out of range \[0.0, inf\]"),
        (ForgeAdamW, {"lr": float("nan")}, "lr=nan is out of range"),
        (ForgeAdamW, {"lr": float("inf")}, "lr=inf is out of range"),
        (ForgeAdamW, {"lr": "fast"}, "lr='fast' is not a number"),
        (ForgeAdamW, {"lr": None}, "lr=None is not a number"),
        (ForgeAdamW, {"betas": (0.9, 1.0)}, r"betas\[1\]=1.0 is out of range \[0.0, 1.0\)"),
        (ForgeAdamW, {"betas": (-0.1, 0.9)}, r"betas\[0\]=-0.1 is out of range"),
        (ForgeAdamW, {"betas": (0.9,)}, r"betas=\(0.9,\) is not a pair"),
        (ForgeAdamW, {"betas": 0.9}, "betas=0.9 is not a pair"),
        (ForgeAdamW, {"eps": -1.0}, "eps=-1.0 is out of range"),
        (ForgeAdamW, {"weight_decay": -0.1}, "weight_decay=-0.1 is out of range"),
        (ForgeLion, {"betas": (0.9, 2.0)}, r"betas\[1\]=2.0 is out of range"),
        (ForgeSGD, {"momentum": -1.0}, "momentum=-1.0 is out of range"),
        (ForgeSGD, {"nesterov": True}, "nesterov=True needs a momentum above 0"),
        (ForgeAdamW, {"updates": "step"}, r"Unknown option 'updates'; did you mean 'update'\?"),
        (ForgeAdamW, {"amsgrad": True}, "Unknown option 'amsgrad'"),
        (ForgeAdamW, {"fused": True}, "Unknown option 'fused'"),
        (ForgeAdamW, {"clip": "lagged"}, "belongs to update='backward'"),
    ],
)
def test_settings(cls, settings, message):
    with pytest.raises(ForgeConfigError, match=message):
        cls(build(), **settings)


@pytest.mark.parametrize(
    "group, message",
    [
        ({"lr": -1.0}, "lr=-1.0 is out of range"),
        ({"betas": (0.9, 1.5)}, r"betas\[1\]=1.5"),
        ({"amsgrad": True}, r"amsgrad=True is not supported. Fix: leave it at False"),
        ({"maximize": True}, "maximize=True is not supported"),
    ],
)
def test_settings_of_a_group(group, message):
    model = build()
    parameters = list(model.parameters())
    with pytest.raises(ForgeConfigError, match=message):
        ForgeAdamW([{"params": parameters, **group}], attach_to=model)
    optimizer = ForgeAdamW(parameters[:1], attach_to=model)
    with pytest.raises(ForgeConfigError, match=message):
        optimizer.add_param_group({"params": parameters[1:], **group})
    assert len(optimizer.param_groups) == 1


def refusal(make: Any, message: str) -> None:
    with pytest.raises(ForgeRefusal, match=message):
        make()


def test_model_is_missing():
    model = build()
    refusal(lambda: ForgeAdamW(model.parameters()), r"ForgeAdamW needs the model .*attach_to=model")
    refusal(lambda: ForgeLion([{"params": list(model.parameters())}]), "ForgeLion needs the model")


def test_nothing_to_train():
    model = build()
    model.requires_grad_(False)
    refusal(
        lambda: ForgeAdamW(model),
        r"no trainable linear layer or embedding to optimize \(every parameter is frozen\)",
    )
    conv = nn.Sequential(nn.Conv1d(3, 3, 1), nn.LayerNorm(3))
    refusal(lambda: ForgeAdamW(conv), r"4 trained parameters, none of them .* nn.Linear or nn.Embedding")
    with pytest.raises(ValueError, match="empty parameter list"):
        ForgeAdamW([], attach_to=build())
    outside = [nn.Parameter(torch.ones(2))]
    refusal(
        lambda: ForgeAdamW(outside, attach_to=build()),
        "every parameter is frozen or left out of the optimizer's groups",
    )


def test_parameters_that_cannot_be_updated_are_named():
    with torch.device("meta"):
        meta = build()
    refusal(lambda: ForgeAdamW(meta), r"'first.weight' is on the meta device .*to_empty")
    refusal(lambda: ForgeAdamW(build(dtype=torch.float64)), "'first.weight' has dtype torch.float64")
    quantised = build()
    quantised.codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    ForgeAdamW(quantised)  # frozen parameters may have any dtype
    mixed = build()
    mixed.norm.weight = nn.Parameter(torch.ones(24, dtype=torch.complex64))
    refusal(lambda: ForgeAdamW(mixed), "'norm.weight' has dtype torch.complex64")
    sparse = build()
    sparse.extra = nn.Parameter(torch.eye(3).to_sparse())
    refusal(lambda: ForgeAdamW(sparse), r"'extra' is sparse \(torch.sparse_coo\)")
    model = build()
    refusal(lambda: ForgeAdamW([model.head.weight * 2], attach_to=model), "'parameter' is not a leaf tensor")


def test_sets_of_parameters_have_no_order():
    model = build()
    with pytest.raises(TypeError, match="ordered collections"):
        ForgeAdamW([{"params": set(model.parameters())}], attach_to=model)


def test_parameter_in_two_groups():
    model = build()
    with pytest.raises(ValueError, match="more than one parameter group"):
        ForgeAdamW([{"params": [model.head.weight]}, {"params": [model.head.weight]}], attach_to=model)


def test_wrappers():
    refusal(lambda: ForgeAdamW(nn.DataParallel(build())), r"nn.DataParallel copies the model .*torchrun")
    sharded = build()
    sharded.head.__class__ = type("FSDPLinear", (nn.Linear,), {})
    refusal(lambda: ForgeAdamW(sharded), "FSDP owns and shards the gradients")
    engine = type("DeepSpeedEngine", (nn.Module,), {})()
    engine.module = build()
    refusal(lambda: ForgeAdamW(engine), "DeepSpeed brings its own optimizer step")
    flat = build()
    flat.head.weight.__class__ = type("FlatParameter", (nn.Parameter,), {})
    refusal(lambda: ForgeAdamW(flat), "FSDP owns and shards the gradients")


def test_several_processes(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    refusal(lambda: ForgeAdamW(build()), "Training with 4 processes is not supported yet")


def test_a_refused_optimizer_leaves_the_model_alone():
    model = build()
    owner = ForgeAdamW(model)
    with pytest.raises(ForgeConfigError):
        ForgeAdamW(model, lr=-1.0)
    with pytest.raises(ForgeRefusal):
        ForgeAdamW([nn.Parameter(torch.ones(2))], attach_to=model)
    loss_of(model, 0).backward()
    owner.step()
    assert int(owner.state[model.head.weight]["step"]) == 1


@pytest.mark.parametrize("value, ok", [("reference", True), ("auto", True), ("cuda", False)])
def test_backend_variable(monkeypatch, value, ok):
    monkeypatch.setenv("FORGE_HF_BACKEND", value)
    model = build()
    optimizer = ForgeAdamW(model)
    loss_of(model, 0).backward()
    if ok:
        optimizer.step()
        return
    with pytest.raises(
        ForgeConfigError, match="FORGE_HF_BACKEND='cuda' is unknown. Valid: auto, triton, reference."
    ):
        optimizer.step()


def test_unknown_public_name():
    with pytest.raises(AttributeError, match="module 'forge_hf' has no attribute 'ForgeAdam'"):
        forge_hf.ForgeAdam  # noqa: B018
    assert "ForgeAdamW" in dir(forge_hf)
