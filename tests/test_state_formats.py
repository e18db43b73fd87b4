"""State formats through the optimizer: checkpoints between formats and libraries, resume, weight bits."""

from __future__ import annotations

import copy
import io
import sys
import types

import pytest
import torch
from torch import nn

import forge_hf
from forge_hf import ForgeConfigError, ForgeRefusal, quantized
from forge_hf.quantized import QuantizedMoment
from forge_hf.state import format_for


def model_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(96, 80), nn.Tanh(), nn.Linear(80, 70), nn.LayerNorm(70)).to(dtype)


def train(model, optimizer, steps, first=0, clip=1.0):
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        torch.manual_seed(100 + step)
        x, target = torch.randn(12, 96).to(dtype), torch.randn(12, 70).to(dtype)
        (model(x) - target).square().mean().backward()
        if clip and getattr(optimizer, "update_mode", None) == "step":
            forge_hf.clip_grad_norm_(optimizer, clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


def saved(optimizer):
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("cls", [forge_hf.ForgeAdamW, forge_hf.ForgeLion])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_bits", [16, 24, 32])
def test_resume_is_bit_equal(cls, dtype, update, weight_bits):
    options = {"lr": 1e-2, "state": "8bit", "update": update, "weight_bits": weight_bits}
    model = model_of(dtype)
    optimizer = cls(model, **options)
    train(model, optimizer, 3)
    weights, state = copy.deepcopy(model.state_dict()), saved(optimizer)
    train(model, optimizer, 3, first=3)
    again = model_of(dtype, seed=1)
    resumed = cls(again, **options)
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(again, resumed, 3, first=3)
    for (name, want), got in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(want, got), name
    for index, want in saved(optimizer)["state"].items():
        got = saved(resumed)["state"][index]
        assert want.keys() == got.keys()
        assert all(torch.equal(want[key], got[key]) and want[key].dtype == got[key].dtype for key in want)


def test_small_and_strided_tensors_keep_fp32_moments():
    model = model_of()
    optimizer = forge_hf.ForgeAdamW(model, state="8bit")
    train(model, optimizer, 1)
    states = {name: optimizer.state[p] for name, p in model.named_parameters()}
    kinds = {name: state.get("exp_avg", state.get("exp_avg_codes")).dtype for name, state in states.items()}
    assert kinds["0.weight"] == kinds["2.weight"] == torch.int8
    assert {kinds[name] for name in ("0.bias", "2.bias", "3.weight", "3.bias")} == {torch.float32}
    state = optimizer.state[model[0].weight]
    assert state["exp_avg_sq_codes"].dtype == state["exp_avg_sq_scale"].dtype == torch.uint8
    assert format_for("8bit", torch.empty(100, 100).t()) == "fp32"
    assert format_for("8bit", torch.empty(4095)) == "fp32" and format_for("8bit", torch.empty(4096)) == "8bit"


def test_bytes_of_the_state():
    model = model_of()
    optimizer = forge_hf.ForgeAdamW(model, state="8bit")
    train(model, optimizer, 1)
    weights = [p for p in model.parameters() if p.numel() >= 4096]
    small = [p for p in model.parameters() if p.numel() < 4096]
    scales = sum(2 * p.shape[0] * -(-p.shape[1] // 64) for p in weights)
    want = sum(2 * p.numel() for p in weights) + scales + sum(8 * p.numel() for p in small) + 4 * 6
    assert optimizer.state_bytes() == want


@pytest.mark.parametrize("before", ["torch", "fp32", "bf16", "8bit"])
@pytest.mark.parametrize("after", ["fp32", "bf16", "8bit", "torch"])
def test_checkpoints_go_from_any_format_to_any(before, after):
    def build(model, kind):
        if kind == "torch":
            return torch.optim.AdamW(model.parameters(), lr=1e-3)
        return forge_hf.ForgeAdamW(model, lr=1e-3, state=kind)

    model = model_of()
    first = build(model, before)
    if before == "torch":
        model(torch.randn(8, 96)).square().mean().backward()
        first.step()
    else:
        train(model, first, 1)
    twin = model_of()
    twin.load_state_dict(model.state_dict())
    second = build(twin, after)
    if after == "torch" and before == "8bit":
        second.load_state_dict(saved(first))
        with pytest.raises(KeyError, match="exp_avg"):  # not codes taken for moments
            train(twin, second, 1)
        return
    second.load_state_dict(saved(first))
    for old, new in zip(model.parameters(), twin.parameters(), strict=True):
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            want, got = first.state[old], second.state[new]
            values = [
                quantized.dequantize(QuantizedMoment(s[name + "_codes"], s[name + "_scale"]))
                if name + "_codes" in s
                else s[name].float()
                for s in (want, got)
            ]
            top = values[0].abs().max()
            assert top > 0
            limit = top / (44 if signed else 52) if after == "8bit" != before else 2.0**-8 * top
            assert (values[0] - values[1]).abs().max() <= (limit if before != after else 0)
        assert float(second.state[new]["step"]) == 1


def test_weight_bits_change_between_runs():
    model = model_of(torch.bfloat16)
    wide = forge_hf.ForgeAdamW(model, lr=1e-2, weight_bits=32)
    train(model, wide, 2)
    low = wide.state[model[0].weight]["weight_low"]
    assert low.dtype == torch.int16 and low.abs().max() > 255
    for bits, dtype, shift in ((24, torch.int8, 8), (32, torch.int16, 0)):
        other = forge_hf.ForgeAdamW(model_of(torch.bfloat16), weight_bits=bits)
        other.load_state_dict(saved(wide))
        got = next(iter(other.state.values()))["weight_low"]
        assert got.dtype == dtype and torch.equal(got.int(), low.int() >> shift)
    plain = forge_hf.ForgeAdamW(model_of(torch.bfloat16))
    plain.load_state_dict(saved(wide))
    assert "weight_low" not in next(iter(plain.state.values()))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.pop("exp_avg_scale"),
        lambda s: s.update(exp_avg_scale=s["exp_avg_scale"][:-1]),
        lambda s: s.update(exp_avg_scale=s["exp_avg_scale"].int()),
        lambda s: s.update(exp_avg_codes=s["exp_avg_codes"].view(torch.uint8)),
        lambda s: s.update(exp_avg_sq_codes=s["exp_avg_sq_codes"].view(torch.int8)),
        lambda s: s.update(exp_avg=s["exp_avg_codes"]),
        lambda s: s.update(exp_avg=s.pop("exp_avg_codes")),
        lambda s: s.pop("exp_avg_codes"),
        lambda s: s.update(weight_low="text"),
        lambda s: s.update(weight_low=torch.zeros(3, dtype=torch.int8)),
    ],
)
def test_spoiled_checkpoints_load_nothing(spoil):
    model = model_of(torch.bfloat16)
    optimizer = forge_hf.ForgeAdamW(model, state="8bit", weight_bits=24)
    train(model, optimizer, 1)
    state = saved(optimizer)
    before = saved(optimizer)
    spoil(state["state"][0])
    with pytest.raises(ForgeRefusal, match="does not fit|cannot be loaded|checkpoint"):
        optimizer.load_state_dict(state)
    for want, got in zip(before["state"].values(), saved(optimizer)["state"].values(), strict=True):
        assert all(torch.equal(want[key], got[key]) for key in want)


def test_a_cast_after_building_is_refused_where_it_cannot_be_trained():
    model = model_of()
    optimizer = forge_hf.ForgeAdamW(model)
    model.double()
    model(torch.randn(4, 96).double()).square().mean().backward()
    with pytest.raises(ForgeRefusal, match="float64"):
        optimizer.step()


def test_low_bits_need_bf16_weights():
    with pytest.raises(ForgeConfigError, match="fp16"):
        forge_hf.ForgeAdamW(model_of(torch.float16), weight_bits=24)
    # fp32 weights are what they are
    model = model_of()
    optimizer = forge_hf.ForgeAdamW(model, weight_bits=32)
    train(model, optimizer, 1)
    assert all("weight_low" not in state for state in optimizer.state.values())


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("bits", [24, 32])
def test_low_bits_do_not_outlive_a_write_to_the_weight(bits, update):
    """Masks, resets and loaded weights are what they say, not that plus bits of the value before."""
    model = model_of(torch.bfloat16)
    optimizer = forge_hf.ForgeAdamW(model, lr=1e-2, weight_bits=bits, update=update)
    train(model, optimizer, 2, clip=None)
    weight = model[0].weight
    assert optimizer.state[weight]["weight_low"].any()
    with torch.no_grad():
        weight.fill_(1.0)
    optimizer.param_groups[0].update(lr=0.0)
    train(model, optimizer, 1, first=2, clip=None)
    low = optimizer.state[weight]["weight_low"]
    assert torch.equal(weight, torch.ones_like(weight)) and not low.any()


@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_weight_zeroed_behind_the_version_counter_is_zero(bits, zero):
    model = model_of(torch.bfloat16)
    optimizer = forge_hf.ForgeAdamW(model, lr=1e-2, weight_bits=bits, weight_decay=0.0)
    train(model, optimizer, 2)
    weight = model[0].weight
    weight.data[3] = zero
    train(model, optimizer, 1, first=2)
    assert weight.isfinite().all() and weight[3].abs().max() <= 0.011


def test_casts_of_a_weight_with_low_bits():
    """fp32 weights need none, fp16 ones are refused, and bf16 ones get them whenever they become bf16."""
    model = model_of(torch.bfloat16)
    optimizer = forge_hf.ForgeAdamW(model, lr=1e-3, weight_bits=32)
    train(model, optimizer, 1)
    model.half()
    with pytest.raises(ForgeConfigError, match="'0.weight' is fp16"):
        train(model, optimizer, 1)
    model = model_of(torch.bfloat16)
    optimizer = forge_hf.ForgeAdamW(model, lr=1e-3, weight_bits=32)
    train(model, optimizer, 1)
    model.float()
    train(model, optimizer, 1)
    assert all("weight_low" not in state for state in optimizer.state.values())
    model.bfloat16()
    train(model, optimizer, 2)
    assert optimizer.state[model[0].weight]["weight_low"].any()


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_cast_to_fp64_after_an_update_is_refused(update):
    model = nn.Sequential(nn.Linear(96, 96, bias=False), nn.ReLU(), nn.Linear(96, 70, bias=False))
    optimizer = forge_hf.ForgeAdamW(model, update=update)
    train(model, optimizer, 1, clip=None)
    model.double()
    with pytest.raises(ForgeRefusal, match="float64"):
        train(model, optimizer, 1, clip=None)


def test_moments_follow_a_weight_that_becomes_contiguous():
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(16, 4))
    model.to(memory_format=torch.channels_last)
    optimizer = forge_hf.ForgeAdamW(model)

    def step():
        model(torch.ones(2, 8, 3, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = optimizer.state[model[0].weight]
    assert not state["exp_avg"].is_contiguous()
    before = state["exp_avg"].clone()
    model.to(memory_format=torch.contiguous_format)
    optimizer.param_groups[0].update(betas=(1.0 - 1e-7, 0.999))
    step()
    assert state["exp_avg"].is_contiguous() and state["exp_avg_sq"].is_contiguous()
    torch.testing.assert_close(state["exp_avg"], before)


def test_a_momentum_that_was_switched_off_stays_in_the_checkpoint():
    model = model_of()
    optimizer = forge_hf.ForgeSGD(model, lr=1e-2, momentum=0.9)
    train(model, optimizer, 2)
    optimizer.param_groups[0]["momentum"] = 0.0
    train(model, optimizer, 1, first=2)
    again = forge_hf.ForgeSGD(model_of(), lr=1e-2, momentum=0.9)
    again.load_state_dict(saved(optimizer))
    assert again.param_groups[0]["momentum"] == 0.0
    for index, want in saved(optimizer)["state"].items():
        assert torch.equal(saved(again)["state"][index]["momentum_buffer"], want["momentum_buffer"])


def test_thirty_two_weight_bits_are_an_fp32_run_of_the_bf16_model():
    """What the model computes with is bf16; what the optimizer moves is fp32, so small steps add up."""
    models = [model_of(torch.bfloat16) for _ in range(2)]
    for model, bits in zip(models, (16, 32), strict=True):
        optimizer = forge_hf.ForgeAdamW(model, lr=1e-5, weight_bits=bits, rounding="nearest", state="fp32")
        train(model, optimizer, 12)
    start = model_of(torch.bfloat16)
    moved = [(m[0].weight != start[0].weight).double().mean().item() for m in models]
    assert moved[1] > 2 * moved[0] > 0


def bitsandbytes_state(nested: bool):
    """A bitsandbytes 8-bit checkpoint made by hand: codes, a map, and maxima of blocks of 256."""
    qmap = torch.linspace(-1, 1, 256)
    state = {"step": 3, "state1": torch.randint(0, 256, (80, 96), dtype=torch.uint8), "qmap1": qmap}
    state |= {"state2": torch.randint(128, 256, (80, 96), dtype=torch.uint8), "qmap2": qmap}
    state |= {"absmax1": torch.rand(30) + 0.1, "absmax2": torch.rand(30) + 0.1}
    if nested:
        step = state.pop("step")
        state = {"step": step, "__bnb_optimizer_quant_state__": state}
    return state


def stub_of_bitsandbytes(monkeypatch):
    functional = types.ModuleType("bitsandbytes.functional")

    def dequantize_blockwise(codes, absmax, code, blocksize):
        values = code[codes.long()].view(-1, blocksize) * absmax[:, None]
        return values.view(codes.shape)

    functional.dequantize_blockwise = dequantize_blockwise
    package = types.ModuleType("bitsandbytes")
    package.functional = functional
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", functional)
    return dequantize_blockwise


@pytest.mark.parametrize("nested", [False, True])
def test_a_bitsandbytes_checkpoint_loads(nested, monkeypatch):
    """With a stand-in for its dequantisation; the next test takes the real one where it is installed."""
    dequantize = stub_of_bitsandbytes(monkeypatch)
    model = nn.Linear(96, 80, bias=False)
    optimizer = forge_hf.ForgeAdamW(model, state="fp32")
    checkpoint = optimizer.state_dict()
    flat = bitsandbytes_state(False)
    torch.manual_seed(0)
    checkpoint["state"] = {0: bitsandbytes_state(nested)}
    torch.manual_seed(0)
    flat = bitsandbytes_state(False)
    optimizer.load_state_dict(checkpoint)
    state = optimizer.state[model.weight]
    want = dequantize(flat["state1"], flat["absmax1"], flat["qmap1"], 256)
    assert torch.equal(state["exp_avg"], want) and float(state["step"]) == 3


@pytest.mark.parametrize(("ours", "theirs"), [("ForgeAdamW", "AdamW8bit"), ("ForgeLion", "Lion8bit")])
def test_a_checkpoint_of_the_real_bitsandbytes_loads(ours, theirs):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = nn.Linear(96, 80, bias=False)
    try:
        other = getattr(bitsandbytes.optim, theirs)(model.parameters(), lr=1e-3)
        model(torch.randn(8, 96)).square().mean().backward()
        other.step()
    except Exception as error:
        pytest.skip(f"bitsandbytes has no 8-bit optimizer here: {error}")
    optimizer = getattr(forge_hf, ours)(model, state="8bit")
    optimizer.load_state_dict(saved(other))
    state = optimizer.state[model.weight]
    got = quantized.dequantize(QuantizedMoment(state["exp_avg_codes"], state["exp_avg_scale"]))
    rest = 0.1 if ours == "ForgeAdamW" else 0.01  # 1 - beta of the moment
    assert (got - rest * model.weight.grad).abs().max() < 0.05 * got.abs().max()


def test_a_bitsandbytes_checkpoint_without_bitsandbytes(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    model = nn.Linear(96, 80, bias=False)
    optimizer = forge_hf.ForgeAdamW(model)
    checkpoint = optimizer.state_dict()
    checkpoint["state"] = {0: bitsandbytes_state(True)}
    with pytest.raises(ForgeRefusal, match="bitsandbytes, which is not installed"):
        optimizer.load_state_dict(checkpoint)
    assert not optimizer.state


@pytest.mark.parametrize("cls", [forge_hf.ForgeAdamW, forge_hf.ForgeLion])
def test_eight_bits_follow_the_fp32_run(cls):
    """Not exact, but near: a few percent of the way after 60 steps, and the same loss."""
    ends, losses = [], []
    start = model_of()
    for kind in ("fp32", "8bit"):
        model = model_of()
        optimizer = cls(model, lr=1e-3, state=kind)
        train(model, optimizer, 60)
        torch.manual_seed(1)
        losses.append(model(torch.randn(64, 96)).square().mean().item())
        ends.append(model[0].weight.detach())
    way = (ends[0] - start[0].weight).norm()
    # Lion's signs turn where its momentum is near 0, so its runs part more.
    assert 0 < (ends[1] - ends[0]).norm() < (0.1 if cls is forge_hf.ForgeAdamW else 0.4) * way
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
