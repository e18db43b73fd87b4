"""Whole runs of forge_adamw equal those of adamw_torch through the stock Trainer, weight for weight."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer
from transformers.trainer_utils import SchedulerType

import forge_hf  # noqa: F401 - registers the names where autoload is off
from tests.tolerances import GRAD_NORM, NORM_AUTOCAST, WAY_AUTOCAST, WAY_FP32
from tests.trainer_runs import distance, train

MODES = {"step": {}, "backward": {"max_grad_norm": 0.0}}


def both(tmp_path, kind, **settings):
    """The same run with adamw_torch and forge_adamw."""
    baseline = train(tmp_path / "torch", kind, "adamw_torch", **settings)
    return train(tmp_path / "forge", kind, "forge_adamw", **settings), baseline


# transformers 5.0 logs the norm only when it clips.
LOGS_UNCLIPPED_NORM = hasattr(Trainer, "_get_grad_norm")


def assert_same(run, baseline, tolerance=WAY_FP32, norms=GRAD_NORM):
    """End points, logged rates and logged gradient norms agree."""
    assert distance(run, baseline) < tolerance
    assert run.logged("learning_rate") == baseline.logged("learning_rate")
    if LOGS_UNCLIPPED_NORM or all(each.trainer.args.max_grad_norm for each in (run, baseline)):
        assert run.logged("grad_norm") == pytest.approx(baseline.logged("grad_norm"), rel=norms)
        assert min(run.logged("grad_norm")) > 0


@pytest.mark.compatibility("Training settings", "{kind}: `max_grad_norm={max_grad_norm}`", mode="")
@pytest.mark.parametrize("kind", ["llama", "roberta"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-3, 1.0])
def test_clipping(tmp_path, kind, max_grad_norm):
    run, baseline = both(tmp_path, kind, max_grad_norm=max_grad_norm)
    assert_same(run, baseline)
    assert run.trainer.optimizer.optimizer.update_mode == ("step" if max_grad_norm else "backward")


@pytest.mark.compatibility(
    "Training settings", "{kind}: accumulation of 4 with a last group of 2", mode="{mode}"
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "roberta"])
def test_accumulation_with_an_incomplete_last_group(tmp_path, kind, mode):
    # 10 batches an epoch in groups of 4 leave a last group of 2.
    settings = {"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 2, **MODES[mode]}
    assert_same(*both(tmp_path, kind, **settings))


SCHEDULES = {
    SchedulerType.POLYNOMIAL: {"lr_end": 1e-5, "power": 2.0},
    SchedulerType.COSINE_WITH_RESTARTS: {"num_cycles": 2},
    SchedulerType.COSINE_WITH_MIN_LR: {"min_lr": 1e-5},
    SchedulerType.REDUCE_ON_PLATEAU: {"patience": 0},
}
SCHEDULES.update(
    {
        SchedulerType[name]: extra
        for name, extra in {
            "COSINE_WARMUP_WITH_MIN_LR": {"min_lr": 1e-5},
            "WARMUP_STABLE_DECAY": {"num_decay_steps": 3},
        }.items()
        if name in SchedulerType.__members__
    }
)


@pytest.mark.compatibility("Training settings", "`lr_scheduler_type={schedule}` with warm-up", mode="")
@pytest.mark.parametrize("schedule", [schedule for schedule in SchedulerType if schedule.value != "greedy"])
def test_every_scheduler_with_warmup(tmp_path, schedule):
    settings = {
        "lr_scheduler_type": schedule,
        "warmup_steps": 3,
        "lr_scheduler_kwargs": SCHEDULES.get(schedule, {}),
    }
    if schedule is SchedulerType.REDUCE_ON_PLATEAU:
        settings.update(
            eval_strategy="steps", eval_steps=2, save_strategy="no", metric_for_best_model="eval_loss"
        )
    run, baseline = both(tmp_path, "roberta", **settings)
    assert_same(run, baseline)
    if schedule is not SchedulerType.CONSTANT:
        assert len(set(run.logged("learning_rate"))) > 1


@pytest.mark.compatibility("Training settings", "{kind}: decay groups, betas, eps", mode="{mode}")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "roberta"])
def test_weight_decay_in_groups_betas_and_eps(tmp_path, kind, mode):
    settings = {
        "weight_decay": 0.5,
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-4,
        **MODES[mode],
    }
    run, baseline = both(tmp_path, kind, **settings)
    assert_same(run, baseline)
    assert [group["weight_decay"] for group in run.trainer.optimizer.param_groups] == [0.5, 0.0]
    undecayed = train(tmp_path / "plain", kind, "adamw_torch", **{**settings, "weight_decay": 0.0})
    assert distance(undecayed, baseline) > 10 * WAY_FP32


@pytest.mark.compatibility(
    "Training settings", "{kind}: gradient checkpointing, `use_reentrant={reentrant}`", mode="{mode}"
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["llama", "roberta"])
def test_gradient_checkpointing(tmp_path, kind, reentrant, mode):
    settings = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
        "dropout": 0.1,
        **MODES[mode],
    }
    assert_same(*both(tmp_path, kind, **settings))


@pytest.mark.compatibility("Training settings", "label smoothing and dropout", mode="{mode}")
@pytest.mark.parametrize("mode", MODES)
def test_label_smoothing_and_dropout(tmp_path, mode):
    run, baseline = both(tmp_path, "roberta", label_smoothing_factor=0.2, dropout=0.1, **MODES[mode])
    assert_same(run, baseline)
    plain = train(tmp_path / "plain", "roberta", "adamw_torch", dropout=0.1, **MODES[mode])
    assert distance(plain, baseline) > 10 * WAY_FP32


def scaled_loss(outputs, labels, num_items_in_batch=None):
    """A loss of the user's own."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    return torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.3) * 3.0


