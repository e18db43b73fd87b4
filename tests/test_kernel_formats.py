"""8-bit moments and weights of 24 and 32 bits in the update kernels: float64, the reference, odd shapes."""

from __future__ import annotations

import itertools

import pytest
import torch

from forge_hf import quantized, reference, rounding
from forge_hf.kernels import launch, paths, plan, wgrad_chunks, wgrad_update
from forge_hf.quantized import QuantizedMoment
from forge_hf.scalars import StepScalars
from tests.kernel_cases import (
    BF16,
    DEVICE,
    F16,
    F32,
    KEY,
    LR_SHARE,
    RULES,
    ULPS,
    plain_rule,
    poison,  # noqa: F401 - a fixture
    randn,
    scalars_of,
)

pytestmark = pytest.mark.usefixtures("poison")
QUANTIZED_RULES = [name for name in RULES if RULES[name][1]]
# (N, K, T): whole tiles, ragged everywhere, no tokens, less than a block, blocks that straddle tiles
SHAPES = [(64, 128, 64), (65, 130, 33), (5, 70, 0), (3, 7, 1)]


def quantized_setup(name: str, N: int, K: int, weight: torch.dtype, fresh: bool = False):
    moments = []
    for index in range(RULES[name][1]):
        values = 0.1 * randn(N, K, seed=1) if index == 0 else 1e-2 * randn(N, K, seed=2).square()
        moment = quantized.zeros(values, signed=index == 0)
        if not fresh:
            quantized.quantize_(moment, values)
        moments.append(moment)
    return randn(N, K, dtype=weight), tuple(moments)


def copies(moments):
    return tuple(QuantizedMoment(m.codes.clone(), m.scale.clone()) for m in moments)


def agree(ours, twin, limit=0.02):
    """Equal but for fp32 noise: a code may be its neighbour, and a unit its double at a power of two."""
    for got, want in zip(ours, twin, strict=True):
        if isinstance(got, QuantizedMoment):
            a, b = quantized.dequantize(got), quantized.dequantize(want)
            unit = torch.exp2(torch.maximum(got.scale, want.scale).float() - 127)
            wide = unit.repeat_interleave(64, 1)[:, : a.shape[1]] if a.dim() == 2 else unit.max()
            power = 2 if got.signed else 4
            code = (torch.maximum(a.abs(), b.abs()) / wide).pow(1 / power)
            gap = ((code + 1.01) ** power - code**power) * wide
            assert ((a - b).abs() <= gap).all()
            assert (got.scale != want.scale).double().mean() <= limit
            assert (a != b).double().mean() <= limit
        else:
            torch.testing.assert_close(got, want, rtol=2.0**-7, atol=LR_SHARE * 1e-2)
            assert got.itemsize == 4 or (got != want).double().mean() <= limit


@pytest.mark.parametrize("rng_key", [None, KEY])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "weight"), list(itertools.product(QUANTIZED_RULES, (F32, BF16, F16))))
def test_kernel_and_reference_agree(name, weight, shape, rng_key):
    N, K, T = shape
    w, moments = quantized_setup(name, N, K, weight)
    pair = [(0.1 * randn(T, N, dtype=weight, seed=3), randn(T, K, dtype=weight, seed=4))]
    options = {"rng_key": rng_key, "coefficient": torch.tensor(0.5, device=DEVICE)}
    ours, twin = (w.clone(), copies(moments)), (w.clone(), copies(moments))
    for backend, (weights, state) in ((launch, ours), (reference, twin)):
        backend.wgrad_update_(weights, pair, state, RULES[name][0], scalars_of(name), **options)
    agree((ours[0], *ours[1]), (twin[0], *twin[1]), limit=0.1 if N * K < 100 else 0.02)
    assert not torch.equal(ours[0], w)


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", QUANTIZED_RULES)
def test_three_way(name, shape, step):
    """The weight is as exact as with fp32 moments; the moments are off by one rounding to 8 bits."""
    N, K, T = shape
    s = scalars_of(name, step)
    w, moments = quantized_setup(name, N, K, F32, fresh=step == 1)
    dy, x = randn(T, N, seed=3), randn(T, K, seed=4)
    start = [quantized.dequantize(m) for m in moments]
    exact = plain_rule(name, w.double(), dy.double().T @ x.double(), [m.double() for m in start], s)
    plain = plain_rule(name, w, dy.T @ x, start, s)
    launch.wgrad_update_(w, [(dy, x)], moments, RULES[name][0], s, rng_key=KEY)
    slack = ULPS * exact[0].abs().max() + LR_SHARE * s.lr
    assert (w.double() - exact[0]).abs().max() <= (plain[0].double() - exact[0]).abs().max() + slack
    for moment, want in zip(moments, exact[1:], strict=True):
        error = (quantized.dequantize(moment).double() - want).abs()
        top = torch.nn.functional.pad(want.abs(), (0, -K % 64)).view(N, -1, 64).amax(2)
        bound = top.repeat_interleave(64, 1)[:, :K] / (44 if moment.signed else 52)
        assert (error <= bound * (1 + 1e-4) + 2.0**-120).all()


