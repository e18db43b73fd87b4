"""FactoredGradient against the matrix it stands for, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from forge_hf import FactoredGradient, ForgeRefusal
from forge_hf.projection import project_left, project_right
from forge_hf.reference import wgrad_norm_sq

from .tolerances import DENSE_BF16, GEMM_FP32, NORM_GRAM

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(n: int, k: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(n, k, dtype=dtype))


def pairs_of(
    tokens: list[int], n: int, k: int, dtype: torch.dtype, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    return [(draw(t, n), draw(t, k)) for t in tokens]


def exact(pairs: list[tuple[Tensor, Tensor]], n: int, k: int) -> Tensor:
    total = torch.zeros(n, k, dtype=torch.float64)
    for dy, x in pairs:
        total += dy.double().t() @ x.double()
    return total


def size(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """sum ||dY|| ||X||: the unit of rounding errors of the products."""
    return sum((dy.double().norm() * x.double().norm()).item() for dy, x in pairs) + 1e-30


problems = st.tuples(
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
    st.integers(1, 17),
    st.integers(1, 17),
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
)


def filled(
    pairs: list[tuple[Tensor, Tensor]], n: int, k: int, dtype: torch.dtype, bounded: bool
) -> FactoredGradient:
    gradient = FactoredGradient(weight(n, k, dtype))
    for dy, x in pairs:
        gradient.add_pair(dy, x, bounded=bounded)
    return gradient


@settings(max_examples=60, deadline=None)
@given(problems, st.booleans(), st.booleans())
def test_every_question_has_the_answer_of_the_matrix(problem, bounded, scaled):
    tokens, n, k, dtype, seed = problem
    pairs = pairs_of(tokens, n, k, dtype, seed)
    gradient = filled(pairs, n, k, dtype, bounded)
    matrix, unit = exact(pairs, n, k), size(pairs)
    if scaled:
        gradient.scale_(torch.tensor(0.25))
        matrix, unit = matrix * 0.25, unit * 0.25
    stored = len(tokens) * DENSE_BF16 if dtype != torch.float32 else 0.0
    limit = (GEMM_FP32 + (stored if gradient.buffer is not None else 0.0)) * unit
    assert (gradient.norm_sq().sqrt().double() - matrix.norm()).abs() <= limit + NORM_GRAM * unit
    assert (gradient.dense().double() - matrix).norm() <= (GEMM_FP32 + stored) * unit
    generator = torch.Generator().manual_seed(seed)
    q, p = torch.randn(k, 3, generator=generator), torch.randn(n, 2, generator=generator)
    factor = 0.25 if scaled else 1.0
    assert (
        factor * project_right(gradient, q.t()).t().double() - matrix @ q.double()
    ).norm() <= limit * q.norm()
    assert (
        factor * project_left(gradient, p.t()).double() - p.t().double() @ matrix
    ).norm() <= limit * p.norm()


@settings(max_examples=60, deadline=None)
@given(problems)
def test_pairs_never_cost_more_than_the_matrix(problem):
    tokens, n, k, dtype, seed = problem
    gradient = FactoredGradient(weight(n, k, dtype))
    for dy, x in pairs_of(tokens, n, k, dtype, seed):
        gradient.add_pair(dy, x)
        assert gradient.held_bytes() <= gradient.dense_bytes == n * k * dtype.itemsize


@settings(max_examples=30, deadline=None)
@given(problems, problems, st.booleans(), st.booleans())
def test_accumulate_adds(first, second, scale_first, scale_second):
    tokens, n, k, dtype, seed = first
    ours, others = pairs_of(tokens, n, k, dtype, seed), pairs_of(second[0], n, k, dtype, seed + 1)
    gradient, other = filled(ours, n, k, dtype, True), filled(others, n, k, dtype, False)
    expected = exact(ours, n, k) * (0.5 if scale_first else 1.0) + exact(others, n, k) * (
        3.0 if scale_second else 1.0
    )
    if scale_first:
        gradient.scale_(torch.tensor(0.5))
    if scale_second:
        other.scale_(torch.tensor(3.0))
    gradient.accumulate(other)
    roundings = 0.0 if dtype == torch.float32 else DENSE_BF16 * (len(tokens) + len(second[0]) + 3)
    assert (gradient.dense().double() - expected).norm() <= (GEMM_FP32 + roundings) * (
        size(ours) + 3 * size(others)
    )


def lookups_of(
    tokens: list[int], n: int, k: int, dtype: torch.dtype, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """Ids in [-1, n), few of them, and dY."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(-1, max(1, n // 2), (t,), generator=generator).int() for t in tokens]
    return [(each, torch.randn(len(each), k, generator=generator).to(dtype)) for each in ids]


