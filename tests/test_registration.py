"""Our names in TrainingArguments and the Trainer, and what happens in a transformers that we do not know."""

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

from forge_hf import ForgeAdamW, ForgeLion, ForgeRefusal, ForgeSGD
from forge_hf.config import REFUSALS
from forge_hf.hf import registration

from .subprocesses import python
from .trainer_runs import arguments, train

NAMES = {"forge_adamw": ForgeAdamW, "forge_lion": ForgeLion, "forge_sgd": ForgeSGD}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_ordinary_members(name):
    args = arguments("unused", name)
    member = OptimizerNames[name.upper()]
    assert args.optim is member is OptimizerNames(name) is getattr(OptimizerNames, name.upper())
    assert member == name and member.value == name and member in list(OptimizerNames)
    assert pickle.loads(pickle.dumps(args)).optim is member
    assert copy.deepcopy(args).optim is member
    assert args.to_dict()["optim"] == name and json.loads(args.to_json_string())["optim"] == name
    assert Trainer.get_optimizer_cls_and_kwargs(args, torch.nn.Linear(2, 2))[0] is NAMES[name]


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
    cls, keywords = Trainer.get_optimizer_cls_and_kwargs(arguments("unused", "adamw_torch"))
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