TILES = [plan.GENERIC, plan.FP32._replace(parts=2), plan.HOPPER_PAIR, plan.HOPPER_WIDE, plan.HOPPER_WIDE_FP32]


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.block_n}x{tile.block_k}x{tile.parts}")
@pytest.mark.parametrize("shape", [(256, 256, 16), (150, 270, 9)])
def test_every_tile_of_the_table(tile, shape, monkeypatch):
    monkeypatch.setattr(wgrad_update, "update_tile", lambda *_: tile)
    N, K, T = shape
    w, moments = quantized_setup("adamw", N, K, BF16)
    pair = [(randn(T, N, dtype=BF16), randn(T, K, dtype=BF16, seed=1))]
    ours, twin = (w.clone(), copies(moments)), (w.clone(), copies(moments))
    for backend, (weights, state) in ((launch, ours), (reference, twin)):
        backend.wgrad_update_(weights, pair, state, "adamw", scalars_of("adamw"), rng_key=KEY)
    agree((ours[0], *ours[1]), (twin[0], *twin[1]))


@pytest.mark.parametrize("shape", [(300, 192, 33), (300, 136, 5)])
@pytest.mark.parametrize("operand", [F32, BF16])
def test_chunks(shape, operand, monkeypatch):
    """Rows of whole blocks go in chunks, others to the fused kernel."""
    monkeypatch.setattr(paths, "uses_chunks", lambda *_: True)
    monkeypatch.setattr(wgrad_chunks, "BUFFER_BYTES", 4 * 192 * 128)
    N, K, T = shape
    w, moments = quantized_setup("adamw", N, K, BF16)
    pair = [(randn(T, N, dtype=operand), randn(T, K, dtype=operand, seed=1))]
    ours, twin = (w.clone(), copies(moments)), (w.clone(), copies(moments))
    for backend, (weights, state) in ((launch, ours), (reference, twin)):
        backend.wgrad_update_(weights, pair, state, "adamw", scalars_of("adamw"), rng_key=KEY)
    agree((ours[0], *ours[1]), (twin[0], *twin[1]))


def test_8bit_moments_go_in_chunks_at_few_tokens_on_hopper(monkeypatch):
    device = torch.device(DEVICE)
    monkeypatch.setattr(plan, "is_hopper", lambda _: True)
    assert plan.uses_chunks(512, 14336, 4096, BF16, device, quantized=True)
    assert not plan.uses_chunks(512, 14336, 4096, BF16, device)
    assert not plan.uses_chunks(8192, 14336, 4096, BF16, device, quantized=True)
    assert not plan.uses_chunks(512, 4096, 4096, BF16, device, quantized=True)
    monkeypatch.setattr(plan, "is_hopper", lambda _: False)
    assert not plan.uses_chunks(512, 14336, 4096, BF16, device, quantized=True)


@pytest.mark.parametrize("shape", [(5000,), (33, 130), (4, 3, 7, 7), (1, 1), ()])
@pytest.mark.parametrize("low", [None, torch.int8, torch.int16])
def test_dense_gradients_of_any_shape(shape, low):
    values = randn(*shape) if shape else randn(1).view(())
    moments = quantized.zeros(values, True), quantized.zeros(values, False)
    results = []
    for backend in (launch, reference):
        w, state = values.to(BF16), copies(moments)
        below = None if low is None else torch.zeros_like(w, dtype=low)
        for step in (1, 2):
            grad = randn(*shape, seed=step) if shape else randn(1, seed=step).view(())
            s = scalars_of("adamw", step)
            backend.dense_update_(w, grad, state, "adamw", s, rng_key=KEY + step, low=below)
        results.append((w, *state))
    few = 0.5 if values.numel() < 100 else 0.02
    agree(results[0], results[1], limit=few)


@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test_a_bad_gradient_spoils_its_block_and_nothing_else(special):
    w, moments = quantized_setup("adamw", 4, 128, F32)
    grad = 0.1 * randn(4, 128)
    grad[2, 5] = special
    results = [(w.clone(), copies(moments)) for _ in range(2)]
    for backend, (weight, state) in zip((launch, reference), results, strict=True):
        backend.dense_update_(weight, grad, state, "adamw", scalars_of("adamw"), rng_key=KEY)
        bad = torch.zeros(4, 128, dtype=torch.bool, device=DEVICE)
        bad[2, :64] = True
        for moment in state:
            assert torch.equal(~quantized.dequantize(moment).isfinite(), bad)
        bad[2, :64], bad[2, 5] = False, True
        assert torch.equal(~weight.isfinite() & bad, ~weight.isfinite())


