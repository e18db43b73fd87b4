"""What only a GPU can show: the fp16 scaler in the Trainer, and the Triton kernels under whole runs."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainerCallback

import forge_hf  # noqa: F401 - registers the names where autoload is off
from forge_hf.dispatch import backend_name
from tests.tolerances import GRAD_NORM, WAY_AUTOCAST, WAY_FP32
from tests.trainer_runs import distance, tiny_llama, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("kind", ["llama", "roberta"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_fp16_scaler(tmp_path, kind, clip):
    # The scaler starts at 2**16, which overflows in the first steps of these models: skipped steps are part
    # of the test.
    settings = {"fp16": True, "max_grad_norm": clip, "max_steps": 24, "lr_scheduler_type": "constant"}
    baseline = train(tmp_path / "torch", kind, "adamw_torch", **settings)
    run = train(tmp_path / "forge", kind, "forge_adamw", **settings)
    assert run.trainer.optimizer.optimizer.update_mode == "step"
    assert run.trainer.accelerator.scaler.get_scale() == baseline.trainer.accelerator.scaler.get_scale()
    assert distance(run, baseline) < WAY_AUTOCAST
    for ours, theirs in zip(run.logged("grad_norm"), baseline.logged("grad_norm"), strict=True):
        assert ours == pytest.approx(theirs, rel=GRAD_NORM, nan_ok=True)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_backends_give_the_same_run(tmp_path, backend, monkeypatch):
    baseline = train(tmp_path / "torch", "llama", "adamw_torch")
    monkeypatch.setenv("FORGE_HF_BACKEND", backend)
    run = train(tmp_path / "forge", "llama", "forge_adamw")
    assert backend_name(run.trainer.model.lm_head.weight) == backend
    assert distance(run, baseline) < WAY_FP32


@pytest.mark.parametrize("optim", ["forge_adamw", "galore_adamw"])
def test_a_forced_overflow_skips_one_step(tmp_path, optim):
    """A loss beyond fp16 in the third step: weights and schedule stay, and training goes on."""

    class Overflow(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss * (1e30 if self.state.global_step == 2 else 1.0)

    class Watch(TrainerCallback):
        def __init__(self):
            self.weights, self.rates = [], []

        def on_step_end(self, args, state, control, model=None, lr_scheduler=None, **kwargs):
            self.weights.append(torch.cat([p.detach().flatten().cpu() for p in model.parameters()]))
            self.rates.append(lr_scheduler.get_last_lr()[0])

    watch = Watch()
    train(
        tmp_path, "llama", optim, trainer_cls=Overflow, fp16=True, max_steps=6,
        trainer_options={"callbacks": [watch]},
    )  # fmt: skip
    same = [torch.equal(a, b) for a, b in zip(watch.weights[:-1], watch.weights[1:], strict=True)]
    assert same[1] and not same[3]
    assert watch.rates[2] == watch.rates[1]
    assert all(bool(weights.isfinite().all()) for weights in watch.weights)


def test_liger_kernels(tmp_path):
    """Fused losses and norms: heads whose gradient is computed in the forward leave the pair path."""
    pytest.importorskip("liger_kernel")
    baseline = train(tmp_path / "torch", "llama", "adamw_torch", use_liger_kernel=True)
    run = train(tmp_path / "forge", "llama", "forge_adamw", use_liger_kernel=True)
    assert distance(run, baseline) < WAY_AUTOCAST


def test_qlora(tmp_path):
    """LoRA over a 4-bit base: only the adapters have state, and the base never moves."""
    pytest.importorskip("bitsandbytes")
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    tiny_llama(dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    runs = []
    for optim in ("adamw_torch", "forge_adamw"):
        quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
        model = LlamaForCausalLM.from_pretrained(tmp_path / "base", quantization_config=quantized)
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(prepare_model_for_kbit_training(model), config)
        frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
        runs.append(train(tmp_path / optim, "llama", optim, model=model, bf16=True))
        assert all(torch.equal(p, model.get_parameter(name)) for name, p in frozen.items())
    assert distance(runs[1], runs[0]) < WAY_AUTOCAST
    optimizer = runs[1].trainer.optimizer.optimizer
    assert all(p.requires_grad for p, state in optimizer.state.items() if state)


@pytest.mark.parametrize("optim", ["galore_adamw", "galore_adamw_8bit"])
def test_galore_on_the_kernels_is_galore_in_plain_torch(tmp_path, optim, monkeypatch):
    runs = []
    for backend in ("reference", "triton"):
        monkeypatch.setenv("FORGE_HF_BACKEND", backend)
        options = "rank=8,update_proj_gap=3,subspace=svd"
        runs.append(train(tmp_path / backend, "llama", optim, optim_args=options))
    assert distance(runs[1], runs[0]) < (WAY_FP32 if optim == "galore_adamw" else WAY_AUTOCAST)
