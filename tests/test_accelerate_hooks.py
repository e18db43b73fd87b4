"""What accelerate is told: accumulation, hand-over of weights to another optimizer, refusals."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType

import forge_hf
from forge_hf import ForgeAdamW, ForgeRefusal
from forge_hf.config import REFUSALS
from forge_hf.hf import accelerate as hooks

from .trainer_runs import Tokens, flat, tiny_roberta


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """accelerate's state is shared by the whole process; every test leaves none behind."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def rows(size: int = 4) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Tokens("roberta", 16), batch_size=size)


SETTINGS = {"lr": 2e-3, "weight_decay": 0.01}


def test_probe_follows_accelerate_and_does_without_it(monkeypatch):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert hooks.last_micro_batch() is True
    accelerator.gradient_state._set_sync_gradients(False)
    assert hooks.last_micro_batch() is False
    monkeypatch.setitem(sys.modules, "accelerate.state", ModuleType("accelerate.state"))
    assert hooks.last_micro_batch() is True
    monkeypatch.delitem(sys.modules, "accelerate.state")
    assert hooks.last_micro_batch() is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_preparing_keeps_state_and_its_dtype(dtype):
    """accelerate's wrapper sends the state through load_state_dict, where torch's version would cast it."""
    model = tiny_roberta(dtype=dtype)
    optimizer = ForgeAdamW(model, state="fp32", **SETTINGS)
    batch = next(iter(rows()))
    model(**batch).loss.backward()
    optimizer.step()
    weight = model.roberta.encoder.layer[0].output.dense.weight
    before = {key: value.clone() for key, value in optimizer.state[weight].items()}
    prepared = Accelerator(cpu=True).prepare(optimizer)
    after = prepared.optimizer.state[weight]
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert after[key].dtype == torch.float32 and torch.equal(after[key], value), key


@pytest.mark.parametrize("way", ["prepare", "prepare_optimizer"])
def test_another_optimizer_takes_the_weights_over(way):
    model = tiny_roberta()
    ours = ForgeAdamW(model, **SETTINGS)
    accelerator = Accelerator(cpu=True)
    theirs = torch.optim.AdamW(model.parameters(), **SETTINGS)
    theirs = getattr(accelerator, way)(theirs)
    reference_model = tiny_roberta()
    reference = torch.optim.AdamW(reference_model.parameters(), **SETTINGS)
    batch = next(iter(rows()))
    for _ in range(2):
        for network, optimizer in ((model, theirs), (reference_model, reference)):
            network(**batch).loss.backward()
            assert all(parameter.grad is not None for parameter in network.classifier.parameters())
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(flat(model), flat(reference_model))
    assert ours.pending_bytes() == 0


def test_an_optimizer_of_other_weights_leaves_ours_alone():
    model, other = tiny_roberta(), torch.nn.Linear(2, 2)
    optimizer = ForgeAdamW(model, **SETTINGS)
    Accelerator(cpu=True).prepare(torch.optim.SGD(other.parameters(), lr=0.1))
    model(**next(iter(rows()))).loss.backward()
    assert optimizer.pending_bytes() > 0
    assert model.classifier.dense.weight.grad is None


@pytest.mark.parametrize("way", ["prepare", "prepare_optimizer"])
@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (DistributedType.DEEPSPEED, "deepspeed"),
        (DistributedType.FSDP, "fsdp"),
        (DistributedType.XLA, "xla"),
        (DistributedType.MEGATRON_LM, "ddp"),
    ],
)
def test_distributed_types_are_refused_before_anything_is_wrapped(way, kind, key, monkeypatch):
    accelerator, model = Accelerator(cpu=True), tiny_roberta()
    optimizer = ForgeAdamW(model, **SETTINGS)
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda self: kind))
    with pytest.raises(ForgeRefusal) as error:
        getattr(accelerator, way)(optimizer)
    assert str(error.value) == REFUSALS[key].format(world_size=1)
    assert accelerator._optimizers == []


def test_several_processes_compilation_and_fp16_in_backward_are_refused(monkeypatch):
    model = tiny_roberta()
    optimizer = ForgeAdamW(model, **SETTINGS)
    with pytest.raises(ForgeRefusal) as error:
        Accelerator(cpu=True, dynamo_backend="inductor").prepare_optimizer(optimizer)
    assert str(error.value) == REFUSALS["torch_compile"]
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "num_processes", property(lambda self: 2))
        with pytest.raises(ForgeRefusal) as error:
            accelerator.prepare(optimizer)
    assert str(error.value) == REFUSALS["ddp"].format(world_size=2)
    backward = ForgeAdamW(model, update="backward", **SETTINGS)
    monkeypatch.setattr(Accelerator, "mixed_precision", property(lambda self: "fp16"))
    with pytest.raises(ForgeRefusal) as error:
        accelerator.prepare(backward)
    assert str(error.value) == REFUSALS["scaler_in_backward"]


def test_an_unknown_layout_of_accelerate_is_left_alone():
    module = ModuleType("accelerate.accelerator")
    hooks.extend_accelerator(module)
    assert vars(module).keys() == vars(ModuleType("accelerate.accelerator")).keys()
    module.Accelerator = type("Accelerator", (), {"prepare": lambda self, *args: args})
    hooks.extend_accelerator(module)
    hooks.extend_accelerator(module)
    assert not hasattr(module.Accelerator, "prepare_optimizer")
    assert module.Accelerator().prepare(1, 2) == (1, 2)
    assert not hasattr(module.Accelerator.prepare.__wrapped__, "_forge_hf")


def test_the_engine_gets_the_probe():
    got = []
    hooks.connect_engine(SimpleNamespace(set_last_micro_batch_probe=got.append))
    assert got == [hooks.last_micro_batch]
    assert hasattr(Accelerator.prepare, "_forge_hf") and hasattr(forge_hf.optim, "set_last_micro_batch_probe")
