"""Trainer settings, callbacks and overridden methods: the run is adamw_torch's, or a refusal says why not.

Complements test_trainer_exact.py, which covers what every run uses.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import forge_hf  # noqa: F401 - registers the names where autoload is off
from forge_hf import ForgeRefusal
from tests.tolerances import WAY_FP32
from tests.trainer_runs import LENGTH, VOCABULARY, Tokens, arguments, distance, flat, tiny_roberta, train

MODES = {"step": {}, "backward": {"max_grad_norm": 0.0}}
both_modes = pytest.mark.parametrize("mode", MODES)


def assert_same_run(tmp_path: Any, mode: str, kind: str = "roberta", **settings: Any) -> Any:
    """The same run with both optimizers ends at the same weights; returns the forge run."""
    settings = {"adam_epsilon": 1e-6, "max_steps": 5, **MODES[mode], **settings}
    baseline = train(tmp_path / "torch", kind, "adamw_torch", **settings)
    run = train(tmp_path / "forge", kind, "forge_adamw", **settings)
    assert distance(run, baseline) < WAY_FP32
    return run


def refused_in_backward(mode: str, message: str) -> Any:
    """update="backward" refuses with this message; update="step" does not."""
    if mode == "step":
        return contextlib.nullcontext()
    return pytest.raises(ForgeRefusal, match=message)


@pytest.mark.compatibility("Training settings", "`neftune_noise_alpha`", mode="{mode}")
@both_modes
def test_neftune(tmp_path, mode):
    assert_same_run(tmp_path, mode, "llama", neftune_noise_alpha=5.0)


class Ragged(Tokens):
    """Sequences of 1 to LENGTH tokens."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = 1 + index % LENGTH
        row = super().__getitem__(index)
        return {key: value[:length] if value.dim() else value for key, value in row.items()}


def _pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {}
    for key, fill in (("input_ids", 1), ("attention_mask", 0), ("labels", -100)):
        columns = [row[key] for row in rows]
        batch[key] = (
            torch.nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=fill)
            if columns[0].dim()
            else torch.stack(columns)
        )
    return batch


class RaggedTrainer(Trainer):
    """Trains on sequences of different lengths."""

    def __init__(self, *args: Any, train_dataset: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, train_dataset=Ragged(train_dataset.kind), data_collator=_pad, **kwargs)


# Older transformers 5 spell it as a flag.
GROUPED = (
    {"train_sampling_strategy": "group_by_length"}
    if "train_sampling_strategy" in TrainingArguments.__dataclass_fields__
    else {"group_by_length": True}
)


@pytest.mark.compatibility(
    "Training settings", "grouped lengths, batches of {batch}, sequences of one token", mode="{mode}"
)
@both_modes
@pytest.mark.parametrize("batch", [1, 3])
def test_grouped_lengths_and_batches_of_one_token(tmp_path, mode, batch):
    run = assert_same_run(
        tmp_path,
        mode,
        trainer_cls=RaggedTrainer,
        **GROUPED,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=3,
        max_steps=8,
    )
    sampler = run.trainer._get_train_sampler(run.trainer.train_dataset)
    assert type(sampler).__name__ == "LengthGroupedSampler"


@pytest.mark.compatibility(
    "Training settings", "`load_best_model_at_end`, `eval_accumulation_steps`", mode="{mode}"
)
@both_modes
def test_evaluation_in_pieces_and_the_best_model_at_the_end(tmp_path, mode):
    run = assert_same_run(
        tmp_path,
        mode,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        eval_accumulation_steps=1,
        load_best_model_at_end=True,
        learning_rate=2e-2,
        max_steps=6,
    )
    assert run.trainer.state.best_model_checkpoint is not None


