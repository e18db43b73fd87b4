"""GPT-2, whose layers are Conv1D, in whole runs; and what it is saved, copied and pushed as."""

from __future__ import annotations

import copy
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback
from transformers.pytorch_utils import Conv1D

import forge_hf
from forge_hf import ForgeAdamW
from tests.test_trainer_exact import MODES, assert_same
from tests.tolerances import GRAD_NORM
from tests.trainer_runs import train


def tiny_gpt2() -> GPT2LMHeadModel:
    """Two layers, tied head, dropout off."""
    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


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


def pushed_files(model, monkeypatch, directory) -> list[Path]:
    """What `push_to_hub` would upload."""
    hub = transformers.utils.hub
    repository = SimpleNamespace(repo_id="me/tiny")
    # By one of the two names, depending on the release.
    monkeypatch.setattr(hub, "create_repo", lambda *_, **__: repository, raising=False)
    api = SimpleNamespace(create_repo=lambda *_, **__: repository)
    monkeypatch.setattr(hub, "hf_api", lambda: api, raising=False)
    card = SimpleNamespace(save=lambda path: None)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: card)
    upload = lambda self, source, *_, **__: shutil.copytree(source, directory)  # noqa: E731
    monkeypatch.setattr(hub.PushToHubMixin, "_upload_modified_files", upload)
    model.push_to_hub("me/tiny")
    return sorted(directory.iterdir())


def test_what_is_pushed_is_stock(tmp_path, monkeypatch):
    """Byte for byte what a model without an optimizer pushes, in the middle of a step."""
    model = tiny_gpt2()
    plain = copy.deepcopy(model)
    optimizer = ForgeAdamW(model, lr=1e-3)
    ids = torch.arange(12).reshape(1, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    assert optimizer.pending_bytes() > 0
    ours = pushed_files(model, monkeypatch, tmp_path / "ours")
    theirs = pushed_files(plain, monkeypatch, tmp_path / "theirs")
    assert [file.name for file in ours] == [file.name for file in theirs]
    assert {"config.json", "model.safetensors"} <= {file.name for file in ours}
    assert [file.read_bytes() for file in ours] == [file.read_bytes() for file in theirs]


class HooksInTheMiddle(TrainerCallback):
    """Registers post-accumulate hooks between two micro-batches of the third step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def halve(self, parameter):
        self.norms.append(float(parameter.grad.norm()))
        parameter.grad.mul_(0.5)

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2 and not self.norms:
            for name in ("transformer.h.0.mlp.c_fc.weight", "transformer.wte.weight"):
                model.get_parameter(name).register_post_accumulate_grad_hook(self.halve)


@pytest.mark.parametrize("mode", MODES)
def test_hooks_that_a_callback_registers(tmp_path, mode):
    """Of a Conv1D and of the tied table, which hold a micro-batch's factors by then."""
    runs, norms = [], []
    for optim in ("adamw_torch", "forge_adamw"):
        callback = HooksInTheMiddle()
        options = {
            "trainer_options": {"callbacks": [callback]},
            "gradient_accumulation_steps": 2,
            "max_steps": 5,
        }
        runs.append(train(tmp_path / optim, "llama", optim, model=tiny_gpt2(), **options, **MODES[mode]))
        norms.append(callback.norms)
    assert len(norms[0]) == 2 * 5
    assert norms[1] == pytest.approx(norms[0], rel=GRAD_NORM)
    assert_same(runs[1], runs[0])


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
