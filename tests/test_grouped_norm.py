"""Squared norms of many weights in few launches: the bits of each alone, whatever else is in the table."""

from __future__ import annotations

import pytest
import torch

from forge_hf import reference
from forge_hf.kernels import grouped_norm, launch, norm_plan, replay, wgrad_gram, wgrad_norm
from tests.kernel_cases import (
    BF16,
    DEVICE,
    F16,
    F32,
    NORM_RTOL,
    poison,  # noqa: F401 - a fixture
    randn,
    same_bits,
)

pytestmark = [
    pytest.mark.usefixtures("poison", "fresh_plans"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered"),
]


@pytest.fixture
def fresh_plans():
    """Plans are kept by key, and tests change what they are made from."""
    kept = (grouped_norm._kind, grouped_norm._launches, grouped_norm._finish_launch)
    for function in kept:
        function.cache_clear()
    yield
    for function in kept:
        function.cache_clear()


@pytest.fixture
def wide_by_gram(monkeypatch):
    """Both forms among small pairs: by Gram matrices from 40 features on."""
    monkeypatch.setattr(norm_plan, "gram_is_cheaper", lambda T, N, K: N >= 40)


@pytest.fixture
def launched(monkeypatch):
    """Launches as (kernel, grid), which still run."""
    calls: list[tuple[str, tuple[int, ...]]] = []
    run = replay.Launch.__call__

    def call(self, *tensors):
        calls.append((self._kernel.fn.__name__, self._grid))
        run(self, *tensors)

    monkeypatch.setattr(replay.Launch, "__call__", call)
    return calls


def pair(T: int, N: int, K: int, dtype=F32, seed: int = 0):
    return randn(T, N, dtype=dtype, seed=seed), randn(T, K, dtype=dtype, seed=seed + 100)


def one_by_one(pairs):
    return [launch.wgrad_norm_sq([each]) for each in pairs]


def exact(dy, x) -> float:
    return (dy.double().T @ x.double()).square().sum().item()


# (T, N, K): both forms, ragged, whole, one token, no tokens, more tokens than one tile, no rows
SHAPES = [(33, 64, 70), (33, 20, 70), (130, 65, 33), (64, 64, 128), (1, 3, 5), (0, 64, 5), (4, 0, 5)]


def mixture() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two of each shape and dtype, taking turns, and what goes one by one between them."""
    pairs = [
        pair(*shape, dtype=dtype, seed=10 * seed)
        for seed in range(2)
        for shape in SHAPES
        for dtype in (F32, BF16, F16)
    ]
    pairs.insert(5, (randn(41, 24)[1:, 3:], randn(40, 30)))  # an address that no table takes
    pairs.insert(9, (randn(4, 8).T, randn(8, 16)[:, ::2]))  # no unit stride
    pairs.insert(20, (randn(20, 12, dtype=BF16).T, randn(12, 40, dtype=BF16)))
    pairs.append((randn(1, 48).expand(24, 48), randn(24, 16) + 3.0))
    return pairs


@pytest.mark.usefixtures("wide_by_gram")
def test_every_pair_has_the_bits_that_it_has_alone():
    pairs = mixture()
    norms = launch.wgrad_norms_sq(pairs)
    assert norms.shape == (len(pairs),) and norms.dtype == F32
    assert same_bits(norms, one_by_one(pairs))
    for norm, (dy, x) in zip(norms, pairs, strict=True):
        assert norm.item() == pytest.approx(exact(dy, x), rel=NORM_RTOL)
    # All different, but for those of nothing: no two pairs could change places unseen.
    assert len(norms.unique()) == len(pairs) - 12 + 1


@pytest.mark.usefixtures("wide_by_gram")
def test_the_order_of_launches_of_a_mixture(launched):
    pairs = [pair(33, N, 70, seed=seed) for seed in range(3) for N in (64, 20)]
    launch.wgrad_norms_sq(pairs)
    plan = norm_plan.gram_plan(33, 64, 70, F32)
    programs = norm_plan.FP32.programs(20, 70)
    assert launched == [
        ("_grams_columns_kernel", (plan.blocks_n + plan.blocks_k, 3, 1)),
        ("_grams_parts_kernel", (plan.side, plan.side, 3 * (plan.parts_n + plan.parts_k))),
        ("_grams_product_kernel", (plan.side, plan.side + 1, 3 * plan.block_t // norm_plan.SLICE_ROWS)),
        ("_gemms_kernel", (programs, 3, 1)),
        ("_finish_all_kernel", (6, 1, 1)),
    ]


def test_constant_inputs_are_centred(monkeypatch):
    """Rows that are nearly the same cancel without the mean, here 1e4 times the norm."""
    monkeypatch.setattr(norm_plan, "gram_is_cheaper", lambda *_: True)
    pairs = []
    for seed in range(3):
        dy, row = randn(40, 48, seed=seed), 30.0 * randn(1, 80, seed=seed + 5)
        pairs.append((dy - dy.mean(0), row + 0.3 * randn(40, 80, seed=seed + 9)))
        pairs.append((dy, row.expand(40, 80).contiguous()))
    norms = launch.wgrad_norms_sq(pairs)
    assert same_bits(norms, one_by_one(pairs))
    for norm, (dy, x) in zip(norms, pairs, strict=True):
        assert norm.item() == pytest.approx(exact(dy, x), rel=1e-3)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.usefixtures("wide_by_gram")
def test_non_finite_inputs_reach_their_own_norm_only(bad):
    pairs = [pair(33, N, 70, seed=seed) for seed in range(3) for N in (64, 20)]
    pairs[2][0][7, 3] = bad
    pairs[5][1][32, 69] = bad
    finite = launch.wgrad_norms_sq(pairs).isfinite().tolist()
    assert finite == [True, True, False, True, True, False]


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_scratch_is_shared_and_bounded(most, launched, monkeypatch):
    monkeypatch.setattr(norm_plan, "gram_is_cheaper", lambda *_: True)
    pairs = [pair(33, 40, 50, BF16, seed) for seed in range(7)]
    wanted = one_by_one(pairs)
    launched.clear()
    scratch = 4 * grouped_norm._slot(norm_plan.gram_plan(33, 40, 50, BF16).scratch)
    bound = most * scratch + scratch // 2
    monkeypatch.setattr(grouped_norm, "SCRATCH_BYTES", bound if most > 1 else 1)
    sizes = []
    empty = torch.empty

    def counted(*size, **options):
        result = empty(*size, **options)
        sizes.append(result.nbytes)
        return result

    monkeypatch.setattr(torch, "empty", counted)
    norms = launch.wgrad_norms_sq(pairs)
    assert same_bits(norms, wanted)
    partials = 4 * 7 * grouped_norm._slot(norm_plan.gram_plan(33, 40, 50, BF16).partials)
    assert sizes == [4 * 7, most * scratch + partials]
    assert len(launched) == 3 * -(-7 // most) + 1
    columns = [grid[1] for name, grid in launched if name == "_grams_columns_kernel"]
    assert sum(columns) == 7 and max(columns) == most


def test_the_bound_of_the_scratch_holds_for_large_pairs():
    device = torch.device(DEVICE)
    for T in (32, 128, 512, 2048):
        for N, K in ((14336, 4096), (4096, 14336)):
            key = ((T, N), (T, K), (N, 1), (K, 1), BF16, BF16, True)
            kind = grouped_norm._kind(key, device)
            if isinstance(kind.plan, norm_plan.GramPlan):
                assert kind.most == 1 or 4 * kind.most * kind.scratch <= grouped_norm.SCRATCH_BYTES == 1 << 26
                assert 4 * (kind.most + 1) * kind.scratch > grouped_norm.SCRATCH_BYTES
                assert kind.most * (kind.plan.parts_n + kind.plan.parts_k) <= grouped_norm.GRID_LIMIT


def test_fp16_never_goes_by_gram(monkeypatch, launched):
    monkeypatch.setattr(norm_plan, "gram_is_cheaper", lambda *_: True)
    pairs = [(300 * dy, 300 * x) for dy, x in (pair(20, 30, 40, F16, seed) for seed in range(2))]
    assert same_bits(launch.wgrad_norms_sq(pairs), one_by_one(pairs))
    assert not any("gram" in name for name, _ in launched)


def test_one_pair_needs_no_table(launched):
    (norm,) = launch.wgrad_norms_sq([pair(33, 20, 70)])
    assert [name for name, _ in launched] == ["_gemm_norm_kernel", "_finish_kernel"]
    assert same_bits([norm], one_by_one([pair(33, 20, 70)]))


def test_descriptors_are_for_one_pair(monkeypatch):
    taken = []
    monkeypatch.setattr(grouped_norm, "uses_descriptors", lambda T, N, *_: N == 24)
    monkeypatch.setattr(wgrad_norm, "uses_descriptors", lambda T, N, *_: N == 24)
    monkeypatch.setattr(
        wgrad_norm, "descriptor_norm_sq", lambda dy, x: taken.append(dy) or torch.tensor(7.0, device=DEVICE)
    )
    pairs = [pair(33, N, 70, BF16, seed) for seed in range(2) for N in (24, 20)]
    norms = launch.wgrad_norms_sq(pairs)
    assert norms[0] == norms[2] == 7.0 and [dy is pairs[i][0] for dy, i in zip(taken, (0, 2), strict=True)]
    assert same_bits(norms[1::2], one_by_one(pairs[1::2]))


def test_what_does_not_fit_is_refused():
    good = pair(3, 4, 5)
    with pytest.raises(ValueError, match="at least one pair"):
        launch.wgrad_norms_sq([])
    for bad, message in (
        ((randn(3, 4), randn(2, 5)), r"segment \(3, 4\), \(2, 5\) is not"),
        ((randn(3, 4), randn(3, 5, dtype=BF16)), "segment dtypes"),
        ((randn(3, 4).double(), randn(3, 5).double()), "segment dtypes"),
        ((randn(3, 4), randn(15)), "must be 2-D"),
    ):
        with pytest.raises(ValueError, match=message):
            launch.wgrad_norms_sq([good, bad, good])


def test_reference_takes_the_same_pairs():
    pairs = [pair(33, 20, 70), pair(0, 4, 5), pair(5, 30, 6, BF16)]
    norms = reference.wgrad_norms_sq(pairs)
    assert torch.equal(norms, torch.stack([reference.wgrad_norm_sq([each]) for each in pairs]))
    torch.testing.assert_close(launch.wgrad_norms_sq(pairs), norms, rtol=NORM_RTOL, atol=0)


def test_the_slices_of_a_tile_are_few():
    """`grouped_norm._kind` counts on 16 for the third axis of the grid."""
    for dtype in (F32, BF16):
        plan = norm_plan.gram_plan(4096, 4096, 4096, dtype)
        _, _, product = wgrad_gram.gram_kinds(plan, 4096, 4096, 4096, (4096, 1, 4096, 1))
        assert product.grid[2] <= 16