@pytest.mark.compatibility(
    "Training settings", "`Seq2SeqTrainer` that generates between steps", mode="{mode}"
)
@both_modes
def test_seq2seq_trainer_generates_between_steps(tmp_path, mode):
    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
    )
    ends, predictions = [], []
    for optim in ("adamw_torch", "forge_adamw"):
        torch.manual_seed(1)
        model = BartForConditionalGeneration(config)
        start = flat(model)
        stock = arguments(str(tmp_path), optim, max_steps=4, adam_epsilon=1e-6, **MODES[mode]).to_dict()
        shared = ("max_grad_norm", "learning_rate", "max_steps", "adam_epsilon", "seed")
        args = Seq2SeqTrainingArguments(
            output_dir=str(tmp_path),
            optim=optim,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="no",
            predict_with_generate=True,
            generation_max_length=6,
            label_smoothing_factor=0.1,
            **{key: stock[key] for key in shared},
        )
        trainer = Seq2SeqTrainer(model, args, train_dataset=Tokens("llama"), eval_dataset=Tokens("llama", 4))
        trainer.train()
        predictions.append(trainer.predict(Tokens("llama", 4)).predictions.tolist())
        ends.append(flat(model))
    assert (ends[1] - ends[0]).norm() / (ends[0] - start).norm() < WAY_FP32
    assert predictions[0] == predictions[1]


def _made(made: list[Any]) -> Any:
    model = tiny_roberta()
    made.append(weakref.ref(model))
    return model


@pytest.mark.compatibility("Training settings", "`model_init`, `train()` twice", mode="{mode}")
@both_modes
def test_model_init_and_training_twice_frees_the_first_model(tmp_path, mode):
    ends = {}
    for optim in ("adamw_torch", "forge_adamw"):
        made: list[Any] = []

        trainer = Trainer(
            args=arguments(str(tmp_path), optim, max_steps=3, **MODES[mode]),
            model_init=functools.partial(_made, made),
            train_dataset=Tokens("roberta"),
        )
        trainer.train()
        first = flat(trainer.model)
        trainer.train()
        ends[optim] = flat(trainer.model)
        assert torch.equal(first, ends[optim])
        gc.collect()
        ends[optim, "alive"] = sum(reference() is not None for reference in made)
    way = (ends["adamw_torch"] - flat(tiny_roberta())).norm()
    assert (ends["forge_adamw"] - ends["adamw_torch"]).norm() / way < WAY_FP32
    assert ends["forge_adamw", "alive"] == ends["adamw_torch", "alive"]


