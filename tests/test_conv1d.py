"""transformers' Conv1D, a linear layer with the weight (K, N), on the pair path."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import forge_hf
from forge_hf import ForgeAdamW
from forge_hf.layers import swap_class_
from tests.test_trainer_exact import MODES, assert_same
from tests.tolerances import WAY_FP32_SMALL
from tests.trainer_runs import train


class Collector:
    """A receiver that keeps the last pair."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.pair: tuple[torch.Tensor, torch.Tensor] | None = None

    def active(self) -> bool:
        return True

    def expect(self) -> None:
        pass

    def open_forward(self) -> None:
        pass

    def open_backward(self) -> None:
        pass

    def receive(self, dy: torch.Tensor, x: torch.Tensor, borrowed: bool, exchanged: bool) -> None:
        assert exchanged
        self.pair = dy, x


def tiny_gpt2() -> GPT2LMHeadModel:
    """Two layers, tied head, dropout off."""
    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (0, 7)])
@pytest.mark.parametrize("autocast", [False, True])
def test_layer(shape, autocast):
    """Output, dX and db are the stock layer's; the pair's product is dW."""
    layer = Conv1D(11, 7)
    torch.nn.init.normal_(layer.bias)
    swapped = copy.deepcopy(layer)
    collector = Collector(swapped.weight)
    swap_class_(swapped, collector)
    results = []
    for module in (layer, swapped):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = module(1.0 * x)
        y.float().square().sum().backward()
        results.append((y, x.grad, module.bias.grad))
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.allclose(ours, theirs, rtol=1e-2 if autocast else 1e-6, atol=1e-2 if autocast else 1e-6)
    assert swapped.weight.grad is None and collector.pair is not None
    dy, x = (tensor.float() for tensor in collector.pair)
    assert torch.allclose(x.t() @ dy, layer.weight.grad, rtol=1e-2, atol=5e-2 if autocast else 1e-5)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_exchanged_operands_in_the_kernels(monkeypatch, backend):
    """Ragged sizes, several steps, clipping: against torch.optim.AdamW."""
    monkeypatch.setenv("FORGE_HF_BACKEND", backend)
    torch.manual_seed(0)
    model = torch.nn.Sequential(Conv1D(37, 19), torch.nn.Tanh(), Conv1D(5, 37))
    other, start = copy.deepcopy(model), copy.deepcopy(model)
    optimizer, plain = ForgeAdamW(model, lr=1e-2), torch.optim.AdamW(other.parameters(), lr=1e-2)
    assert [e.path for e in optimizer.report() if e.name.endswith("weight")] == ["pair", "pair"]
    for step in range(3):
        x = torch.randn(9, 19, generator=torch.Generator().manual_seed(step))
        for each, stepper in ((model, optimizer), (other, plain)):
            each(x).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            stepper.step()
            stepper.zero_grad()
    away = [
        torch.cat(
            [(p - q).detach().flatten() for p, q in zip(a.parameters(), b.parameters(), strict=True)]
        ).norm()
        for a, b in ((model, other), (start, other))
    ]
    assert away[0] / away[1] < WAY_FP32_SMALL


SETTINGS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


@pytest.mark.compatibility(
    "Architectures",
    "gpt2 with a tied head, {case}",
    mode="{mode}",
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", SETTINGS)
def test_gpt2(tmp_path, case, mode):
    """The stock Trainer, weight for weight; every Conv1D and the tied table take the pair path."""
    settings = {**SETTINGS[case], **MODES[mode]}
    baseline = train(tmp_path / "torch", "llama", "adamw_torch", model=tiny_gpt2(), **settings)
    run = train(tmp_path / "forge", "llama", "forge_adamw", model=tiny_gpt2(), **settings)
    assert_same(run, baseline)
    report = run.trainer.optimizer.optimizer.report()
    paths = {entry.name: entry.path for entry in report}
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert {paths[f"transformer.h.1.{name}.weight"] for name in layers} == {"pair"}
    assert paths["transformer.wte.weight"] == "pair"


def test_lora_on_conv1d(tmp_path):
    from peft import LoraConfig, get_peft_model

    runs = []
    for optim in ("adamw_torch", "forge_adamw"):
        torch.manual_seed(2)
        config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
        model = get_peft_model(tiny_gpt2(), config)
        runs.append(train(tmp_path / optim, "llama", optim, model=model))
    assert_same(runs[1], runs[0])
    merged = runs[1].trainer.model.merge_and_unload()
    assert type(merged.transformer.h[0].attn.c_attn) is Conv1D


def test_copies_pickles_and_saved_models_are_stock(tmp_path):
    model = tiny_gpt2()
    keys = set(model.state_dict())
    ForgeAdamW(model, lr=1e-3)
    layer = model.transformer.h[0].mlp.c_fc
    assert type(layer) is not Conv1D and isinstance(layer, Conv1D)
    assert set(model.state_dict()) == keys
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied.transformer.h[0].mlp.c_fc) is Conv1D
    model.save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(again.transformer.h[0].mlp.c_fc.weight, layer.weight)
    forge_hf.detach(model)
    assert type(layer) is Conv1D


def test_an_input_that_its_owner_overwrites():
    """A leaf input may be filled anew before step(); the held pair keeps its own copy."""
    layer = Conv1D(5, 7)
    other = copy.deepcopy(layer)
    optimizer = ForgeAdamW(layer, lr=1e-2)
    x = torch.randn(3, 7)
    other(x).sum().backward()
    layer(x).sum().backward()
    x.data.zero_()
    torch.optim.AdamW(other.parameters(), lr=1e-2).step()
    optimizer.step()
    assert torch.allclose(layer.weight, other.weight, atol=1e-6)
