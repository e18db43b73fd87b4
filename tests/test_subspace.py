"""Bases: orthonormal rows, the energy that they catch, and what happens to moments when they change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_hf import FactoredGradient
from forge_hf.low_rank import find_basis
from forge_hf.projected import ProjectedGradient
from forge_hf.subspace import (
    PROJ_TYPES,
    Basis,
    low_rank_shape,
    orthonormal_rows,
    project,
    random_basis,
    refreshed,
    rotated,
    sides,
)
from tests.tolerances import GEMM_FP32, ORTHONORMAL

GROUP = {"rank": 4, "proj_type": "std"}


def gradient_of(dy: torch.Tensor, x: torch.Tensor, cls: type = FactoredGradient) -> FactoredGradient:
    """A gradient dY^T X from one pair."""
    gradient = cls(torch.zeros(dy.shape[1], x.shape[1]))
    gradient.add_pair(dy, x, bounded=False)
    return gradient


def decaying(n: int, k: int, decay: float, tokens: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """A pair whose product has singular values exp(-decay i), up to the size of random directions."""
    strengths = torch.exp(-decay * torch.arange(min(n, k)))
    left, right = torch.linalg.qr(torch.randn(n, n))[0], torch.linalg.qr(torch.randn(k, k))[0]
    matrix = left[:, : len(strengths)] * strengths @ right[: len(strengths)]
    dy = torch.linalg.qr(torch.randn(tokens, n))[0]
    return dy, dy @ matrix


def deviation(rows: torch.Tensor) -> float:
    """How far rows are from orthonormal."""
    return float((rows @ rows.t() - torch.eye(len(rows))).abs().max())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(0, 30), st.integers(0, 40), st.floats(-30, 15), st.integers(0, 2**31 - 1)
)
def test_rows_become_orthonormal_whatever_they_are(rows, more, independent, exponent, seed):
    """Few independent rows, rows of zeros and any size: the result spans what was given."""
    generator = torch.Generator().manual_seed(seed)
    size = rows + more
    given_rows = torch.randn(rows, min(independent, rows), generator=generator)
    given_rows = given_rows @ torch.randn(min(independent, rows), size, generator=generator) * 10.0**exponent
    result = orthonormal_rows(given_rows)
    assert deviation(result) < ORTHONORMAL
    if exponent > -30:
        lost = given_rows - given_rows @ result.t() @ result
        assert lost.norm() <= 1e-4 * given_rows.norm()


def test_cholesky_and_householder_turn_no_direction_around():
    """Rows that are nearly orthonormal already stay where they are."""
    start = orthonormal_rows(torch.randn(6, 30))
    moved = start + 1e-3 * torch.randn(6, 30)
    flat = torch.cat([moved, moved[:1] + moved[1:2]])  # one dependent row: Householder
    for result in (orthonormal_rows(moved), orthonormal_rows(flat)[:6]):
        assert (result * start).sum(1).min() > 0.99


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (24, 24)])
@pytest.mark.parametrize("proj_type", PROJ_TYPES)
def test_sides_and_shapes(proj_type, shape):
    """Rows >= columns projects right under std, as in galore-torch; the projected gradient has that shape."""
    left, right = sides(proj_type, torch.Size(shape))
    tall = shape[0] >= shape[1]
    expected = {
        "std": (not tall, tall), "reverse_std": (tall, not tall),
        "left": (True, False), "right": (False, True), "full": (True, True),
    }  # fmt: skip
    assert (left, right) == expected[proj_type]
    basis = random_basis(proj_type, 5, torch.zeros(shape), 3)
    assert (basis.left is not None, basis.right is not None) == (left, right)
    dy, x = torch.randn(7, shape[0]), torch.randn(7, shape[1])
    gradient, matrix = gradient_of(dy, x), dy.t() @ x
    result = project(gradient, basis)
    assert result.shape == low_rank_shape(proj_type, 5, torch.Size(shape))
    by_hand = matrix if basis.left is None else basis.left @ matrix
    if basis.right is not None:
        by_hand = basis.right @ matrix.t() if basis.left is None else by_hand @ basis.right.t()
    assert (result - by_hand).abs().max() <= 10 * GEMM_FP32 * dy.norm() * x.norm()


@pytest.mark.parametrize("held", ["pairs", "dense", "lookups"])
@pytest.mark.parametrize("proj_type", PROJ_TYPES)
def test_every_form_of_a_gradient_projects_alike(held, proj_type):
    gradient = FactoredGradient(torch.zeros(20, 12))
    ids, dy = torch.tensor([3, -1, 3, 19]), torch.randn(4, 12)
    matrix = torch.zeros(20, 12)
    if held == "lookups":
        gradient.add_lookup(ids, dy)
        matrix.index_add_(0, ids[ids >= 0], dy[ids >= 0])
    else:
        pairs = [(torch.randn(3, 20), torch.randn(3, 12)) for _ in range(2)]
        for pair in pairs:
            gradient.add_pair(*pair, bounded=held == "dense")
        gradient.add_dense(torch.zeros(20, 12)) if held == "dense" else None
        matrix = sum(a.t() @ b for a, b in pairs)
    basis = random_basis(proj_type, 3, torch.zeros(20, 12), 1)
    dense = FactoredGradient(torch.zeros(20, 12))
    dense.add_dense(matrix)
    assert torch.allclose(project(gradient, basis), project(dense, basis), atol=1e-5)


@pytest.mark.parametrize("subspace", ["power", "svd"])
@pytest.mark.parametrize("proj_type", PROJ_TYPES)
def test_energy(proj_type, subspace):
    """A cold start and a warm one catch at least 98 % of what the exact singular vectors catch."""
    dy, x = decaying(48, 32, 0.1)
    gradient, matrix = gradient_of(dy, x), (dy.t() @ x).double()
    best = torch.linalg.svdvals(matrix)[:6].square().sum()
    start = random_basis(proj_type, 6, torch.zeros(48, 32), 5)
    cold = refreshed(gradient, start, subspace, warm=False)
    # the next gradient is another one near it
    again = gradient_of(dy + 0.01 * torch.randn_like(dy), x)
    for basis, of in ((cold, gradient), (refreshed(again, cold, subspace, warm=True), again)):
        assert max(deviation(side) for side in basis if side is not None) < ORTHONORMAL
        energy = project(of, basis).double().square().sum()
        assert 0.98 * best < energy < 1.05 * best


def test_svd_is_the_papers():
    """The first right or left singular vectors of the dense gradient, row by row."""
    dy, x = decaying(30, 20, 0.2)
    gradient = gradient_of(dy, x)
    left, _, right = torch.linalg.svd((dy.t() @ x).double(), full_matrices=False)
    basis = refreshed(gradient, random_basis("full", 4, torch.zeros(30, 20), 0), "svd", warm=False)
    for ours, exact in ((basis.right, right[:4]), (basis.left, left[:, :4].t())):
        assert ours is not None
        assert ((ours.double() * exact).sum(1).abs() - 1).abs().max() < 1e-4


@pytest.mark.parametrize("tokens", [1, 3])
def test_fewer_tokens_than_directions(tokens):
    """All of the gradient is caught, and the missing directions are filled up."""
    dy, x = torch.randn(tokens, 20), torch.randn(tokens, 12)
    gradient = gradient_of(dy, x, ProjectedGradient)
    basis, usable = find_basis(torch.zeros(20, 12), gradient, GROUP, None, "power", 3)
    assert usable and basis.right is not None
    assert deviation(basis.right) < ORTHONORMAL
    assert float(project(gradient, basis).norm()) == pytest.approx(float((dy.t() @ x).norm()), rel=1e-4)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("first", [True, False])
def test_unusable_gradients_keep_the_basis(value, first):
    old = None if first else random_basis("std", 4, torch.zeros(20, 12), 9)
    gradient = gradient_of(torch.full((5, 20), value), torch.ones(5, 12), ProjectedGradient)
    basis, usable = find_basis(torch.zeros(20, 12), gradient, GROUP, old, "power", 3)
    expected = random_basis("std", 4, torch.zeros(20, 12), 3) if old is None else old
    assert not usable
    assert basis.right is not None and torch.equal(basis.right, expected.right)


def test_rank_is_at_most_the_smaller_side():
    assert low_rank_shape("std", 100, torch.Size((20, 12))) == (12, 20)
    assert random_basis("full", 100, torch.zeros(20, 12), 0).right.shape == (12, 12)


def test_rotation_keeps_the_moment_that_both_bases_see():
    """The same space in other coordinates: the moment of G is that of G again; squares stay positive."""
    old = random_basis("full", 4, torch.zeros(20, 12), 0)
    turn = orthonormal_rows(torch.randn(4, 4))
    new = Basis(turn @ old.left, old.right)
    matrix = torch.randn(20, 12)
    dense = FactoredGradient(matrix)
    dense.add_dense(matrix)
    moved = rotated(project(dense, old), old, new, squared=False)
    assert torch.allclose(moved, project(dense, new), atol=1e-5)
    for side in ("left", "right"):
        one, other = (Basis(**{"left": None, "right": None, side: getattr(b, side)}) for b in (old, new))
        moved = rotated(project(dense, one), one, other, squared=False)
        assert torch.allclose(moved, project(dense, other), atol=1e-5)
    assert rotated(torch.rand(4, 4), old, new, squared=True).min() >= 0
    same = rotated(torch.ones(4, 4), old, old, squared=True)
    assert torch.allclose(same, torch.ones(4, 4), atol=1e-5)


def test_random_bases_leave_torchs_stream_alone():
    before = torch.get_rng_state()
    first, again = (random_basis("std", 4, torch.zeros(20, 12), 7).right for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, random_basis("std", 4, torch.zeros(20, 12), 8).right)
