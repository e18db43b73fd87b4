"""Norms and rounding of the kernels: values, random bits, non-finite numbers, determinism."""

from __future__ import annotations

import math

import pytest
import torch

from forge_hf import rounding as rounding_of_torch
from forge_hf.kernels import launch, rounding, tiles, wgrad_gram, wgrad_norm
from forge_hf.scalars import StepScalars
from tests.kernel_cases import (
    BF16,
    DEVICE,
    F16,
    F32,
    KEY,
    NORM_RTOL,
    poison,  # noqa: F401 - a fixture
    randn,
    same_bits,
    scalars_of,
    setup,
    triton,
    update,
)
from tests.tolerances import GRAD_NORM

tl = triton.language

# numpy, under the interpreter, warns where a GPU silently gives inf or NaN; tests below do that on purpose.
pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered"),
]


@pytest.mark.parametrize("shape", [(65, 130, 33), (1, 3, 1), (70, 9, 150), (16, 16, 0)])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_both_norms(dtype, shape):
    N, K, T = shape
    dy, x = randn(T, N, dtype=dtype), randn(T, K, dtype=dtype, seed=1)
    exact = (dy.double().T @ x.double()).square().sum().item()
    for norm_sq in (
        wgrad_norm.gemm_norm_sq,
        wgrad_gram.centred_gram_norm_sq,
        lambda dy, x: launch.wgrad_norm_sq([(dy, x)]),
    ):
        got = norm_sq(dy, x)
        assert got.dtype == F32 and got.ndim == 0
        assert got.item() == pytest.approx(exact, rel=NORM_RTOL)


@pytest.mark.parametrize("key", [0, 1, KEY, 2**32 - 1])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_stochastic_rounding_draws_the_bits_of_the_reference(dtype, key):
    special = [0.0, math.inf, -math.inf, math.nan, 3.3e38, 65519.0, 7e4, 6.1e-5, 6.2e-5, -1e-7, 1e-40]
    values = torch.cat([torch.tensor(special, device=DEVICE), randn(1500) * 10.0 ** randn(1500, seed=1)])
    w, m, v = torch.zeros_like(values, dtype=dtype), *torch.zeros_like(values, dtype=BF16).repeat(2, 1)
    launch.dense_update_(w, -values, (), "sgd", StepScalars(lr=1.0), rng_key=key)
    launch.dense_update_(
        torch.zeros_like(values), values, (m, v), "adamw", StepScalars(lr=0.0, eps=1.0), rng_key=key
    )
    number = ~values.isnan()
    wants = ((w, values, dtype, 0), (m, values, BF16, 1), (v, values * values, BF16, 2))
    for got, value, storage, stream in wants:
        want = rounding_of_torch.round_stochastic(value, storage, key, stream)
        assert torch.equal(got[number].view(torch.int16), want[number].view(torch.int16)), f"stream {stream}"
        assert bool(got[~number].isnan().all())


@triton.jit
def _bits_kernel(out_ptr, start, key, STREAM: tl.constexpr):
    offset = start.to(tl.int64) + tl.arange(0, 128)
    tl.store(
        out_ptr + tl.arange(0, 128),
        rounding.random_bits(rounding.hash_seed(offset, key), STREAM).to(tl.int64),
    )


@pytest.mark.parametrize("start", [2**31 - 64, 2**32 - 64, 5 * 2**32 + 7])
def test_random_bits_beyond_32_bit_offsets(start):
    out = torch.zeros(128, dtype=torch.int64, device=DEVICE)
    _bits_kernel[(1,)](out, start, KEY - 2**32, STREAM=2)
    assert torch.equal(out.cpu() & 0xFFFFFFFF, rounding_of_torch.random_bits(128, KEY, 2, start))


@pytest.mark.parametrize(("dtype", "unit"), [(BF16, 2.0**-7), (F16, 2.0**-10)])
def test_stochastic_rounding_is_unbiased(dtype, unit):
    count, share = 1 << 16, 0.3
    w = torch.zeros(count, dtype=dtype, device=DEVICE)
    launch.dense_update_(
        w, torch.full((count,), -(1 + share * unit), device=DEVICE), (), "sgd", StepScalars(lr=1.0), rng_key=5
    )
    assert set(w.unique().tolist()) == {1.0, 1.0 + unit}
    up = ((w.double() - 1) / unit).mean().item()
    assert up == pytest.approx(
        share, abs=4 * (share * (1 - share) / count) ** 0.5
    )  # four standard deviations


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_gradients_stay_visible(dtype, bad):
    w, moments = setup("adamw", 20, 30, dtype, BF16)
    dy, x = randn(7, 20, dtype=dtype), randn(7, 30, dtype=dtype, seed=1)
    dy[3, 11] = bad
    ours, norm_sq = update(
        "adamw", w, [(dy, x)], moments, scalars_of("adamw"), rng_key=KEY, want_norm_sq=True
    )
    assert not norm_sq.isfinite() and not launch.wgrad_norm_sq([(dy, x)]).isfinite()
    for got in ours:
        assert not got[11].isfinite().any() and got[torch.arange(20) != 11].isfinite().all()


def test_same_call_gives_same_bits():
    w, moments = setup("adamw", 65, 130, BF16, BF16)
    pair = [(randn(33, 65, dtype=BF16), randn(33, 130, dtype=BF16, seed=1))]
    first, second = (
        update("adamw", w, pair, moments, scalars_of("adamw"), rng_key=KEY, want_norm_sq=True) for _ in "ab"
    )
    assert same_bits((*first[0], first[1]), (*second[0], second[1]))
    other, _ = update("adamw", w, pair, moments, scalars_of("adamw"), rng_key=KEY + 1)
    differing = (first[0][0] != other[0]).double().mean().item()
    assert (
        0.2 < differing < 0.5
    )  # two draws disagree with chance 2p(1-p), a third on average over fractions p


def test_availability_and_empty_norm():
    assert launch.available(torch.zeros(1, device=DEVICE))
    assert launch.available(torch.zeros(1)) == tiles.INTERPRET
    with pytest.raises(ValueError, match="at least one segment"):
        launch.wgrad_norm_sq([])


@pytest.mark.parametrize("dtype, noise", [(F32, 1e-3), (BF16, 0.5)])
def test_centred_gram_does_not_cancel(dtype, noise):
    x = (30.0 * torch.randn(1, 64) + noise * torch.randn(24, 64)).to(DEVICE, dtype)
    dy = torch.randn(24, 48)
    dy = (dy - dy.mean(0)).to(DEVICE, dtype)
    exact = (dy.double().T @ x.double()).square().sum().item()
    assert wgrad_gram.centred_gram_norm_sq(dy, x).item() == pytest.approx(exact, rel=GRAD_NORM)
    if dtype == F32:
        plain = ((dy @ dy.T) * (x @ x.T)).sum().item()
        assert plain != pytest.approx(exact, rel=GRAD_NORM)


def test_centred_gram_of_ordinary_inputs():
    x, dy = torch.randn(40, 96).to(DEVICE, BF16), torch.randn(40, 32).to(DEVICE, BF16)
    exact = (dy.double().T @ x.double()).square().sum().item()
    assert wgrad_gram.centred_gram_norm_sq(dy, x).item() == pytest.approx(exact, rel=GRAD_NORM)