class At(TrainerCallback):
    """Calls `action(model, optimizer)` at one event of one step."""

    def __init__(self, event: str, step: int, action: Any) -> None:
        self.step = step
        self.action = action
        setattr(self, event, self._call)

    def _call(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.action(kwargs["model"], kwargs.get("optimizer"))


def _require_grad(value: bool) -> Any:
    return lambda model, optimizer: model.roberta.encoder.layer[0].requires_grad_(value)


@pytest.mark.compatibility("Training settings", "freezing and unfreezing at `{event}`", mode="{mode}")
@both_modes
@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_step_end"])
def test_freezing_and_unfreezing(tmp_path, mode, event):
    callbacks = [At(event, 1, _require_grad(False)), At(event, 3, _require_grad(True))]
    assert_same_run(tmp_path, mode, trainer_options={"callbacks": callbacks}, max_steps=6)


@pytest.mark.compatibility("Training settings", "a callback sets the rate at `{event}`", mode="{mode}")
@both_modes
@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_step_end"])
def test_a_callback_sets_the_rate(tmp_path, mode, event):
    def halve(model: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] /= 2

    changed_late = mode == "backward" and event == "on_pre_optimizer_step"
    refused = pytest.raises(ForgeRefusal, match=r"changed between backward\(\) and step\(\)")
    with refused if changed_late else contextlib.nullcontext():
        assert_same_run(tmp_path, mode, trainer_options={"callbacks": [At(event, 2, halve)]})


@pytest.mark.compatibility(
    "Training settings", "a callback evaluates between backward and step", mode="{mode}"
)
@both_modes
def test_a_callback_evaluates_before_the_step(tmp_path, mode):
    def evaluate(model: Any, optimizer: Any) -> None:
        with torch.no_grad():
            model.eval()(input_ids=torch.ones(1, LENGTH, dtype=torch.long))
        model.train()

    with refused_in_backward(mode, r"another forward before step\(\)"):
        callbacks = [At("on_pre_optimizer_step", 2, evaluate)]
        assert_same_run(tmp_path, mode, trainer_options={"callbacks": callbacks})


class TwoLosses(Trainer):
    """Two backward() per step, on two forwards."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        total = torch.zeros(())
        for part in (slice(0, 2), slice(2, 4)):
            loss = model(**{key: value[part] for key, value in inputs.items()}).loss / 2
            self.accelerator.backward(loss)
            total += loss.detach()
        return total


@pytest.mark.compatibility("Training settings", "several backward() per step", mode="{mode}")
@both_modes
def test_several_backwards_per_step(tmp_path, mode):
    with refused_in_backward(mode, r"update='step'"):
        assert_same_run(tmp_path, mode, trainer_cls=TwoLosses)
    if mode == "backward":
        baseline = train(tmp_path / "t", "roberta", "adamw_torch", trainer_cls=TwoLosses, max_grad_norm=0.0)
        options = {"max_grad_norm": 0.0, "optim_args": "update=step"}
        run = train(tmp_path / "f", "roberta", "forge_adamw", trainer_cls=TwoLosses, **options)
        assert distance(run, baseline) < WAY_FP32


class Penalty(Trainer):
    """A loss term on the weights of linear layers themselves."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, return_outputs, **kwargs)
        weights = [layer.output.dense.weight for layer in model.roberta.encoder.layer]
        return loss + 0.1 * sum(weight.square().sum() for weight in weights)


@pytest.mark.compatibility("Training settings", "a loss term on the weights themselves", mode="{mode}")
@both_modes
def test_a_penalty_on_linear_weights(tmp_path, mode):
    with refused_in_backward(mode, "late_gradient|arrived after its weight was already updated"):
        assert_same_run(tmp_path, mode, trainer_cls=Penalty)


class InEvalMode(Trainer):
    """Trains with dropout off."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train = lambda mode=True: model
        model.eval()
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.compatibility("Training settings", "training with the model in eval mode", mode="{mode}")
@both_modes
def test_training_in_eval_mode(tmp_path, mode):
    assert_same_run(tmp_path, mode, trainer_cls=InEvalMode, dropout=0.3, gradient_accumulation_steps=2)


class NotANumber(Trainer):
    """The loss of the third batch is NaN."""

    batches = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.batches += 1
        loss = super().compute_loss(model, inputs, return_outputs, **kwargs)
        return loss * float("nan") if self.batches == 3 else loss


@pytest.mark.compatibility("Training settings", "a NaN loss: the same weights become NaN", mode="{mode}")
@both_modes
def test_a_nan_loss_ruins_what_it_ruins_with_torch(tmp_path, mode):
    settings = {"trainer_cls": NotANumber, "max_steps": 4, **MODES[mode]}
    models = [
        train(tmp_path / o, "roberta", o, **settings).trainer.model for o in ("adamw_torch", "forge_adamw")
    ]
    for (name, theirs), ours in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        # Without clipping, the Trainer measures by clip_grad_norm_(inf), where torch multiplies rows of the
        # embeddings that have no gradient by NaN, too.
        if "embeddings" not in name or mode == "step":
            assert theirs.isnan().any(), name
            assert torch.equal(theirs.isnan(), ours.isnan()), name


@pytest.mark.compatibility("Training settings", "a callback raises, the run is resumed", mode="{mode}")
@both_modes
def test_a_callback_fails_and_the_run_is_resumed(tmp_path, mode):
    def fail(model: Any, optimizer: Any) -> None:
        raise OSError("no space left")

    saving = {"save_strategy": "steps", "save_steps": 2, "dropout": 0.1, "max_steps": 6, **MODES[mode]}
    whole = train(tmp_path / "whole", "roberta", "forge_adamw", **saving)
    for event in ("on_pre_optimizer_step", "on_step_end"):
        folder = tmp_path / event
        model, callback = tiny_roberta(0.1), At(event, 3, fail)
        trainer = Trainer(
            model,
            arguments(str(folder), "forge_adamw", **{k: v for k, v in saving.items() if k != "dropout"}),
            train_dataset=Tokens("roberta"),
            callbacks=[callback],
        )
        with pytest.raises(OSError, match="no space left"):
            trainer.train()
        callback.step = -1
        trainer.train(resume_from_checkpoint=True)
        assert torch.equal(flat(model), whole.end)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.compatibility(
    "Training settings", "`auto_find_batch_size` with an out-of-memory error in {where}", mode=""
)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_batch_size_is_halved_after_an_out_of_memory_error(tmp_path, where):
    class OutOfMemory(Trainer):
        """Runs out of memory on the second batch of more than two rows."""

        batches = 0

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            self.batches += 1
            fails = self.batches == 2 and len(inputs["input_ids"]) > 2
            if fails and where == "forward":
                model.roberta(inputs["input_ids"])
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            if not fails:
                return super().compute_loss(model, inputs, return_outputs, **kwargs)
            # The head's gradient is there when the layers below fail.
            hidden = model.roberta(inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]
            logits = model.classifier(_Fails.apply(hidden))
            return torch.nn.functional.cross_entropy(logits, inputs["labels"])

    run = assert_same_run(
        tmp_path,
        "step",
        trainer_cls=OutOfMemory,
        auto_find_batch_size=True,
        gradient_accumulation_steps=2,
        max_steps=4,
    )
    assert run.trainer._train_batch_size < 4


def test_automatic_batch_size_never_updates_in_backward(tmp_path):
    run = train(tmp_path, "roberta", "forge_adamw", auto_find_batch_size=True, max_grad_norm=0.0, max_steps=1)
    assert run.trainer.optimizer.optimizer.update_mode == "step"


@pytest.mark.compatibility("Training settings", "an average of the weights by deepcopy", mode="{mode}")
@both_modes
def test_an_average_of_the_weights_by_deepcopy(tmp_path, mode):
    averages = []

    class Average(TrainerCallback):
        """Keeps an exponential average of the model."""

        def on_train_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
        ) -> None:
            averages.append(copy.deepcopy(model))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                for mean, weight in zip(averages[-1].parameters(), kwargs["model"].parameters(), strict=True):
                    mean.lerp_(weight, 0.5)

    assert_same_run(tmp_path, mode, trainer_options={"callbacks": [Average()]})
    way = (flat(averages[0]) - flat(tiny_roberta())).norm()
    assert (flat(averages[1]) - flat(averages[0])).norm() / way < WAY_FP32
    assert all(type(module).__module__ != "forge_hf.layers" for module in averages[1].modules())


class Draws(TrainerCallback):
    """Keeps torch's random state at the end of every step."""

    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.states.append(torch.get_rng_state())


@pytest.mark.compatibility(
    "Training settings", "dropout on, `{optim}`: the same random stream", mode="{mode}"
)
@both_modes
@pytest.mark.parametrize("optim", ["forge_adamw", "forge_adamw_8bit", "galore_adamw"])
def test_no_random_numbers_of_torch_are_drawn(tmp_path, mode, optim, monkeypatch):
    """Stochastic rounding and random bases have streams of their own."""
    monkeypatch.setattr("forge_hf.state.SMALLEST_QUANTIZED", 256)
    states = []
    for name in ("adamw_torch", optim):
        draws = Draws()
        train(
            tmp_path / name, "llama", name, dropout=0.1, dtype=torch.bfloat16, max_steps=3,
            trainer_options={"callbacks": [draws]}, **MODES[mode],
        )  # fmt: skip
        states.append(draws.states)
    assert len(states[0]) == 3
    assert all(map(torch.equal, *states))


@pytest.mark.compatibility("Training settings", "`hyperparameter_search` (optuna)", mode="{mode}")
@both_modes
def test_hyperparameter_search(tmp_path, mode):
    """Every trial trains a new model from `model_init`, and ends at the same loss."""
    pytest.importorskip("optuna")
    losses = []
    for optim in ("adamw_torch", "forge_adamw"):
        args = arguments(str(tmp_path / optim), optim, eval_strategy="no", max_steps=4, **MODES[mode])
        trainer = Trainer(
            args=args, train_dataset=Tokens("roberta"), eval_dataset=Tokens("roberta", 8),
            model_init=lambda trial=None: tiny_roberta(),
        )  # fmt: skip
        seen: list[float] = []

        def objective(metrics: dict[str, float], seen: list[float] = seen) -> float:
            seen.append(metrics["eval_loss"])
            return seen[-1]

        best = trainer.hyperparameter_search(
            hp_space=lambda trial: {"learning_rate": 1e-3 * (1 + 3 * trial.number)},  # optuna draws at random
            compute_objective=objective, n_trials=2, direction="minimize", backend="optuna",
        )  # fmt: skip
        losses.append([*seen, best.objective])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
