"""Names, arguments and refusals: what TrainingArguments and the Trainer make of `optim="forge_..."`."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

import forge_hf
from forge_hf import ForgeAdamW, ForgeConfigError, ForgeLion, ForgeRefusal, ForgeSGD
from forge_hf.config import REFUSALS
from forge_hf.hf import registration

from .subprocesses import python
from .trainer_runs import Tokens, arguments, tiny_roberta, train

NAMES = {"forge_adamw": ForgeAdamW, "forge_lion": ForgeLion, "forge_sgd": ForgeSGD}


def chosen(optim: str = "forge_adamw", model: object = "small", **changes: object) -> tuple[type, dict]:
    """Class and keywords for TrainingArguments with `changes`, set afterwards where they cannot be constructed here."""
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


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_names_are_ordinary_members(name):
    args = arguments("unused", name)
    member = OptimizerNames[name.upper()]
    assert args.optim is member is OptimizerNames(name) is getattr(OptimizerNames, name.upper())
    assert member == name and member.value == name and member in list(OptimizerNames)
    assert pickle.loads(pickle.dumps(args)).optim is member
    assert copy.deepcopy(args).optim is member
    assert args.to_dict()["optim"] == name and json.loads(args.to_json_string())["optim"] == name
    assert chosen(name)[0] is NAMES[name]


def test_parsers_yaml_json_subclass_and_set_optimizer(tmp_path):
    parser = HfArgumentParser(TrainingArguments)
    common = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "optim": "forge_adamw",
        "optim_args": "update=step, seed=3",
    }
    (tmp_path / "a.json").write_text(json.dumps(common))
    (tmp_path / "a.yaml").write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in common.items())
    )
    command = [
        "--optim",
        "forge_adamw",
        "--optim_args",
        "update=step, seed=3",
        "--use_cpu",
        "--output_dir",
        str(tmp_path),
    ]

    @dataclass
    class OurArguments(TrainingArguments):
        optim: str = field(default="forge_adamw")
        optim_args: str | None = field(default="update=step, seed=3")

    made = {
        "command": parser.parse_args_into_dataclasses(command)[0],
        "json": parser.parse_json_file(tmp_path / "a.json")[0],
        "yaml": parser.parse_yaml_file(tmp_path / "a.yaml")[0],
        "subclass": OurArguments(output_dir=str(tmp_path), use_cpu=True),
        "set_optimizer": TrainingArguments(output_dir=str(tmp_path), use_cpu=True).set_optimizer(
            name="forge_adamw", args="update=step, seed=3"
        ),
    }
    for way, args in made.items():
        assert args.optim is OptimizerNames.FORGE_ADAMW, way
        cls, keywords = Trainer.get_optimizer_cls_and_kwargs(args, torch.nn.Linear(2, 2))
        assert (cls, keywords["update"], keywords["seed"]) == (ForgeAdamW, "step", 3), way


def test_other_names_go_to_transformers():
    cls, keywords = chosen("adamw_torch", model=None)
    assert cls is torch.optim.AdamW and keywords["betas"] == (0.9, 0.999)
    with pytest.raises(
        ValueError, match="forge_adam is not a valid OptimizerNames, please select one of .*'forge_adamw'"
    ):
        arguments("unused", "forge_adam")


def test_add_enum_member_on_a_plain_string_enum():
    class Names(str, Enum):
        FIRST = "first"

    member = registration.add_enum_member(Names, "SECOND", "second")
    assert registration.add_enum_member(Names, "SECOND", "second") is member
    assert [entry.value for entry in Names] == ["first", "second"] and len(Names) == 2
    assert Names.SECOND is Names("second") is Names["SECOND"] is member
    assert member in Names and {member: 1}[Names.SECOND] == 1
    assert copy.deepcopy(member) is member
    if sys.version_info >= (3, 12):
        assert "second" in Names and "third" not in Names
    with pytest.raises(AttributeError):
        Names.SECOND = "other"
    for wrong in (Enum("Plain", "A"), int):
        with pytest.raises(TypeError, match="is not a string Enum"):
            registration.add_enum_member(wrong, "SECOND", "second")


# -- arguments -----------------------------------------------------------------------------------------------------


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
        "attach_to": model,
    }


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


# -- what owns the gradients or the step itself ----------------------------------------------------------------------


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
    assert all(type(module) is not forge_hf.layers.ForgeLinear for module in trainer.model.modules())


def test_train_refuses_deepspeed_although_its_config_brings_an_optimizer(tmp_path, monkeypatch):
    """The Trainer would then never ask for ours: it puts a dummy in its place and trains with another optimizer."""
    trainer = Trainer(
        model=tiny_roberta(), args=arguments(str(tmp_path), "forge_adamw"), train_dataset=Tokens("roberta")
    )
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", None)
    trainer.args.deepspeed = {"optimizer": {"type": "AdamW"}}
    with pytest.raises(ForgeRefusal) as error:
        trainer.train()
    assert str(error.value) == refusal("deepspeed")


# -- the stock Trainer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_stock_trainer_builds_the_real_class_with_its_decay_groups(name, tmp_path):
    run = train(tmp_path, "roberta", name, max_steps=2, weight_decay=0.1, max_grad_norm=0)
    optimizer = run.trainer.optimizer.optimizer
    assert type(optimizer) is NAMES[name] and optimizer.update_mode == "backward"
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == [0.1, 0.0]
    stock = train(
        tmp_path, "roberta", "adamw_torch", max_steps=1, weight_decay=0.1
    ).trainer.optimizer.optimizer
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        len(group["params"]) for group in stock.param_groups
    ]


# -- unknown layouts ---------------------------------------------------------------------------------------------------


class Arguments:
    """Stands in for TrainingArguments."""

    def __init__(self, optim: str) -> None:
        self.optim = optim
        self.__post_init__()

    def __post_init__(self) -> None:
        self.checked = True


@pytest.fixture
def fake(monkeypatch):
    """Fake modules in place of transformers', and no remembered problems."""
    monkeypatch.setattr(registration, "_problems", [])
    arguments_class = type("TrainingArguments", (Arguments,), {})
    modules = {
        "transformers": ModuleType("transformers"),
        "transformers.training_args": ModuleType("transformers.training_args"),
        "transformers.trainer": ModuleType("transformers.trainer"),
    }
    modules["transformers"].__version__ = "99.1"
    modules["transformers.training_args"].TrainingArguments = arguments_class
    modules["transformers.training_args"].OptimizerNames = Enum(
        "OptimizerNames", {"ADAMW": "adamw_torch"}, type=str
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(
        arguments=modules["transformers.training_args"], trainer=modules["transformers.trainer"]
    )


def ask(fake, optim="forge_adamw"):
    return fake.arguments.TrainingArguments(optim)


def layout_message(problem: str) -> str:
    start, end = REFUSALS["layout"].split("{problem}")
    return f"{start.format(version='99.1')}{problem}{end.format(supported=registration._SUPPORTED)}"


@pytest.mark.parametrize("broken", ["missing", "plain class", "integer enum"])
def test_optimizer_names_of_another_kind(fake, broken):
    if broken == "missing":
        del fake.arguments.OptimizerNames
    else:
        fake.arguments.OptimizerNames = Enum("OptimizerNames", "A B") if broken == "integer enum" else object
    registration.extend_training_args(fake.arguments)
    registration.extend_training_args(fake.arguments)
    assert ask(fake, "adamw_torch").checked
    for _ in range(2):
        with pytest.raises(
            ForgeRefusal, match="could not register its optimizers with transformers 99.1: OptimizerNames"
        ) as error:
            ask(fake)
        assert error.value.args[0].count("OptimizerNames cannot be extended") == 1


@pytest.mark.parametrize(
    "trainer", [None, type("Trainer", (), {}), type("Trainer", (), {"get_optimizer_cls_and_kwargs": print})]
)
def test_trainer_of_another_kind(fake, trainer):
    registration.extend_training_args(fake.arguments)
    before = ask(fake)
    if trainer is not None:
        trainer.train = lambda self: "trained"
        fake.trainer.Trainer = trainer
    registration.extend_trainer(fake.trainer)
    with pytest.raises(ForgeRefusal, match="Trainer.get_optimizer_cls_and_kwargs cannot be extended"):
        ask(fake)
    if trainer is not None:
        instance = trainer()
        instance.optimizer, instance.args = None, before
        with pytest.raises(ForgeRefusal, match="Trainer.get_optimizer_cls_and_kwargs cannot be extended"):
            instance.train()
        instance.args = ask(fake, "adamw_torch")
        assert instance.train() == "trained"


def test_layout_message_names_version_problem_and_fix(fake):
    fake.arguments.OptimizerNames = object
    registration.extend_training_args(fake.arguments)
    with pytest.raises(ForgeRefusal) as error:
        ask(fake)
    problem = "OptimizerNames cannot be extended (TypeError: <class 'object'> is not a string Enum)"
    assert str(error.value) == layout_message(problem)


def test_unknown_layout_of_a_whole_library_never_breaks_its_import(tmp_path):
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '99.1'\n")
    (package / "trainer.py").write_text("class Trainer:\n    pass\n")
    (package / "training_args.py").write_text(
        "class TrainingArguments:\n"
        "    def __init__(self, optim):\n        self.optim = optim\n        self.__post_init__()\n"
        "    def __post_init__(self):\n        pass\n"
    )
    plain, refused = python(
        """
import json, torch, transformers.trainer
from transformers.training_args import TrainingArguments
plain = TrainingArguments("adamw_torch").optim
try:
    TrainingArguments("forge_adamw")
except RuntimeError as error:
    print(json.dumps([plain, f"{type(error).__name__}: {error}"]))
""",
        PYTHONPATH=str(tmp_path),
    )
    assert plain == "adamw_torch"
    assert refused.startswith(
        "ForgeRefusal: forge_hf could not register its optimizers with transformers 99.1:"
    )
    assert "no attribute 'OptimizerNames'" in refused