@pytest.mark.parametrize("low", [torch.int8, torch.int16])
@pytest.mark.parametrize("rng_key", [None, KEY])
def test_low_bits_keep_what_bf16_loses(low, rng_key):
    """With 32 bits the run is the one of fp32 weights to the last bit; with 24 it has 16 bits of mantissa."""
    N, K, T = 33, 70, 9
    wide = randn(N, K).to(BF16).float()
    w, below = wide.to(BF16), torch.zeros(N, K, dtype=low, device=DEVICE)
    states = [tuple(torch.zeros(N, K, device=DEVICE) for _ in range(2)) for _ in range(2)]
    for step in range(1, 6):
        pair = [(randn(T, N, seed=step), randn(T, K, seed=step + 9))]
        s = scalars_of("adamw", step, lr=1e-4)
        launch.wgrad_update_(wide, pair, states[0], "adamw", s)
        launch.wgrad_update_(w, pair, states[1], "adamw", s, rng_key=rng_key, low=below)
    joined = rounding.join_low_bits(w, below)
    if low == torch.int16:
        assert torch.equal(joined, wide)
    else:
        # 16 bits of mantissa, five roundings of a whole unit at most
        assert ((joined - wide).abs() <= 5 * 2.0**-15 * wide.abs()).all()
    assert torch.equal(w, joined.to(BF16)) or ((w.float() - joined).abs() <= 2.0**-8 * joined.abs()).all()


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, -3.14159, 1e-40, 3.3e38, float("inf"), float("-inf"), float("nan")]
)
@pytest.mark.parametrize("low", [torch.int8, torch.int16])
def test_low_bits_of_special_values(value, low):
    values = torch.full((7,), value)
    w, below = torch.zeros(7, dtype=BF16), torch.zeros(7, dtype=low)
    rounding.split_low_bits_(w, below, values)
    got = rounding.join_low_bits(w, below)
    torch.testing.assert_close(
        got, values, rtol=0 if low == torch.int16 else 2.0**-15, atol=1e-41, equal_nan=True
    )


@pytest.mark.parametrize("low", [torch.int8, torch.int16])
def test_a_zeroed_weight_forgets_its_low_bits(low):
    """Pruning writes 0 into the bf16 weight only; a negative part below it would make a NaN."""
    w, below = (
        torch.zeros(4, 64, dtype=BF16, device=DEVICE),
        torch.full((4, 64), -3, dtype=low, device=DEVICE),
    )
    s = StepScalars(lr=0.5)
    launch.wgrad_update_(
        w, [(torch.ones(1, 4, device=DEVICE), torch.ones(1, 64, device=DEVICE))], (), "sgd", s, low=below
    )
    assert (w == -0.5).all() and not below.any()


@pytest.mark.parametrize("name", ["lion", "adamw"])
def test_small_codes_round_to_the_nearest_like_the_reference(name):
    """One large element sets each block's unit; the others have codes of 0 to 6, where gaps differ."""
    N, K = 64, 256
    power = 2 if name == "lion" else 4
    g = (6 * torch.rand(N, K, generator=torch.Generator().manual_seed(0))).pow(power if name == "lion" else 2)
    g[:, ::64] = 120.0**2 if name == "lion" else 250.0**2
    g = g.to(DEVICE)
    states = []
    for backend in (launch, reference):
        w, moments = quantized_setup(name, N, K, F32, fresh=True)
        backend.dense_update_(w, g, moments, RULES[name][0], scalars_of(name))
        states.append(moments[-1].codes.int())
    assert (states[0] != states[1]).double().mean() < 1e-3  # ties that fp32 roots decide
    assert states[0].abs().unique().numel() >= 6


def test_wrong_formats_are_refused():
    w, moments = quantized_setup("adamw", 8, 64, BF16)
    pair, s = [(randn(3, 8), randn(3, 64))], scalars_of("adamw")
    bad = [
        (moments[::-1], {}),
        ((moments[0], QuantizedMoment(moments[1].codes, moments[1].scale[:4])), {}),
        ((moments[0], QuantizedMoment(moments[1].codes, moments[1].scale.int())), {}),
        (moments, {"low": torch.zeros(8, 64, dtype=torch.int32, device=DEVICE)}),
        (moments, {"low": torch.zeros(8, 32, dtype=torch.int8, device=DEVICE)}),
    ]
    for state, options in bad:
        with pytest.raises(ValueError, match="must be contiguous"):
            launch.wgrad_update_(w, pair, state, "adamw", s, **options)
    with pytest.raises(ValueError, match="either all moments"):
        launch.wgrad_update_(w, pair, (moments[0], randn(8, 64).square()), "adamw", s)
    with pytest.raises(ValueError, match="bfloat16 weight"):
        low = torch.zeros(8, 64, dtype=torch.int8, device=DEVICE)
        launch.wgrad_update_(w.float(), pair, moments, "adamw", s, low=low)
