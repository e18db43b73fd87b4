"""ForgeTrainer and the memory line: what they add to the stock Trainer, and that they add nothing else."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import Trainer, TrainerCallback

from forge_hf import ForgeAdamW, ForgeConfigError, ForgeLion, ForgeMemoryCallback, ForgeTrainer
from forge_hf.hf.memory import peak_bytes

from .tolerances import WAY_FP32
from .trainer_runs import Tokens, arguments, distance, tiny_roberta, train

MEMORY_KEYS = {"forge/peak_bytes", "forge/pairs_bytes", "forge/state_bytes"}


def forge_trainer(folder, optim="forge_adamw", **options) -> ForgeTrainer:
    return ForgeTrainer(
        model=tiny_roberta(),
        args=arguments(str(folder), optim, max_steps=2),
        train_dataset=Tokens("roberta"),
        **options,
    )


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_torchs_adamw_becomes_forge_adamw_on_a_copy(optim, tmp_path, caplog):
    args = arguments(str(tmp_path), optim, max_steps=2)
    with caplog.at_level(logging.INFO, logger="forge_hf"):
        trainer = ForgeTrainer(model=tiny_roberta(), args=args, train_dataset=Tokens("roberta"))
    trainer.train()
    assert type(trainer.optimizer.optimizer) is ForgeAdamW
    assert trainer.args.optim.value == "forge_adamw" and args.optim.value == optim
    replaced = [record.getMessage() for record in caplog.records if "is replaced by" in record.getMessage()]
    assert replaced == [f"ForgeTrainer: optim='{optim}' is replaced by 'forge_adamw'."]


def test_our_names_are_kept(tmp_path):
    args = arguments(str(tmp_path), "forge_lion", max_steps=1)
    trainer = ForgeTrainer(model=tiny_roberta(), args=args, train_dataset=Tokens("roberta"))
    trainer.train()
    assert trainer.args is args
    assert type(trainer.optimizer.optimizer) is ForgeLion


def test_other_optimizers_are_errors_that_name_the_valid_ones(tmp_path):
    with pytest.raises(ForgeConfigError) as error:
        forge_trainer(tmp_path, "adafactor")
    assert str(error.value) == (
        "ForgeTrainer cannot train with optim='adafactor'. "
        "Valid: forge_adamw, forge_adamw_8bit, forge_lion, forge_lion_8bit, forge_sgd, galore_adamw, "
        "galore_adamw_8bit, galore_adamw_layerwise, galore_adamw_8bit_layerwise, adamw_torch, "
        "adamw_torch_fused."
    )
    model = tiny_roberta()
    foreign = torch.optim.SGD(model.parameters(), lr=0.1)
    for options in (
        {"optimizers": (foreign, None)},
        {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})},
    ):
        with pytest.raises(ForgeConfigError, match="ForgeTrainer trains with a forge optimizer"):
            ForgeTrainer(
                model=model,
                args=arguments(str(tmp_path), "adamw_torch"),
                train_dataset=Tokens("roberta"),
                **options,
            )


def test_a_forge_optimizer_of_ones_own_is_used(tmp_path):
    model = tiny_roberta()
    optimizer = ForgeLion(model, lr=1e-4)
    args = arguments(str(tmp_path), "adamw_torch", max_steps=1)
    trainer = ForgeTrainer(
        model=model, args=args, train_dataset=Tokens("roberta"), optimizers=(optimizer, None)
    )
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer and trainer.args is args


def test_explain_before_and_after_training(tmp_path):
    trainer = forge_trainer(tmp_path)
    before = trainer.explain()
    trainer.train()
    assert trainer.explain() == before == trainer.optimizer.optimizer.explain()
    assert before.startswith("ForgeAdamW: update=step, clip=exact")
    assert "pair   roberta.encoder.layer.*.attention.self.query.weight x2 [32, 32]: linear layer" in before


def test_forge_trainer_and_stock_trainer_train_alike(tmp_path):
    """Anything ForgeTrainer can do, the stock Trainer does too, its memory line included."""
    ours = train(tmp_path, "roberta", "adamw_torch", trainer_cls=ForgeTrainer, max_steps=4)
    stock = train(
        tmp_path,
        "roberta",
        "forge_adamw",
        max_steps=4,
        trainer_options={"callbacks": [ForgeMemoryCallback()]},
    )
    baseline = train(tmp_path, "roberta", "adamw_torch", max_steps=4)
    assert torch.equal(ours.end, stock.end)
    assert distance(ours, baseline) < WAY_FP32
    for run in (ours, stock):
        assert all(entry.keys() >= MEMORY_KEYS for entry in run.logs)
    for key in ("loss", "grad_norm", "learning_rate", "forge/pairs_bytes", "forge/state_bytes"):
        assert ours.logged(key) == stock.logged(key), key
    assert [entry.keys() & MEMORY_KEYS for entry in baseline.logs] == [set()] * 4


class Seen(TrainerCallback):
    """Keeps what reporters get."""

    def __init__(self) -> None:
        self.logs: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def test_memory_line_holds_the_true_bytes(tmp_path):
    seen = Seen()
    trainer = forge_trainer(tmp_path, callbacks=[seen])
    pending: list[int] = []

    class Pending(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            pending.append(optimizer.optimizer.pending_bytes())

    trainer.add_callback(Pending())
    trainer.args.logging_steps = 2
    trainer.args.max_steps = 4
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["forge/pairs_bytes"] for entry in steps] == [max(pending[:2]), max(pending[2:])]
    assert min(pending) > 0
    # Two fp32 moments per weight and one fp32 step counter per parameter.
    parameters = list(trainer.model.parameters())
    state_bytes = sum(8 * parameter.numel() + 4 for parameter in parameters)
    assert [entry["forge/state_bytes"] for entry in steps] == [state_bytes] * 2
    assert all(0 < entry["forge/peak_bytes"] <= peak_bytes() for entry in steps)
    reported = [entry for entry in seen.logs if "loss" in entry]
    assert [{key: entry[key] for key in MEMORY_KEYS} for entry in reported] == [
        {key: entry[key] for key in MEMORY_KEYS} for entry in steps
    ]


def test_update_backward_holds_no_pairs_between_backward_and_step(tmp_path):
    run = train(tmp_path, "roberta", "adamw_torch", trainer_cls=ForgeTrainer, max_steps=2, max_grad_norm=0)
    assert run.trainer.optimizer.optimizer.update_mode == "backward"
    assert run.logged("forge/pairs_bytes") == [0, 0]


def test_evaluation_metrics_and_summary_stay_as_they_are(tmp_path):
    ours = train(
        tmp_path,
        "roberta",
        "adamw_torch",
        trainer_cls=ForgeTrainer,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
    )
    assert len(ours.evaluations) == 2
    assert all(entry.keys() & MEMORY_KEYS == set() for entry in ours.evaluations)
    assert ours.trainer.evaluate().keys() & MEMORY_KEYS == set()
    assert ours.trainer.state.log_history[-1].keys() & MEMORY_KEYS == set()


def test_the_callback_measures_other_optimizers_too(tmp_path):
    run = train(
        tmp_path,
        "roberta",
        "adamw_torch",
        max_steps=1,
        trainer_options={"callbacks": [ForgeMemoryCallback()]},
    )
    parameters = list(run.trainer.model.parameters())
    assert run.logged("forge/pairs_bytes") == [0]
    assert run.logged("forge/state_bytes") == [sum(8 * parameter.numel() + 4 for parameter in parameters)]
    assert run.logs[0]["forge/peak_bytes"] > 2**20


def test_a_callback_given_by_the_user_is_not_doubled(tmp_path):
    mine = ForgeMemoryCallback()
    trainer = forge_trainer(tmp_path, callbacks=[mine])
    callbacks = trainer.callback_handler.callbacks
    assert [callback for callback in callbacks if isinstance(callback, ForgeMemoryCallback)] == [mine]
    assert isinstance(forge_trainer(tmp_path).callback_handler.callbacks[0], ForgeMemoryCallback)


def test_it_is_a_trainer_with_the_trainers_own_arguments(tmp_path):
    assert issubclass(ForgeTrainer, Trainer)
    trainer = ForgeTrainer(
        tiny_roberta(), arguments(str(tmp_path), "forge_adamw", max_steps=1), None, Tokens("roberta")
    )
    assert trainer.train().global_step == 1
