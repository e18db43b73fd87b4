"""`nonfinite`: what step() does with gradients that are NaN or infinite."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import forge_hf
from forge_hf import ForgeAdamW, ForgeConfigError, ForgeGaLoreAdamW, ForgeRefusal, ForgeSGD
from tests.models import EVERY_MODEL, Mlp, TiedEmbedding, batch, build
from tests.trainer_runs import Tokens, arguments, tiny_llama


def backward(model: torch.nn.Module, seed: int, factor: float = 1.0) -> None:
    dtype = next(model.parameters()).dtype
    x, y = batch(seed, dtype)
    ((model(x) - y).square().mean() * factor).backward()


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of all weights and all tensors of the state."""
    states = [v for p in model.parameters() for v in optimizer.state.get(p, {}).values()]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *states]]


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("options", [{}, {"state": "8bit"}, {"weight_bits": 32}])
@pytest.mark.parametrize("kind", [Mlp, TiedEmbedding])
def test_skip_leaves_everything_bitwise_untouched(kind, options, clip):
    dtype = torch.bfloat16 if options.get("weight_bits") else torch.float32
    model = build(kind, dtype=dtype)
    optimizer = ForgeAdamW(model, nonfinite="skip", **options)
    other = build(kind, dtype=dtype)
    plain = ForgeAdamW(other, **options)
    for seed, factor in enumerate((1.0, float("nan"), 1.0, float("inf"), 1.0)):
        before = everything(model, optimizer)
        backward(model, seed, factor)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if factor != 1.0:
            assert same(before, everything(model, optimizer))
            assert optimizer.pending_bytes() == 0 and all(p.grad is None for p in model.parameters())
            continue
        optimizer.zero_grad()
        backward(other, seed)
        if clip:
            torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
    assert optimizer.skipped_steps == 2
    assert same(everything(model, optimizer), everything(other, plain))


@pytest.mark.parametrize("kind", EVERY_MODEL)
def test_one_bad_gradient_is_enough(kind):
    """Of a bias alone, or of a pair alone."""
    for name in ("first.bias", "first.weight"):
        model = build(kind)
        optimizer = ForgeAdamW(model, nonfinite="skip")
        backward(model, 0)
        if name == "first.bias":
            model.first.bias.grad[1] = float("inf")
        else:
            optimizer.tape.slots[0].gradient.add_dense(torch.full_like(model.first.weight, float("nan")))
        before = copy.deepcopy(model.state_dict())
        optimizer.step()
        assert optimizer.skipped_steps == 1
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_raise_names_the_parameters_and_drops_the_gradients():
    model = build()
    optimizer = ForgeAdamW(model, nonfinite="raise")
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    before = everything(model, optimizer)
    backward(model, 1)
    model.head.bias.grad[0] = float("nan")
    with pytest.raises(
        ForgeRefusal, match=r"norm of the gradients is nan; not finite are those of 'head.bias'\."
    ):
        optimizer.step()
    backward(model, 1, float("nan"))
    with pytest.raises(ForgeRefusal, match=r"'first.weight', 'first.bias', 'middle.weight' and 4 more\."):
        optimizer.step()
    assert same(before, everything(model, optimizer)) and optimizer.pending_bytes() == 0
    backward(model, 2)
    optimizer.step()
    assert not same(before, everything(model, optimizer))


def test_propagate_is_torchs():
    model = build()
    optimizer = ForgeAdamW(model)
    backward(model, 0, float("nan"))
    optimizer.step()
    assert torch.isnan(model.first.weight).all() and optimizer.skipped_steps == 0


def test_the_count_survives_a_checkpoint():
    model = build()
    optimizer = ForgeSGD(model, nonfinite="skip", momentum=0.9)
    backward(model, 0, float("nan"))
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = ForgeSGD(build(), nonfinite="skip", momentum=0.9)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.skipped_steps == 1


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_not_in_backward(nonfinite, tmp_path):
    message = f"nonfinite='{nonfinite}' needs update='step'"
    with pytest.raises(ForgeConfigError, match=message):
        ForgeAdamW(build(), update="backward", nonfinite=nonfinite)
    with pytest.raises(ForgeConfigError, match="did you mean 'skip'"):
        ForgeAdamW(build(), nonfinite="skipp")
    with pytest.raises(ForgeConfigError, match="measure_norm=False gives up"):
        ForgeGaLoreAdamW(build(), nonfinite=nonfinite, measure_norm=False)


def test_galore_skips_the_new_basis_too():
    model = build()
    optimizer = ForgeGaLoreAdamW(model, rank=2, update_proj_gap=2, nonfinite="skip")
    for seed in range(2):
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()
    before = everything(model, optimizer)
    with pytest.warns(UserWarning, match="not finite when a new GaLore basis was due"):
        backward(model, 2, float("nan"))
    optimizer.step()
    assert optimizer.skipped_steps == 1 and same(before, everything(model, optimizer))


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_in_the_trainer(tmp_path, max_grad_norm):
    """The run is the run without the bad step, but for the schedule; the logs count it."""
    from transformers import Trainer

    class NanOnce(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            factor = float("nan") if self.state.global_step == 2 else 1.0
            return (loss[0] * factor, *loss[1:]) if isinstance(loss, tuple) else loss * factor

    args = arguments(
        str(tmp_path), "forge_adamw", optim_args="nonfinite=skip", max_steps=5, max_grad_norm=max_grad_norm
    )
    trainer = NanOnce(
        model=tiny_llama(),
        args=args,
        train_dataset=Tokens("llama"),
        callbacks=[forge_hf.ForgeMemoryCallback()],
    )
    trainer.train()
    assert trainer.optimizer.optimizer.skipped_steps == 1
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    counts = [entry["forge/skipped_steps"] for entry in trainer.state.log_history if "loss" in entry]
    assert counts == [0, 0, 1, 1, 1]
