"""Embedding gradients in both backends: against float64, plain torch in the same dtypes, and each other."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge_hf import reference
from forge_hf.kernels import embedding, launch, paths, plan, wgrad_chunks, wgrad_update
from tests.kernel_cases import (
    BF16,
    DEVICE,
    F16,
    F32,
    KEY,
    LR_SHARE,
    NORM_RTOL,
    RULES,
    ULPS,
    plain_rule,
    poison,  # noqa: F401 - a fixture
    randn,
    same_bits,
    same_sums,
    scalars_of,
    setup,
    update,
)

pytestmark = pytest.mark.usefixtures("poison")
BACKENDS = {"triton": launch, "reference": reference}


def draw_ids(T: int, N: int, kind: str = "repeated", dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Ids of T tokens; "repeated" uses few rows, "padded" leaves some out, "one" has a single row."""
    generator = torch.Generator().manual_seed(T + N)
    if kind == "one":
        return torch.full((T,), N - 1, dtype=dtype, device=DEVICE)
    low, high = {"repeated": (0, max(1, N // 3)), "padded": (-1, min(N, 3)), "spread": (0, N)}[kind]
    return torch.randint(low, high, (T,), generator=generator).to(DEVICE, dtype)


def matrix(ids: torch.Tensor, dy: torch.Tensor, N: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The table's gradient as a matrix."""
    known = ids >= 0
    result = torch.zeros(N, dy.shape[1], dtype=dtype, device=dy.device)
    return result.index_add_(0, ids[known].long(), dy[known].to(dtype))


def run(backend, name, w, segments, lookups, moments, s, **options):
    """Update copies; returns (weight, *moments) and the norm."""
    w, moments = w.clone(), tuple(m.clone() for m in moments)
    options = {"want_norm_sq": True, **options}
    norm_sq = backend.wgrad_update_(w, segments, moments, RULES[name][0], s, lookups=lookups, **options)
    return (w, *moments), norm_sq


def assert_three_way(got, exact, plain, lr):
    """Our distance to float64 is at most plain torch's own, plus rounding of ties."""
    for index, (ours, want, usual) in enumerate(zip(got, exact, plain, strict=True)):
        slack = ULPS * want.abs().max() + (LR_SHARE * lr if index == 0 else 0)
        error = (ours.double() - want).abs().max()
        assert error <= (usual.to(ours.dtype).double() - want).abs().max() + slack, f"tensor {index}"


# (N, K, T): one token, none, ragged everywhere, whole tiles, a run of several pieces
SHAPES = [(9, 3, 1), (9, 70, 0), (65, 130, 33), (16, 256, 64), (5, 20, 200)]
CASES = [
    (name, weight, moment, shape, kind)
    for name, (weight, moment), (shape, kind) in itertools.product(
        RULES,
        [(F32, F32), (BF16, BF16), (BF16, F32), (F16, BF16)],
        [*zip(SHAPES, ["spread", "repeated", "padded", "repeated", "one"], strict=True)],
    )
    if (RULES[name][1] or moment == F32) and (name == "adamw" or shape in (SHAPES[1], SHAPES[2]))
]


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "weight", "moment", "shape", "kind"), CASES)
def test_table_three_way(name, weight, moment, shape, kind, backend, step):
    N, K, T = shape
    s = scalars_of(name, step)
    w, moments = setup(name, N, K, weight, moment, fresh=step == 1)
    ids, dy = draw_ids(T, N, kind), randn(T, K, dtype=weight, seed=3)
    got, norm_sq = run(BACKENDS[backend], name, w, [], [(ids, dy)], moments, s)
    g64 = matrix(ids, dy, N)
    exact = plain_rule(name, w.double(), g64, [m.double() for m in moments], s)
    plain = plain_rule(name, w, matrix(ids, dy, N, weight), moments, s)
    assert norm_sq.item() == pytest.approx(g64.square().sum().item(), rel=NORM_RTOL)
    assert BACKENDS[backend].wgrad_norm_sq([], [(ids, dy)]).item() == pytest.approx(
        g64.square().sum().item(), rel=NORM_RTOL
    )
    assert_three_way(got, exact, plain, s.lr)


TIED = [(9, 33, 4, 7), (65, 130, 33, 20), (64, 128, 64, 64), (20, 16, 0, 9), (20, 16, 9, 0), (7, 8, 0, 0)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", TIED)
@pytest.mark.parametrize(
    ("name", "weight", "operand"),
    [("adamw", F32, F32), ("adamw", F32, BF16), ("adamw", BF16, BF16), ("lion", F32, F32), ("sgd", F32, F16)],
)
def test_tied_weight_three_way(name, weight, operand, shape, backend):
    """Pairs and lookups make one gradient, and one norm with the cross term."""
    N, K, T, S = shape
    s = scalars_of(name)
    w, moments = setup(name, N, K, weight, F32)
    dy, x = randn(T, N, dtype=operand, seed=3), randn(T, K, dtype=operand, seed=4)
    lookups = [
        (draw_ids(S, N), randn(S, K, dtype=weight, seed=5)),
        (draw_ids(3, N), randn(3, K, dtype=weight)),
    ]
    got, norm_sq = run(BACKENDS[backend], name, w, [(dy, x)], lookups, moments, s)
    g64 = dy.double().T @ x.double() + sum(matrix(*lookup, N) for lookup in lookups)
    plain_g = dy.T.to(weight) @ x.to(weight) + sum(matrix(*lookup, N, weight) for lookup in lookups)
    exact = plain_rule(name, w.double(), g64, [m.double() for m in moments], s)
    assert norm_sq.item() == pytest.approx(g64.square().sum().item(), rel=NORM_RTOL)
    norm_sq = BACKENDS[backend].wgrad_norm_sq([(dy, x)], lookups)
    assert norm_sq.item() == pytest.approx(g64.square().sum().item(), rel=NORM_RTOL)
    assert_three_way(got, exact, plain_rule(name, w, plain_g, moments, s), s.lr)


@pytest.mark.parametrize("tile", [plan.GENERIC, plan.HOPPER_PAIR, plan.HOPPER_WIDE, plan.HOPPER_WIDE_FP32])
def test_every_tile_adds_the_rows(tile, monkeypatch):
    monkeypatch.setattr(wgrad_update, "update_tile", lambda *_: tile)
    N, K, T = 150, 270, 5
    w, moments = setup("adamw", N, K, F32, F32)
    segments = [(randn(T, N, seed=3), randn(T, K, seed=4))]
    lookups, s = [(draw_ids(40, N), randn(40, K, seed=5))], scalars_of("adamw")
    got, norm_sq = run(launch, "adamw", w, segments, lookups, moments, s)
    want, expected = run(reference, "adamw", w, segments, lookups, moments, s)
    assert norm_sq.item() == pytest.approx(expected.item(), rel=NORM_RTOL)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=LR_SHARE * s.lr)


def test_chunks_add_the_rows(monkeypatch):
    monkeypatch.setattr(paths, "uses_chunks", lambda *_: True)
    monkeypatch.setattr(wgrad_chunks, "BUFFER_BYTES", 4 * 16 * wgrad_chunks.ROW_STEP)
    N, K, T = 300, 16, 5
    w, moments = setup("adamw", N, K, F32, F32)
    segments = [(randn(T, N, seed=3), randn(T, K, seed=4))]
    lookups, s = [(draw_ids(90, N, "spread"), randn(90, K, seed=5))], scalars_of("adamw")
    got, norm_sq = run(launch, "adamw", w, segments, lookups, moments, s)
    want, expected = run(reference, "adamw", w, segments, lookups, moments, s)
    assert norm_sq.item() == pytest.approx(expected.item(), rel=NORM_RTOL)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=LR_SHARE * s.lr)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 150), min_size=1, max_size=3),
    st.integers(1, 40),
    st.integers(1, 300),
    st.sampled_from(["repeated", "padded", "spread", "one"]),
    st.sampled_from([F32, BF16, F16]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_sums_and_dense_accumulation_of_any_shape(tokens, N, K, kind, dtype, id_dtype):
    lookups = [(draw_ids(T, N, kind, id_dtype), randn(T, K, dtype=dtype, seed=T)) for T in tokens]
    exact = sum(matrix(*lookup, N) for lookup in lookups)
    unit = sum(matrix(ids, dy.abs(), N) for ids, dy in lookups) + 1e-30
    start = randn(N, K, seed=9)
    for backend in BACKENDS.values():
        buffer = start.clone()
        backend.accumulate_lookups_(buffer, lookups)
        error = (buffer.double() - start.double() - exact).abs()
        assert (error <= 40 * 2.0**-24 * (unit + start.abs())).all()
        assert backend.wgrad_norm_sq([], lookups).item() == pytest.approx(
            exact.square().sum().item(), rel=NORM_RTOL, abs=1e-12
        )


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_dense_accumulation_rounds_once_per_row(dtype):
    """A row's tokens are summed in fp32; in 16 bits 300 of them would stop growing."""
    ids, dy = torch.zeros(300, dtype=torch.int32, device=DEVICE), torch.ones(300, 20, dtype=dtype).to(DEVICE)
    for backend in BACKENDS.values():
        buffer = torch.zeros(2, 20, dtype=dtype, device=DEVICE)
        backend.accumulate_lookups_(buffer, [(ids, dy)])
        assert (buffer[0] == 300).all() and not buffer[1].any()


def test_dense_accumulation_in_slabs_of_columns():
    ids, dy, buffer = draw_ids(70, 6), randn(70, 600), randn(6, 600)
    expected = buffer.double() + matrix(ids, dy, 6)
    embedding.accumulate_rows(buffer, [(ids, dy)], slab_bytes=1)
    torch.testing.assert_close(buffer.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strides", ["transposed", "expanded", "one value", "every other"])
def test_any_strides(strides):
    dy = {
        "transposed": lambda: randn(20, 30).t(),
        "expanded": lambda: randn(1, 20).expand(30, 20),
        "one value": lambda: randn(1, 1).expand(30, 20),
        "every other": lambda: randn(60, 40)[::2, ::2],
    }[strides]()
    ids = draw_ids(30, 8)
    w, moments = setup("sgd", 8, 20, F32, F32)
    got, _ = run(launch, "sgd", w, [], [(ids, dy)], moments, scalars_of("sgd"))
    want, _ = run(launch, "sgd", w, [], [(ids, dy.contiguous())], moments, scalars_of("sgd"))
    assert same_sums(got, want)


@pytest.mark.parametrize("weight, moment", [(F32, F32), (BF16, BF16), (F16, BF16)])
@pytest.mark.parametrize("K", [64, 192, 2304, 50])
def test_random_bits_and_coefficient_as_for_a_dense_gradient(K, weight, moment):
    """The table's tiles number elements as every other kernel does, whether they divide the row or not."""
    N, T = 9, 12
    w, moments = setup("adamw", N, K, weight, moment)
    ids, dy = draw_ids(T, N, "spread"), randn(T, K, dtype=weight, seed=3)
    options = {"coefficient": torch.tensor(0.3, device=DEVICE), "rng_key": KEY}
    got, _ = run(launch, "adamw", w, [], [(ids, dy)], moments, scalars_of("adamw"), **options)
    dense = (w.clone(), *(m.clone() for m in moments))
    grad = torch.zeros(N, K, device=DEVICE)
    launch.accumulate_lookups_(grad, [(ids, dy)])
    launch.dense_update_(dense[0], grad, dense[1:], "adamw", scalars_of("adamw"), **options)
    assert same_bits(got, dense)
    want, _ = run(reference, "adamw", w, [], [(ids, dy)], moments, scalars_of("adamw"), **options)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-2, atol=1e-3)
        if ours.dtype != F32:  # a draw apart only where fp32 results differ in their last bit
            assert (ours != theirs).float().mean() < 0.02


def test_a_row_without_tokens_decays_as_with_a_gradient_of_zeros():
    w, moments = setup("adamw", 6, 8, F32, F32)
    ids, dy = torch.full((5,), 2, dtype=torch.int32, device=DEVICE), randn(5, 8)
    s = scalars_of("adamw")
    got, _ = run(launch, "adamw", w, [], [(ids, dy)], moments, s)
    zero, _ = update("adamw", w, [(randn(0, 6), randn(0, 8))], moments, s)
    others = [0, 1, 3, 4, 5]
    assert same_bits([t[others] for t in got], [t[others] for t in zero])
    assert not torch.equal(got[0][2], zero[0][2])


def test_the_same_step_twice_gives_the_same_bits():
    w, moments = setup("adamw", 20, 30, F32, F32)
    lookups = [(draw_ids(150, 20), randn(150, 30))]
    first, norm = run(launch, "adamw", w, [], lookups, moments, scalars_of("adamw"))
    again, norm_again = run(launch, "adamw", w, [], lookups, moments, scalars_of("adamw"))
    assert same_bits(first, again) and torch.equal(norm, norm_again)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_non_finite_gradients_show_in_the_norm_unless_they_belong_to_padding(value, backend):
    ids, dy = draw_ids(9, 5, "spread"), randn(9, 4)
    dy[3] = value
    assert not BACKENDS[backend].wgrad_norm_sq([], [(ids, dy)]).isfinite()
    ids[3] = -1
    assert BACKENDS[backend].wgrad_norm_sq([], [(ids, dy)]).isfinite()


@pytest.mark.parametrize(
    "ids, dy",
    [
        (torch.zeros(2, 2, dtype=torch.int32), torch.zeros(4, 8)),
        (torch.zeros(3, dtype=torch.int32), torch.zeros(4, 8)),
        (torch.zeros(4, dtype=torch.int32), torch.zeros(4, 7)),
        (torch.zeros(4), torch.zeros(4, 8)),
        (torch.zeros(4, dtype=torch.int32), torch.zeros(4, 8, dtype=torch.float64)),
    ],
)
def test_wrong_lookups_are_refused(ids, dy):
    w, moments = setup("adamw", 6, 8, F32, F32)
    with pytest.raises(ValueError, match="lookup"):
        run(launch, "adamw", w, [], [(ids.to(DEVICE), dy.to(DEVICE))], moments, scalars_of("adamw"))
    with pytest.raises(ValueError, match="at least one"):
        launch.wgrad_norm_sq([], [])
