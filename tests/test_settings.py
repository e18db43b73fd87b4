"""What becomes of TrainingArguments: the optimizer's arguments, the update mode, and every refusal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer

from forge_hf import ForgeAdamW, ForgeConfigError, ForgeLion, ForgeRefusal, ForgeSGD
from forge_hf.config import REFUSALS
from forge_hf.layers import ForgeLinear

from .trainer_runs import Tokens, arguments, tiny_roberta


def chosen(optim: str = "forge_adamw", model: object = "small", **changes: object) -> tuple[type, dict]:
    """Class and keywords for TrainingArguments with `changes`."""
    model = torch.nn.Linear(2, 2) if model == "small" else model
    return Trainer.get_optimizer_cls_and_kwargs(arguments_with(optim, **changes), model)


def arguments_with(optim: str = "forge_adamw", **changes: object) -> SimpleNamespace:
    """The fields of real TrainingArguments, free to take values that this machine could not construct."""
    args = arguments("unused", optim)
    derived = {name: getattr(args, name) for name in ("parallel_mode", "device", "n_gpu", "world_size")}
    return SimpleNamespace(**{**vars(args), **derived, **changes})


def refusal(key: str, **details: object) -> str:
    """The sentence of a refusal, to be compared in full."""
    return REFUSALS[key].format(**details)


def test_adamw_gets_the_trainers_numbers():
    model = torch.nn.Linear(2, 2)
    cls, keywords = chosen(
        model=model,
        learning_rate=3e-4,
        adam_beta1=0.8,
        adam_beta2=0.95,
        adam_epsilon=1e-6,
        optim_args="state=bf16,rounding=nearest",
    )
    assert cls is ForgeAdamW
    assert keywords == {
        "lr": 3e-4,
        "betas": (0.8, 0.95),
        "eps": 1e-6,
        "update": "step",
        "clip": "exact",
        "state": "bf16",
        "rounding": "nearest",
        "seed": 0,
        "weight_bits": 16,
        "nonfinite": "propagate",
        "log_memory": True,
        "attach_to": model,
    }


@pytest.mark.parametrize(("name", "cls"), [("forge_adamw_8bit", ForgeAdamW), ("forge_lion_8bit", ForgeLion)])
def test_the_8bit_names_stand_for_a_state(name, cls):
    model = torch.nn.Linear(2, 2)
    got, keywords = chosen(model=model, optim=name)
    assert got is cls and keywords["state"] == "8bit"
    assert chosen(model=model, optim=name, optim_args="state=8bit,seed=3")[1]["seed"] == 3
    with pytest.raises(ForgeConfigError, match=f"optim='{name[:-5]}' with that option"):
        chosen(model=model, optim=name, optim_args="state=fp32")


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ((0.9, 0.999), (0.9, 0.99)),
        ((0.95, 0.98), (0.95, 0.98)),
        ((0.95, 0.999), (0.95, 0.99)),
        ((0.9, 0.98), (0.9, 0.98)),
    ],
)
def test_lion_keeps_its_own_betas_unless_told_otherwise(given, used):
    cls, keywords = chosen("forge_lion", adam_beta1=given[0], adam_beta2=given[1])
    assert (cls, keywords["betas"]) == (ForgeLion, used)
    assert "eps" not in keywords


def test_sgd_takes_momentum_and_nesterov_from_optim_args():
    cls, keywords = chosen("forge_sgd", optim_args="momentum=0.9, nesterov=True")
    assert (cls, keywords["momentum"], keywords["nesterov"]) == (ForgeSGD, 0.9, True)
    assert chosen("forge_sgd", optim_args="momentum=0.9,nesterov=False")[1]["nesterov"] is False
    assert {"betas", "eps"} & keywords.keys() == set()


@pytest.mark.parametrize(
    ("optim_args", "message"),
    [
        ("updat=step", "Unknown option 'updat'; did you mean 'update'?"),
        ("update=later", "Option update='later' is unknown"),
        ("update", "optim_args entry 'update' is not of the form name=value."),
        ("seed=one", "Option seed='one' is not a valid int"),
        ("momentum=0.9", "Unknown option 'momentum'"),
        ("clip=lagged", "Option clip='lagged' belongs to update='backward'"),
    ],
)
def test_optim_args_are_read_strictly(optim_args, message):
    with pytest.raises(ForgeConfigError) as error:
        chosen(optim_args=optim_args)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "update"),
    [
        ({}, "step"),
        ({"max_grad_norm": 0}, "backward"),
        ({"max_grad_norm": 0.0}, "backward"),
        ({"max_grad_norm": None}, "backward"),
        ({"max_grad_norm": float("inf")}, "backward"),
        ({"max_grad_norm": 0, "fp16": True}, "step"),
        ({"max_grad_norm": 0, "mixed_precision": "fp16"}, "step"),
        ({"max_grad_norm": 0, "mixed_precision": "fp16", "bf16": True}, "backward"),
        ({"max_grad_norm": 0, "auto_find_batch_size": True}, "step"),
        ({"max_grad_norm": 0, "optim_args": "update=auto"}, "backward"),
        ({"max_grad_norm": 0, "optim_args": "update=step"}, "step"),
        ({"max_grad_norm": 0, "optim_args": "update=backward"}, "backward"),
        ({"max_grad_norm": 1.0, "optim_args": "update=backward,clip=lagged"}, "backward"),
    ],
)
def test_update_is_resolved_from_the_training_arguments(changes, update):
    assert chosen(**changes)[1]["update"] == update


@pytest.mark.parametrize(
    ("changes", "key", "details"),
    [
        ({"max_grad_norm": 0.5}, "clip_in_backward", {"max_norm": 0.5}),
        ({"max_grad_norm": 0, "fp16": True}, "scaler_in_backward", {}),
        (
            {"max_grad_norm": 1.0, "fp16": True, "optim_args": "update=backward,clip=lagged"},
            "scaler_in_backward",
            {},
        ),
        ({"max_grad_norm": 0, "auto_find_batch_size": True}, "retry_in_backward", {}),
    ],
)
def test_contradictions_of_update_backward_are_refused(changes, key, details):
    with pytest.raises(ForgeRefusal) as error:
        chosen(**{"optim_args": "update=backward", **changes})
    assert str(error.value) == refusal(key, **details)


@pytest.mark.parametrize(
    ("changes", "key", "details"),
    [
        ({"deepspeed": "zero2.json"}, "deepspeed", {}),
        ({"fsdp": True}, "fsdp", {}),
        ({"fsdp": ["full_shard"]}, "fsdp", {}),
        ({"parallel_mode": SimpleNamespace(value="sagemaker_model_parallel")}, "sagemaker", {}),
        ({"parallel_mode": SimpleNamespace(value="sagemaker_data_parallel")}, "sagemaker", {}),
        ({"parallel_mode": SimpleNamespace(value="tpu")}, "xla", {}),
        ({"device": torch.device("xla", 0)}, "xla", {}),
        ({"torch_compile": True}, "torch_compile", {}),
        ({"n_gpu": 2}, "data_parallel", {}),
        ({"world_size": 4}, "ddp", {"world_size": 4}),
        ({"model": None}, "no_model", {"name": "ForgeAdamW"}),
    ],
)
def test_refused_before_the_first_step(changes, key, details):
    with pytest.raises(ForgeRefusal) as error:
        chosen(**changes)
    assert str(error.value) == refusal(key, **details)


@pytest.mark.parametrize(
    ("variable", "value", "key"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", "deepspeed"),
        ("ACCELERATE_USE_FSDP", "true", "fsdp"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "torch_compile"),
    ],
)
def test_refused_when_accelerate_launch_says_so(variable, value, key, monkeypatch):
    args = arguments_with()
    monkeypatch.setenv(variable, value)
    with pytest.raises(ForgeRefusal) as error:
        Trainer.get_optimizer_cls_and_kwargs(args, torch.nn.Linear(2, 2))
    assert str(error.value) == refusal(key)
    monkeypatch.setenv(variable, "no")
    assert Trainer.get_optimizer_cls_and_kwargs(args, torch.nn.Linear(2, 2))[0] is ForgeAdamW


def test_a_real_trainer_refuses_two_gpus_without_distribution_and_still_evaluates(tmp_path):
    trainer = Trainer(
        model=tiny_roberta(),
        args=arguments(str(tmp_path), "forge_adamw"),
        train_dataset=Tokens("roberta"),
        eval_dataset=Tokens("roberta", 4),
    )
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.args._n_gpu = 2
    with pytest.raises(ForgeRefusal) as error:
        trainer.train()
    assert str(error.value) == refusal("data_parallel")
    assert all(type(module) is not ForgeLinear for module in trainer.model.modules())


def test_train_refuses_deepspeed_although_its_config_brings_an_optimizer(tmp_path, monkeypatch):
    """The Trainer would then never ask for ours, but train with another optimizer."""
    trainer = Trainer(
        model=tiny_roberta(), args=arguments(str(tmp_path), "forge_adamw"), train_dataset=Tokens("roberta")
    )
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", None)
    trainer.args.deepspeed = {"optimizer": {"type": "AdamW"}}
    with pytest.raises(ForgeRefusal) as error:
        trainer.train()
    assert str(error.value) == refusal("deepspeed")