def one_hot(lookups: list[tuple[Tensor, Tensor]], n: int) -> list[tuple[Tensor, Tensor]]:
    """The pairs that the lookups stand for: dY of a linear layer is one-hot, its input is dY."""
    return [
        (torch.eye(n, dtype=torch.float64)[ids.long().clamp(min=0)] * (ids >= 0).unsqueeze(1), dy)
        for ids, dy in lookups
    ]


@settings(max_examples=80, deadline=None)
@given(problems, st.lists(st.integers(0, 20), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_lookups_and_pairs_are_one_gradient(problem, looked_up, bounded, scaled):
    tokens, n, k, dtype, seed = problem
    pairs = pairs_of(tokens[:-1], n, k, dtype, seed)
    lookups = lookups_of(looked_up, n, k, dtype, seed)
    gradient, other = (FactoredGradient(weight(n, k, dtype)) for _ in range(2))
    for ids, dy in lookups[:1]:
        gradient.add_lookup(ids, dy)
    for pair in pairs:
        gradient.add_pair(*pair, bounded=bounded)
        assert not bounded or gradient.held_bytes() <= gradient.dense_bytes
    for ids, dy in lookups[1:]:
        other.add_lookup(ids, dy)
        assert other.held_bytes() <= other.dense_bytes
    gradient.accumulate(other)
    everything = [*pairs, *one_hot(lookups, n)]
    matrix, unit = exact(everything, n, k), size(everything)
    if scaled:
        gradient.scale_(torch.tensor(0.25))
        matrix, unit = matrix * 0.25, unit * 0.25
    stored = (len(everything) + 2) * DENSE_BF16 if dtype != torch.float32 else 0.0
    limit = (GEMM_FP32 + (stored if gradient.buffer is not None else 0.0)) * unit
    assert (gradient.norm_sq().sqrt().double() - matrix.norm()).abs() <= limit + NORM_GRAM * unit
    assert (gradient.dense().double() - matrix).norm() <= (GEMM_FP32 + stored) * unit
    generator = torch.Generator().manual_seed(seed)
    q, p = torch.randn(k, 3, generator=generator), torch.randn(n, 2, generator=generator)
    factor = 0.25 if scaled else 1.0
    assert (
        factor * project_right(gradient, q.t()).t().double() - matrix @ q.double()
    ).norm() <= limit * q.norm()
    assert (
        factor * project_left(gradient, p.t()).double() - p.t().double() @ matrix
    ).norm() <= limit * p.norm()


def test_the_cross_term_of_pairs_and_lookups_counts():
    """dY of the head and of the table cancel: the norm of the sum is 0, not that of its parts."""
    x = torch.randn(1, 30)
    dy = torch.zeros(1, 20)
    dy[0, 7] = 1.0
    gradient = FactoredGradient(weight(20, 30))
    gradient.add_pair(dy, x)
    gradient.add_lookup(torch.tensor([7]), -x)
    assert len(gradient.segments) == len(gradient.looked_up) == 1
    assert gradient.norm_sq().item() == 0.0


def test_write_into_a_held_output_gradient_of_a_table_is_noticed():
    dy = torch.randn(2, 30)
    gradient = FactoredGradient(weight(20, 30), "words.weight")
    gradient.add_lookup(torch.tensor([7, 7]), dy)
    dy.add_(1.0)
    with pytest.raises(ForgeRefusal, match="The output gradient of 'words.weight' was changed in place"):
        gradient.lookups()


@pytest.mark.parametrize(
    "n, k, fitting, too_many, why",
    [
        (10, 30, [3], [5], "ids and dY fit, but not with their sums by row"),
        (100, 2, [10], [15], "nor with the index of the rows and the sorted ids"),
        (50, 30, [9], [9, 9], "nor with one dY made of two"),
    ],
)
def test_use_of_lookups_counts_in_the_bound(n, k, fitting, too_many, why):
    for tokens, dense in ((fitting, False), (too_many, True)):
        gradient = FactoredGradient(weight(n, k))
        for t in tokens:
            gradient.add_lookup(torch.arange(t, dtype=torch.int32), torch.randn(t, k))
        assert (gradient.buffer is not None) is dense, why
        assert len(gradient.looked_up) == (0 if dense else len(tokens))
        assert sum(t * (k + 1) * 4 for t in tokens) < gradient.dense_bytes


def test_small_view_of_a_big_output_gradient_is_copied():
    big = torch.randn(1000, 30)
    gradient = FactoredGradient(weight(20, 30))
    gradient.add_lookup(torch.arange(3, dtype=torch.int32), big[10:13])
    assert gradient.held_bytes() == 3 * (30 + 1) * 4


@pytest.mark.parametrize("tokens", [[3], [40], [2, 5, 1]])
def test_both_forms_of_the_norm_agree(tokens):
    from forge_hf import reference

    pairs = pairs_of(tokens, 20, 30, torch.float32)
    matrix = exact(pairs, 20, 30)
    gram = reference._norm_sq_gram(pairs)
    assert gram.item() == pytest.approx(matrix.square().sum().item(), rel=NORM_GRAM)
    assert wgrad_norm_sq(pairs).item() == pytest.approx(matrix.square().sum().item(), rel=NORM_GRAM)


@pytest.mark.parametrize("tokens", [2, 60])
def test_norm_of_a_gradient_that_cancels(tokens):
    ((dy, x),) = pairs_of([tokens], 20, 30, torch.float32)
    pairs = [(dy, x), (-dy, x)]
    unit = size(pairs) ** 2
    norm_sq = wgrad_norm_sq(pairs)
    assert 0.0 <= norm_sq.item() <= 1e-6 * unit


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("tokens", [2, 60])
@pytest.mark.parametrize("side", [0, 1])
def test_norm_shows_every_non_finite_factor(value, tokens, side):
    pairs = pairs_of([tokens, 1], 20, 30, torch.float32)
    pairs[0][side][1, 3] = value
    pairs[0][1 - side][1].zero_()  # inf * 0 is nan in the matrix as well
    assert not torch.isfinite(wgrad_norm_sq(pairs))


def test_shared_storage_counts_once_and_expanded_gradients_cost_nothing():
    x = torch.randn(4, 8)
    dy = torch.ones(()).expand(4, 100)
    gradient = FactoredGradient(weight(100, 8))
    gradient.add_pair(dy, x)
    assert gradient.held_bytes() == x.nbytes + 4
    gradient.add_pair(dy, x)
    assert gradient.held_bytes() == x.nbytes + 4
    assert torch.equal(gradient.dense(), 2 * torch.ones(100, 4) @ x)


def test_small_view_of_a_big_storage_is_copied():
    big = torch.randn(1000, 30)
    gradient = FactoredGradient(weight(20, 30))
    gradient.add_pair(torch.randn(3, 20), big[10:13])
    assert gradient.held_bytes() == (3 * 20 + 3 * 30) * 4
    assert torch.equal(gradient.segments[0].x_TK, big[10:13])


def test_view_that_is_a_little_smaller_than_its_storage_stays_within_the_bound():
    """A quarter of slack is held without a copy, but counts."""
    n, k, t = 40, 40, 18
    gradient = FactoredGradient(weight(n, k))
    gradient.add_pair(torch.randn(22, n)[:t], torch.randn(22, k)[:t])
    assert gradient.held_bytes() <= gradient.dense_bytes


def test_write_into_a_held_tensor_is_noticed():
    dy, x = pairs_of([3], 20, 30, torch.float32)[0]
    for tensor, what in ((dy, "output gradient"), (x, "input")):
        gradient = FactoredGradient(weight(20, 30), "layer.weight")
        gradient.add_pair(dy, x)
        tensor.add_(1.0)
        with pytest.raises(ForgeRefusal, match=f"The {what} of 'layer.weight' was changed in place"):
            gradient.pairs()


def test_coefficient_belongs_to_what_was_there():
    ((dy, x),) = pairs_of([2], 20, 30, torch.float32)
    gradient = FactoredGradient(weight(20, 30))
    gradient.add_pair(dy, x)
    gradient.scale_(torch.tensor(0.5))
    assert gradient.norm_sq().item() == pytest.approx(0.25 * (dy.t() @ x).square().sum().item(), rel=1e-4)
    gradient.add_pair(dy, x)
    assert torch.allclose(gradient.dense(), 1.5 * dy.t() @ x, rtol=1e-5, atol=1e-5)
    assert gradient.unscaled_norm_sq().item() == pytest.approx(
        (1.5 * dy.t() @ x).square().sum().item(), rel=1e-4
    )


def test_empty_gradient_is_zero():
    gradient = FactoredGradient(weight(3, 4))
    assert gradient.empty
    assert gradient.norm_sq().item() == 0.0
    assert not gradient.dense().any()


def test_products_do_not_see_autocast():
    pairs = pairs_of([5], 20, 30, torch.float32)
    gradient = filled(pairs, 20, 30, torch.float32, True)
    q, p = torch.randn(30, 2), torch.randn(20, 2)
    plain = [
        gradient.norm_sq(),
        project_right(gradient, q.t()),
        project_left(gradient, p.t()),
        gradient.dense(),
    ]
    with torch.autocast("cpu", torch.bfloat16):
        again = filled(pairs, 20, 30, torch.float32, True)
        inside = [again.norm_sq(), project_right(again, q.t()), project_left(again, p.t()), again.dense()]
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))
