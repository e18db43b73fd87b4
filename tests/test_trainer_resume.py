"""Resume through the stock Trainer is bit-equal; checkpoints travel between forge_adamw and adamw_torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import forge_hf  # noqa: F401
from tests.tolerances import WAY_8BIT, WAY_8BIT_LION, WAY_FP32
from tests.trainer_runs import distance, train

SAVING = {"save_strategy": "steps", "save_steps": 4, "dropout": 0.1}
MODES = {
    "step": {},
    "backward": {"max_grad_norm": 0.0},
    "lagged": {"optim_args": "update=backward,clip=lagged"},
}


def checkpoint(folder: Path) -> Path:
    return folder / "checkpoint-4"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "roberta"])
def test_resume_is_bit_equal(tmp_path, kind, mode, dtype):
    settings = {**SAVING, **MODES[mode], "dtype": dtype}
    whole = train(tmp_path / "whole", kind, "forge_adamw", **settings)
    resumed = train(
        tmp_path / "again", kind, "forge_adamw", resume=checkpoint(tmp_path / "whole"), **settings
    )
    assert torch.equal(whole.end, resumed.end)
    for left, right in zip(_state(whole), _state(resumed), strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) and left[key].dtype == right[key].dtype for key in left)


@pytest.mark.parametrize("mode", ["step", "backward"])
@pytest.mark.parametrize("optim", ["forge_adamw_8bit", "forge_lion_8bit"])
@pytest.mark.parametrize("kind", ["llama", "roberta"])
def test_8bit_runs_stay_near_and_resume_bit_equal(tmp_path, monkeypatch, kind, optim, mode):
    monkeypatch.setattr("forge_hf.state.SMALLEST_QUANTIZED", 256)
    settings = {**SAVING, **MODES[mode]}
    full = train(tmp_path / "full", kind, optim.removesuffix("_8bit"), **settings)
    whole = train(tmp_path / "whole", kind, optim, **settings)
    resumed = train(tmp_path / "again", kind, optim, resume=checkpoint(tmp_path / "whole"), **settings)
    assert torch.equal(whole.end, resumed.end)
    assert torch.int8 in {entry["exp_avg_codes"].dtype for entry in _state(whole) if "exp_avg_codes" in entry}
    for left, right in zip(_state(whole), _state(resumed), strict=True):
        assert all(torch.equal(left[key], right[key]) and left[key].dtype == right[key].dtype for key in left)
    assert 0 < distance(whole, full) < (WAY_8BIT_LION if "lion" in optim else WAY_8BIT)


def _state(run):
    states = run.trainer.optimizer.state_dict()["state"]
    return [states[key] for key in sorted(states)]


@pytest.mark.parametrize("first, second", [("adamw_torch", "forge_adamw"), ("forge_adamw", "adamw_torch")])
def test_checkpoints_travel_both_ways(tmp_path, first, second):
    baseline = train(tmp_path / "whole", "roberta", "adamw_torch", **SAVING)
    train(tmp_path / "first", "roberta", first, **SAVING)
    run = train(tmp_path / "second", "roberta", second, resume=checkpoint(tmp_path / "first"), **SAVING)
    assert distance(run, baseline) < WAY_FP32
    assert run.logged("learning_rate") == baseline.logged("learning_rate")
    cold = train(tmp_path / "cold", "roberta", second, resume=_without_moments(tmp_path / "first"), **SAVING)
    assert distance(cold, baseline) > 10 * WAY_FP32, "the comparison must notice lost moments"


def _without_moments(folder: Path) -> Path:
    path = checkpoint(folder) / "optimizer.pt"
    state = torch.load(path, weights_only=True)
    for entry in state["state"].values():
        entry["exp_avg"].zero_()
        entry["exp_avg_sq"].zero_()
    torch.save(state, path)
    return checkpoint(folder)


def test_checkpoint_is_plain(tmp_path):
    run = train(tmp_path, "llama", "forge_adamw", **SAVING)
    state = torch.load(checkpoint(tmp_path) / "optimizer.pt", weights_only=True)
    assert {key for entry in state["state"].values() for key in entry} == {"step", "exp_avg", "exp_avg_sq"}
    assert all(entry["step"] == 4 for entry in state["state"].values())
    stock = type(run.trainer.model).from_pretrained(checkpoint(tmp_path))
    assert all(type(module).__module__ != "forge_hf.layers" for module in stock.modules())


def test_training_again_continues_with_the_same_optimizer(tmp_path):
    from tests.trainer_runs import Tokens, Trainer, arguments, flat, tiny_roberta

    ends = {}
    for optim in ("adamw_torch", "forge_adamw"):
        trainer = Trainer(tiny_roberta(), arguments(str(tmp_path), optim), train_dataset=Tokens("roberta"))
        trainer.train()
        trainer.train()
        ends[optim] = flat(trainer.model)
    start = flat(tiny_roberta())
    way = (ends["adamw_torch"] - start).norm()
    assert (ends["forge_adamw"] - ends["adamw_torch"]).norm() / way < WAY_FP32


@pytest.mark.parametrize("second", ["forge_adamw", "adamw_torch"])
def test_second_trainer_takes_over(tmp_path, second):
    from tests.trainer_runs import Tokens, Trainer, arguments, flat, tiny_roberta

    ends = {}
    for pair in (("adamw_torch", "adamw_torch"), ("forge_adamw", second)):
        model = tiny_roberta()
        trainers = [
            Trainer(model, arguments(str(tmp_path), optim), train_dataset=Tokens("roberta")) for optim in pair
        ]
        for trainer in trainers:
            trainer.train()
        ends[pair] = flat(model)
    first, other = ends.values()
    assert (other - first).norm() / (first - flat(tiny_roberta())).norm() < WAY_FP32
    if second == "forge_adamw":
        with pytest.raises(forge_hf.ForgeRefusal, match="no longer owns"):
            trainers[0].optimizer.step()
