"""Half-written checkpoints are never resumed from, and the Trainer says which optimizer it trains with."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import Trainer
from transformers.utils import logging as transformers_logging

from forge_hf import ForgeRefusal
from forge_hf.hf.resume import complete_checkpoint, why_incomplete
from tests.trainer_runs import Tokens, arguments, tiny_llama, train

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "dropout": 0.1}


@pytest.fixture
def run(tmp_path):
    """A finished run with checkpoints 2, 4 and 6."""
    return train(tmp_path, "llama", "forge_adamw", **SAVING), tmp_path


def cut(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


DAMAGE = {
    "no state": (
        lambda c: (c / "trainer_state.json").unlink(),
        "no trainer_state.json, which is written last",
    ),
    "state cut": (lambda c: cut(c / "trainer_state.json"), "trainer_state.json is cut off"),
    "optimizer cut": (lambda c: cut(c / "optimizer.pt"), "optimizer.pt is cut off or no file of torch.save"),
    "no optimizer": (lambda c: (c / "optimizer.pt").unlink(), "it has no optimizer.pt"),
    "no scheduler": (lambda c: (c / "scheduler.pt").unlink(), "it has no scheduler.pt"),
    "text": (lambda c: (c / "optimizer.pt").write_text("hello"), "no file of torch.save"),
    "empty": (lambda c: [file.unlink() for file in c.iterdir()], "no trainer_state.json"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_last_complete_checkpoint_is_taken(run, kind):
    whole, folder = run
    damage, reason = DAMAGE[kind]
    damage(folder / "checkpoint-6")
    with pytest.warns(UserWarning, match=f"checkpoint-6' is left out of the resume: .*{reason}"):
        resumed = train(folder, "llama", "forge_adamw", resume=True, **SAVING)
    assert resumed.trainer.state.global_step == 6
    assert len(resumed.logged("loss")) == 6  # four of the checkpoint's history, two new ones
    assert torch.equal(resumed.end, whole.end)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_named_checkpoint_that_is_not_complete_is_refused(run, kind):
    _, folder = run
    damage, reason = DAMAGE[kind]
    damage(folder / "checkpoint-6")
    expected = (
        rf"checkpoint-6' cannot be resumed: .*{reason}.*Fix: resume from '.*checkpoint-4'; .*from_pretrained"
    )
    with pytest.raises(ForgeRefusal, match=expected):
        train(folder, "llama", "forge_adamw", resume=str(folder / "checkpoint-6"), **SAVING)


def test_nothing_to_resume_from(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    with pytest.warns(UserWarning, match="checkpoint-3' is left out"):
        assert complete_checkpoint(True, str(tmp_path)) is True
    with pytest.raises(ForgeRefusal, match="Fix: start anew"):
        complete_checkpoint(str(tmp_path / "checkpoint-3"), str(tmp_path))
    assert complete_checkpoint(None, str(tmp_path)) is None
    assert complete_checkpoint(False, str(tmp_path)) is False
    assert why_incomplete(tmp_path / "missing") == "it is no folder"
    assert complete_checkpoint(True, str(tmp_path / "missing")) is True


def test_other_optimizers_resume_as_before(tmp_path):
    train(tmp_path, "llama", "adamw_torch", **SAVING)
    (tmp_path / "checkpoint-6" / "optimizer.pt").unlink()
    resumed = train(tmp_path, "llama", "adamw_torch", resume=True, **{**SAVING, "max_steps": 7})
    assert resumed.trainer.state.global_step == 7


class OwnOptimizer(Trainer):
    """A subclass that ignores `args.optim`, as some do."""

    def create_optimizer(self, *args, **kwargs):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer


def test_a_subclass_that_ignores_optim_is_refused(tmp_path):
    model = tiny_llama()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(
        ForgeRefusal, match="optim='forge_adamw' was asked for, .* with SGD: its class .OwnOptimizer"
    ):
        train(tmp_path, "llama", "forge_adamw", model=model, trainer_cls=OwnOptimizer)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_an_optimizer_that_somebody_brings_is_theirs(tmp_path):
    model = tiny_llama()
    theirs = torch.optim.SGD(model.parameters(), lr=0.1)
    run = train(
        tmp_path,
        "llama",
        "forge_adamw",
        model=model,
        max_steps=1,
        trainer_options={"optimizers": (theirs, None)},
    )
    assert run.trainer.optimizer.optimizer is theirs


def test_the_block_at_the_start(tmp_path, caplog):
    """Through transformers' own verbosity, once per train()."""
    transformers_logging.enable_propagation()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_info()
    try:
        with caplog.at_level(logging.INFO):
            train(tmp_path, "llama", "forge_adamw", max_steps=1)
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.disable_propagation()
    # a record may come by two loggers
    records = {id(record): record.getMessage() for record in caplog.records}
    blocks = [message for message in records.values() if "***** forge_hf *****" in message]
    assert len(blocks) == 1
    assert "ForgeAdamW: update=step" in blocks[0] and "need no stored gradient" in blocks[0]


def test_memory_keys_in_the_stock_trainers_logs(tmp_path):
    run = train(tmp_path, "llama", "forge_adamw", max_steps=2)
    keys = {"forge/peak_bytes", "forge/pairs_bytes", "forge/state_bytes"}
    assert all(keys < set(entry) for entry in run.logs)
    assert min(run.logged("forge/pairs_bytes")) > 0
    quiet = train(tmp_path, "llama", "forge_adamw", max_steps=2, optim_args="log_memory=no")
    assert not any(key.startswith("forge/") for entry in quiet.logs for key in entry)
    other = train(tmp_path, "llama", "adamw_torch", max_steps=1)
    assert not any(key.startswith("forge/") for entry in other.logs for key in entry)


def test_a_second_train_has_one_callback(tmp_path):
    trainer = Trainer(
        model=tiny_llama(),
        args=arguments(str(tmp_path), "forge_adamw", max_steps=1),
        train_dataset=Tokens("llama"),
    )
    trainer.train()
    trainer.train()
    names = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    assert names.count("ForgeMemoryCallback") == 1
    assert json.dumps(trainer.state.log_history)
