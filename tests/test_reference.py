"""The plain-torch backend against the rules in float64, and its random bits against their definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge_hf import reference
from forge_hf import rounding as rounding_of_torch
from forge_hf.rules import ADAMW, LION, RULES, SGD
from forge_hf.scalars import StepScalars

from .tolerances import GEMM_FP32, GRAD_NORM, MEAN_STANDARD_ERRORS, ROUND_BF16, ROUND_FP16, UPDATE_FP32

N, K = 7, 13


def hash_bits(index: int, key: int, stream: int) -> int:
    """The bits of one element, in Python integers."""
    mask = 2**32 - 1
    low, high = index & mask, index >> 32
    x = (low * 0x9E3779B1 + high * 0x85EBCA77 + key + stream * 0xC2B2AE3D) & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    return x ^ (x >> 16)


@pytest.mark.parametrize("start", [0, 5, 2**32 - 3, 2**40])
@pytest.mark.parametrize("key", [0, 2**32 - 1, 123456789])
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_random_bits(start, key, stream):
    expected = [hash_bits(start + offset, key, stream) for offset in range(6)]
    assert rounding_of_torch.random_bits(6, key, stream, start).tolist() == expected


@settings(max_examples=200, deadline=None)
@given(
    st.floats(width=32, allow_nan=False),
    st.integers(0, 2**32 - 1),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_stochastic_rounding_goes_to_a_neighbour(value, key, dtype):
    exact = torch.tensor([value])
    rounded = rounding_of_torch.round_stochastic(exact, dtype, key, 0)
    nearest = exact.to(dtype)
    if not torch.isfinite(exact) or exact.item() == nearest.item():
        assert torch.equal(rounded, nearest)
        return
    towards = torch.tensor(math.inf if nearest.item() < value else -math.inf, dtype=dtype)
    other = torch.nextafter(nearest, towards) if torch.isfinite(nearest) else rounded
    assert rounded.item() in (nearest.item(), other.item())
    assert rounded.item() * value >= 0.0


@pytest.mark.parametrize("dtype, spacing", [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.97])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_stochastic_rounding_is_right_on_average(dtype, spacing, fraction, sign):
    count = 200_000
    values = torch.full((count,), sign * (1.0 + fraction * spacing))
    mean = rounding_of_torch.round_stochastic(values, dtype, 99, 1).double().mean().item()
    error = spacing * math.sqrt(fraction * (1 - fraction) / count)
    assert abs(mean - values[0].item()) < MEAN_STANDARD_ERRORS * error


def test_stochastic_rounding_of_fp16_subnormals_is_right_on_average():
    values = torch.full((200_000,), 3.25 * 2.0**-24)
    mean = rounding_of_torch.round_stochastic(values, torch.float16, 7, 0).double().mean().item() * 2.0**24
    assert abs(mean - 3.25) < MEAN_STANDARD_ERRORS * math.sqrt(0.25 * 0.75 / 200_000)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_non_finite_values_pass_through(value, dtype):
    rounded = rounding_of_torch.round_stochastic(torch.full((5,), value), dtype, 3, 0)
    assert torch.equal(rounded.isnan(), torch.full((5,), math.isnan(value)))
    assert math.isnan(value) or (rounded == value).all()


def rule64(rule: str, w: Tensor, g: Tensor, moments: list[Tensor], s: StepScalars) -> None:
    """The rules of `rules.py` in float64, written from their formulas."""
    if rule == "adamw":
        m, v = moments
        m.copy_(s.beta1 * m + (1 - s.beta1) * g)
        v.copy_(s.beta2 * v + (1 - s.beta2) * g * g)
        step = (m / s.bias_correction1) / (v.sqrt() / s.bias_correction2_sqrt + s.eps)
        w.copy_(w * (1 - s.lr * s.weight_decay) - s.lr * step)
    elif rule == "lion":
        (m,) = moments
        u = torch.sign(s.beta1 * m + (1 - s.beta1) * g)
        m.copy_(s.beta2 * m + (1 - s.beta2) * g)
        w.copy_(w * (1 - s.lr * s.weight_decay) - s.lr * u)
    else:
        d = g + s.weight_decay * w
        if moments:
            moments[0].copy_(s.momentum * moments[0] + d)
            d = d + s.momentum * moments[0] if s.nesterov else moments[0]
        w.copy_(w - s.lr * d)


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("adamw", {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
    ("lion", {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    ("sgd", {"lr": 1e-2, "momentum": 0.0, "nesterov": False, "weight_decay": 0.1}),
    ("sgd", {"lr": 1e-2, "momentum": 0.9, "nesterov": False, "weight_decay": 0.1}),
    ("sgd", {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
]


def problem(
    rule: str, group: dict[str, Any], dtype: torch.dtype, state: torch.dtype, tokens: tuple[int, ...]
) -> Any:
    torch.manual_seed(5)
    weight = torch.randn(N, K).to(dtype)
    moments = tuple(torch.rand(N, K).add_(0.1).to(state) for _ in RULES[rule].moment_names(group))
    segments = [(torch.randn(t, N).to(dtype), torch.randn(t, K).to(dtype)) for t in tokens]
    return weight, moments, segments


@pytest.mark.parametrize("rule, group", SETTINGS)
@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("tokens", [(1,), (5, 0, 3), (0,), (40,)])
@pytest.mark.parametrize("coefficient", [None, 0.3])
def test_fp32_update_against_float64(rule, group, step, tokens, coefficient, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 2 * K)
    weight, moments, segments = problem(rule, group, torch.float32, torch.float32, tokens)
    scalars = RULES[rule].scalars(group, step)
    exact, exact_moments = weight.double(), [moment.double() for moment in moments]
    gradient = sum(
        (dy.double().t() @ x.double() for dy, x in segments), torch.zeros(N, K, dtype=torch.float64)
    )
    rule64(rule, exact, gradient * (coefficient or 1.0), exact_moments, scalars)
    dense = weight.clone(), tuple(moment.clone() for moment in moments)
    factor = None if coefficient is None else torch.tensor(coefficient)
    norm_sq = reference.wgrad_update_(
        weight, segments, moments, rule, scalars, coefficient=factor, want_norm_sq=True
    )
    reference.dense_update_(dense[0], gradient.float(), dense[1], rule, scalars, coefficient=factor)
    unit = (gradient.norm() + 1.0).item() if rule == "sgd" else 1.0
    for ours, ours_moments in ((weight, moments), dense):
        assert ((ours - exact).abs() <= UPDATE_FP32 * (1e-2 * unit + exact.abs()) * 2).all()
        for moment, expected in zip(ours_moments, exact_moments, strict=True):
            assert ((moment - expected).abs() <= UPDATE_FP32 * (1 + gradient.abs().max()) ** 2).all()
    assert norm_sq.item() == pytest.approx(gradient.square().sum().item(), rel=100 * GEMM_FP32)


@pytest.mark.parametrize("rule, group", SETTINGS)
@pytest.mark.parametrize("key", [None, 77])
@pytest.mark.parametrize("dtype, unit", [(torch.bfloat16, ROUND_BF16), (torch.float16, ROUND_FP16)])
def test_16_bit_storage_is_the_fp32_update_rounded_once(rule, group, key, dtype, unit):
    weight, moments, segments = problem(rule, group, dtype, torch.bfloat16, (4, 2))
    exact, exact_moments = weight.float(), tuple(moment.float() for moment in moments)
    scalars = RULES[rule].scalars(group, 3)
    reference.wgrad_update_(weight, segments, moments, rule, scalars, rng_key=key)
    reference.wgrad_update_(exact, segments, exact_moments, rule, scalars)
    stored, wide = (weight, *moments), (exact, *exact_moments)
    for stream, (got, value) in enumerate(zip(stored, wide, strict=True)):
        if key is None:
            assert torch.equal(got, value.to(got.dtype))
        else:
            assert torch.equal(got, rounding_of_torch.round_stochastic(value, got.dtype, key, stream))
            assert ((got.float() - value).abs() <= (unit if stream == 0 else ROUND_BF16) * value.abs()).all()


@pytest.mark.parametrize("rule, group", SETTINGS)
@pytest.mark.parametrize("key", [None, 77])
def test_chunks_do_not_change_the_elementwise_result(rule, group, key, monkeypatch):
    results = []
    for chunk in (1, 3 * K, 1 << 20):
        monkeypatch.setattr(reference, "CHUNK_ELEMENTS", chunk)
        weight, moments, _ = problem(rule, group, torch.bfloat16, torch.bfloat16, ())
        grad = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
        reference.dense_update_(weight, grad, moments, rule, RULES[rule].scalars(group, 2), rng_key=key)
        results.append((weight, *moments))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("layout", ["transposed", "expanded_gradient", "scalar", "empty", "4d"])
def test_any_shape_and_layout(layout):
    scalars = ADAMW.scalars(ADAMW.defaults | {"lr": 0.1}, 1)
    shape = {"scalar": (), "empty": (0, 4), "4d": (2, 3, 2, 2)}.get(layout, (4, 6))
    weight = torch.randn(6, 4).t() if layout == "transposed" else torch.randn(shape)
    grad = torch.ones(()).expand(shape) if layout == "expanded_gradient" else torch.randn(shape)
    moments = tuple(torch.zeros_like(weight) for _ in range(2))
    expected = weight - 0.1 * 1e-2 * weight - 0.1 * grad.sign()
    reference.dense_update_(weight, grad, moments, "adamw", scalars)
    assert torch.allclose(weight, expected, atol=1e-5)


def test_strided_segments():
    dy, x = torch.ones(()).expand(5, N), torch.randn(K, 5).t()
    weight = torch.zeros(N, K)
    reference.wgrad_update_(weight, [(dy, x)], (), "sgd", StepScalars(lr=1.0))
    assert torch.allclose(weight, -dy.t() @ x, atol=1e-5)


@pytest.mark.parametrize("rule", [ADAMW, LION, SGD])
def test_autocast_does_not_reach_the_update(rule):
    results = []
    for enabled in (False, True):
        group = {**rule.defaults, "lr": 0.1}
        weight, moments, segments = problem(rule.name, group, torch.float32, torch.float32, (6,))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            norm_sq = reference.wgrad_update_(
                weight, segments, moments, rule.name, rule.scalars(group, 1), want_norm_sq=True
            )
        results.append((weight, norm_sq, *moments))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_norm_of_nearly_constant_inputs_does_not_cancel():
    x = 30.0 * torch.randn(1, 64) + 1e-3 * torch.randn(8, 64)
    dy = torch.randn(8, 64)
    dy -= dy.mean(0)
    exact = (dy.double().t() @ x.double()).square().sum()
    assert float(reference.wgrad_norm_sq([(dy, x)])) == pytest.approx(float(exact), rel=GRAD_NORM)
    halves = [(dy[:3], x[:3]), (dy[3:], x[3:])]
    assert float(reference.wgrad_norm_sq(halves)) == pytest.approx(float(exact), rel=GRAD_NORM)