@pytest.mark.compatibility("Training settings", "`compute_loss_func`", mode="{mode}")
@pytest.mark.parametrize("mode", MODES)
def test_compute_loss_func(tmp_path, mode):
    options = {
        "trainer_options": {"compute_loss_func": scaled_loss},
        "gradient_accumulation_steps": 2,
        **MODES[mode],
    }
    assert_same(*both(tmp_path, "roberta", **options))


@pytest.mark.compatibility("Training settings", "evaluation between steps", mode="{mode}")
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_between_steps(tmp_path, mode):
    run, baseline = both(tmp_path, "llama", eval_strategy="steps", eval_steps=1, dropout=0.1, **MODES[mode])
    assert_same(run, baseline)
    assert len(run.evaluations) == 8
    losses = [entry["eval_loss"] for entry in run.evaluations]
    assert losses == pytest.approx([entry["eval_loss"] for entry in baseline.evaluations], rel=1e-4)


@pytest.mark.compatibility(
    "Training settings", "{kind}: `bf16=True` (adamw_torch rounds gradients to bf16)", mode="{mode}"
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "roberta"])
def test_bf16_autocast(tmp_path, kind, mode):
    # adamw_torch rounds each weight gradient to bf16 here; forge_adamw keeps it in fp32.
    run, baseline = both(tmp_path, kind, bf16=True, **MODES[mode])
    assert_same(run, baseline, WAY_AUTOCAST, norms=NORM_AUTOCAST)


@pytest.mark.compatibility(
    "Training settings",
    "{kind}: bf16 weights: nearer to the fp32 run than adamw_torch; distances to that run",
    mode="{mode}",
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "roberta"])
def test_pure_bf16_is_closer_to_fp32_than_torch(tmp_path, kind, mode):
    settings = {"learning_rate": 1e-4, "max_steps": 60, **MODES[mode]}
    exact = train(tmp_path / "fp32", kind, "adamw_torch", **settings)
    run, baseline = both(tmp_path, kind, dtype=torch.bfloat16, **settings)
    assert run.logged("learning_rate") == baseline.logged("learning_rate")
    # The bf16 runs start from rounded weights, so the ways are compared, not the end points.
    way = exact.end - exact.start
    ours, torchs = (end.end - end.start for end in (run, baseline))
    assert (ours - way).norm() <= (torchs - way).norm()
    progress = [float(vector.dot(way) / way.norm() ** 2) for vector in (ours, torchs)]
    assert progress[0] == pytest.approx(1.0, abs=WAY_AUTOCAST), (
        "stochastic rounding keeps the mean of the updates"
    )
    assert progress[1] < 0.8, "nearest rounding loses updates; if it does not, this run tests nothing"


@pytest.mark.parametrize("optim", ["forge_lion", "forge_sgd"])
def test_lion_and_sgd_modes_agree(tmp_path, optim):
    settings = {"optim_args": "momentum=0.9"} if optim == "forge_sgd" else {}
    baseline = train(tmp_path / "b", "roberta", optim, max_grad_norm=0.0, **settings)
    run = train(tmp_path / "s", "roberta", optim, max_grad_norm=1e9, **settings)
    assert_same(run, baseline)


@pytest.mark.compatibility("Training settings", "`forge_sgd` against `sgd`", mode="")
def test_sgd_is_the_trainers_sgd(tmp_path):
    baseline = train(tmp_path / "t", "roberta", "sgd", weight_decay=0.1)
    assert_same(train(tmp_path / "f", "roberta", "forge_sgd", weight_decay=0.1), baseline)
