"""The Hopper kernel gives the bits of the general one: needs a Hopper card and Triton 3.6."""

from __future__ import annotations

import pytest
import torch

from forge_hf import quantized
from forge_hf.kernels import launch, rules, wgrad_hopper, wgrad_update
from tests.kernel_cases import (
    BF16,
    DEVICE,
    F16,
    F32,
    KEY,
    NORM_RTOL,
    RULES,
    randn,
    same_bits,
    scalars_of,
    setup,
)

HERE = DEVICE == "cuda" and wgrad_hopper.COMPILES and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HERE, reason="needs an H100 or H200 and Triton 3.6")
TILES = pytest.mark.parametrize("tile", [wgrad_hopper.SQUARE, wgrad_hopper.WIDE], ids=["square", "wide"])


@on_hopper
@TILES
@pytest.mark.parametrize("T", [1, 200, 512, 2048])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", list(RULES))
def test_bits_are_those_of_the_general_kernel(name, dtype, T, tile, monkeypatch):
    """Nearest and stochastic, with and without coefficient and norm, several tiles per program."""
    monkeypatch.setattr(wgrad_hopper, "LARGE", 1)
    monkeypatch.setattr(wgrad_hopper, "WIDE_TOKENS", 0 if tile is wgrad_hopper.WIDE else 1 << 30)
    rule, s = RULES[name][0], scalars_of(name)
    w, moments = setup(name, 2560, 2048, dtype, BF16)
    dy, x = 0.1 * randn(T, 2560, dtype=dtype), randn(T, 2048, dtype=dtype, seed=1)
    for key, coefficient, wants in ((None, None, True), (KEY, torch.tensor(0.5, device=DEVICE), False)):
        results, norms = [], []
        arguments = rules.rule_arguments(rule, s, coefficient, key, moments, None, w.device)
        constants = arguments.constants
        for build in (wgrad_hopper.hopper_update, wgrad_update.fused_update):
            weight, state = w.clone(), tuple(moment.clone() for moment in moments)
            arguments = rules.rule_arguments(rule, s, coefficient, key, state, None, w.device)
            update = build(weight, dy, x, state, constants)
            norms.append(update.run(weight, dy, x, arguments, wants))
            results.append((weight, *state))
        assert same_bits(*results)
        if wants:
            torch.testing.assert_close(norms[0], norms[1], rtol=NORM_RTOL, atol=0)


@on_hopper
def test_it_is_taken_for_large_weights_and_repeats_its_bits():
    w, moments = setup("adamw", 8192, 4096, BF16, BF16)
    pair = [(0.1 * randn(512, 8192, dtype=BF16), randn(512, 4096, dtype=BF16, seed=1))]
    results = []
    for _ in range(3):
        weight, state = w.clone(), tuple(moment.clone() for moment in moments)
        norm = launch.wgrad_update_(
            weight, pair, state, "adamw", scalars_of("adamw"), rng_key=KEY, want_norm_sq=True
        )
        results.append((weight, *state, norm.view(1)))
    assert any(isinstance(update, wgrad_hopper.HopperUpdate) for update in launch._KNOWN.values())
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


def test_what_it_does_not_fit_falls_back(monkeypatch):
    """The choice needs no card: whatever is not whole tiles of 16-bit storage goes to the general kernel."""
    monkeypatch.setattr(wgrad_hopper, "COMPILES", True)
    monkeypatch.setattr(wgrad_hopper, "is_hopper", lambda _: True)
    monkeypatch.setattr(wgrad_hopper, "LARGE", 1)

    def chosen(weight=BF16, moment=BF16, operand=BF16, N=256, K=512, T=64, x_stride=1):
        w = torch.empty(N, K, dtype=weight)
        state = tuple(torch.empty(N, K, dtype=moment) for _ in range(2))
        x = torch.empty(T, K * x_stride, dtype=operand)[:, ::x_stride]
        return wgrad_hopper.hopper_tile(w, torch.empty(T, N, dtype=operand), x, state)

    assert chosen() is wgrad_hopper.SQUARE and chosen(T=4096) is wgrad_hopper.WIDE
    for odd in (
        {"weight": F32}, {"moment": F32}, {"operand": F32}, {"N": 200}, {"K": 520}, {"T": 0}, {"x_stride": 2}
    ):  # fmt: skip
        assert chosen(**odd) is None, odd
    w = torch.empty(256, 512, dtype=BF16)
    eight = (quantized.zeros(w, True), quantized.zeros(w, False))
    dy, x = torch.empty(64, 256, dtype=BF16), torch.empty(64, 512, dtype=BF16)
    assert wgrad_hopper.hopper_tile(w, dy, x, eight) is None
    monkeypatch.setattr(wgrad_hopper, "LARGE", 1 << 25)
    assert chosen() is None
