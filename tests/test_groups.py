"""Updates of many weights by one launch give the bits of one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from forge_hf import quantized
from forge_hf.kernels import groups, launch, replay
from forge_hf.quantized import QuantizedMoment
from forge_hf.updates import Update
from tests.kernel_cases import (
    BF16,
    DEVICE,
    F16,
    F32,
    KEY,
    RULES,
    poison,  # noqa: F401 - a fixture
    randn,
    scalars_of,
)

pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture
def launches(monkeypatch) -> list[Any]:
    """Kernels that were launched."""
    seen: list[Any] = []
    run = replay.Launch.__call__

    def count(self: Any, *tensors: Any) -> None:
        seen.append(self._kernel)
        run(self, *tensors)

    monkeypatch.setattr(replay.Launch, "__call__", count)
    return seen


def moments_of(name: str, shape: Sequence[int], form: torch.dtype | str, seed: int):
    moments = []
    for index in range(RULES[name][1]):
        values = 0.1 * randn(*shape, seed=seed + index)
        values = values if index == 0 else values.square()
        if form == "8bit":
            moment = quantized.zeros(values, signed=index == 0)
            quantized.quantize_(moment, values)
            moments.append(moment)
        else:
            moments.append(values.to(form))
    return tuple(moments)


def update_of(
    name: str = "adamw", N: int = 33, K: int = 70, T: int = 17, weight: torch.dtype = BF16,
    form: torch.dtype | str = BF16, seed: int = 0, low: torch.dtype | None = None, key: int | None = KEY,
    scalars: Any = None, coefficient: torch.Tensor | None = None,
) -> Update:  # fmt: skip
    pair = randn(T, N, dtype=weight, seed=seed + 50), randn(T, K, dtype=weight, seed=seed + 60)
    below = None if low is None else torch.zeros(N, K, dtype=low, device=DEVICE)
    key = None if key is None else (key + seed) % (1 << 32)
    scalars = scalars_of(name) if scalars is None else scalars
    moments = moments_of(name, (N, K), form, seed)
    return Update(
        randn(N, K, dtype=weight, seed=seed), pair, moments, RULES[name][0], scalars, coefficient, key, below
    )


def copy_of(update: Update) -> Update:
    moments = tuple(
        QuantizedMoment(m.codes.clone(), m.scale.clone()) if isinstance(m, QuantizedMoment) else m.clone()
        for m in update.moments
    )
    low = None if update.low is None else update.low.clone()
    return update._replace(weight=update.weight.clone(), moments=moments, low=low)


def stored(update: Update) -> list[torch.Tensor]:
    tensors = [update.weight, *([] if update.low is None else [update.low])]
    for moment in update.moments:
        tensors += moment if isinstance(moment, QuantizedMoment) else [moment]
    return tensors


def check(updates: Sequence[Update]) -> None:
    """Together and one by one: the same bits, and the same norms but for the order of their sums."""
    twins = [copy_of(update) for update in updates]
    before = [copy_of(update) for update in updates]
    norms = launch.wgrad_updates_(updates, True)
    for update, twin, start, norm in zip(updates, twins, before, norms, strict=True):
        want = launch.wgrad_update_(
            twin.weight, [twin.gradient], twin.moments, twin.rule, twin.scalars,
            coefficient=twin.coefficient, rng_key=twin.rng_key, low=twin.low, want_norm_sq=True,
        )  # fmt: skip
        for got, wanted in zip(stored(update), stored(twin), strict=True):
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
        assert not torch.equal(update.weight, start.weight)
        torch.testing.assert_close(norm.sum(), want, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    "weight, form", [(F32, F32), (BF16, BF16), (F16, BF16), (BF16, "8bit"), (F32, "8bit")]
)
@pytest.mark.parametrize("name", RULES)
def test_a_group_is_one_launch_with_the_bits_of_single_ones(name, weight, form, launches):
    scalars = scalars_of(name)
    updates = [update_of(name, weight=weight, form=form, seed=seed, scalars=scalars) for seed in range(3)]
    launch.wgrad_updates_([copy_of(update) for update in updates])
    assert len(launches) == 1
    check(updates)


@pytest.mark.parametrize("low", [torch.int8, torch.int16])
def test_low_bits(low):
    scalars = scalars_of("adamw")
    check([update_of(low=low, seed=seed, scalars=scalars) for seed in range(2)])


def test_mixed_kinds_are_sorted_out(launches):
    """Two shapes, two sets of numbers, a coefficient, nearest rounding, a lone one."""
    first, second = scalars_of("adamw", 1), scalars_of("adamw", 1000)
    half = torch.tensor(0.5, device=DEVICE)
    updates = [
        *(update_of(seed=seed, scalars=first) for seed in range(2)),
        *(update_of(seed=seed, scalars=second) for seed in range(2, 4)),
        *(update_of(N=64, K=128, T=64, seed=seed, scalars=first) for seed in range(4, 6)),
        *(update_of(seed=seed, scalars=first, coefficient=half) for seed in range(6, 8)),
        *(update_of(seed=seed, scalars=first, key=None) for seed in range(8, 10)),
        update_of("lion", seed=10),
    ]
    updates = updates[::2] + updates[1::2]
    launch.wgrad_updates_([copy_of(update) for update in updates])
    assert len(launches) == 6
    check(updates)


def test_what_does_not_fit_goes_alone(launches):
    """No tokens, a dy without unit stride, addresses that are not multiples of 16."""
    scalars = scalars_of("adamw")
    empty = [update_of(T=0, seed=seed, scalars=scalars) for seed in range(2)]
    spread = [update_of(seed=seed, scalars=scalars) for seed in range(2)]
    spread = [
        u._replace(
            gradient=(u.gradient[0].repeat_interleave(2, 1)[:, ::2].T.contiguous().T[:, :], u.gradient[1])
        )
        for u in spread
    ]
    odd = [update_of(seed=seed, scalars=scalars) for seed in range(3)]
    room = torch.zeros(33 * 70 + 1, dtype=BF16, device=DEVICE)
    room[1:] = odd[0].weight.flatten()
    odd[0] = odd[0]._replace(weight=room[1:].view(33, 70))
    check(empty + spread + odd)


def test_groups_are_no_larger_than_a_grid(monkeypatch, launches):
    monkeypatch.setattr(groups, "MOST_IN_A_GROUP", 2)
    scalars = scalars_of("adamw")
    updates = [update_of(seed=seed, scalars=scalars) for seed in range(5)]
    launch.wgrad_updates_([copy_of(update) for update in updates])
    assert len(launches) == 3
    check(updates)


def test_a_group_is_checked_as_single_weights_are():
    scalars = scalars_of("adamw")
    updates = [update_of(seed=seed, scalars=scalars) for seed in range(2)]
    with pytest.raises(ValueError, match="moments"):
        launch.wgrad_updates_([update._replace(moments=update.moments[:1]) for update in updates])
    with pytest.raises(ValueError, match="rng_key"):
        launch.wgrad_updates_([update._replace(rng_key=1 << 32) for update in updates])
    with pytest.raises(ValueError, match="segment"):
        launch.wgrad_updates_([u._replace(gradient=(u.gradient[0][:5], u.gradient[1])) for u in updates])


def test_another_step_launches_what_is_known(monkeypatch):
    """New numbers, coefficients and tensors, the same kinds: nothing is planned anew."""
    monkeypatch.setattr(groups, "_KNOWN_GROUPS", {})
    half, known = torch.tensor(0.5, device=DEVICE), []
    for step in range(1, 4):
        options = {"scalars": scalars_of("adamw", step), "coefficient": half.clone()}
        launch.wgrad_updates_([update_of(seed=9 * step + seed, **options) for seed in range(2)])
        known.append(len(groups._KNOWN_GROUPS))
    assert known == [1, 1, 1]


def test_which_updates_wait_for_company(monkeypatch):
    update = update_of()
    assert launch.waits_for_company(update)
    monkeypatch.setattr(launch, "GROUP_ELEMENTS", update.weight.numel())
    assert not launch.waits_for_company(update)
