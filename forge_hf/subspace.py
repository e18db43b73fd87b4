"""Subspaces of GaLore: which side is projected, and the basis of the strongest directions of a gradient.

A basis has one direction per row: right (R, K), left (R, N). `Basis.shape_of` is the shape of the projected
gradient, and of the moments.

    power   warm-started block power iteration, Z = orth(Q G^T), Q = orth(Z G), on the pairs only
    svd     the first R singular vectors of the dense gradient of this one weight, as in the paper's code;
            their signs, which an SVD leaves open, face the basis before, as kept moments need it

orth is Cholesky-QR, twice (Yamamoto et al. 2015): the Gram matrix of the rows is small, and its Cholesky
factor, whose diagonal is positive, turns no direction around, so that directions stay near those of the basis
before and moments that were kept still fit. Where it fails (fewer tokens than directions, or a spectrum wider
than fp32), Householder QR with the same signs takes over; it completes missing directions.

Source: Zhao et al. 2024 (GaLore, arXiv 2403.03507), section 3 and Algorithm 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .gradient import FactoredGradient
from .projection import project_both, project_left, project_right
from .reference import plain_math

__all__ = [
    "PROJ_TYPES",
    "SUBSPACES",
    "Basis",
    "low_rank_shape",
    "orthonormal_rows",
    "project",
    "random_basis",
    "refreshed",
    "rotated",
    "sides",
]

PROJ_TYPES = ("std", "reverse_std", "left", "right", "full")
SUBSPACES = ("power", "svd")
#: Iterations from the old basis, and from a random one.
WARM_ITERATIONS, COLD_ITERATIONS = 2, 8


class Basis(NamedTuple):
    """Directions of one weight (N, K).

    Attributes:
        left: (R, N) with orthonormal rows, or None.
        right: (R, K) with orthonormal rows, or None. At least one of the two is there.
    """

    left: Tensor | None
    right: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return sum(side.nbytes for side in self if side is not None)

    def to(self, dtype: torch.dtype) -> Basis:
        """The basis in another dtype, contiguous, as it comes out of a checkpoint."""
        return Basis(*(None if side is None else side.to(dtype).contiguous() for side in self))


def sides(proj_type: str, shape: torch.Size) -> tuple[bool, bool]:
    """Whether a weight (N, K) has a left and a right basis.

    std projects the smaller side: right where N >= K, else left; reverse_std the other one.
    """
    if proj_type in ("left", "right", "full"):
        return proj_type != "right", proj_type != "left"
    right = (shape[0] >= shape[1]) == (proj_type == "std")
    return not right, right


def low_rank_shape(proj_type: str, rank: int, shape: torch.Size) -> tuple[int, int]:
    """Shape of the projected gradient of a weight (N, K): (R, N), (R, K) or (R, R), R at most min(N, K)."""
    rank = min(rank, *shape)
    left, right = sides(proj_type, shape)
    if left and right:
        return rank, rank
    return rank, shape[1] if left else shape[0]


def project(gradient: FactoredGradient, basis: Basis) -> Tensor:
    """The projected gradient, fp32: Q G^T (R, N), P G (R, K) or P G Q^T (R, R); before the coefficient."""
    if basis.left is None:
        assert basis.right is not None
        return project_right(gradient, basis.right)
    if basis.right is None:
        return project_left(gradient, basis.left)
    return project_both(gradient, basis.left, basis.right)


def random_basis(proj_type: str, rank: int, weight: Tensor, seed: int) -> Basis:
    """Random directions, fp32; the same for the same seed on every device, and without torch's own stream."""
    rank = min(rank, *weight.shape)
    generator = torch.Generator().manual_seed(seed)
    rows = [
        orthonormal_rows(torch.randn(rank, size, generator=generator).to(weight.device)) if wanted else None
        for wanted, size in zip(sides(proj_type, weight.shape), weight.shape, strict=True)
    ]
    return Basis(*rows)


def refreshed(gradient: FactoredGradient, start: Basis, subspace: str, warm: bool) -> Basis:
    """Directions of the strongest part of a finite gradient that is not 0.

    Args:
        gradient: Of a weight (N, K).
        start: Where the power iteration begins; its shape is that of the result.
        subspace: "power" or "svd".
        warm: Whether `start` is an earlier basis of this weight, which needs fewer iterations.

    Returns:
        The new basis, fp32.
    """
    if subspace == "svd":
        return _by_svd(gradient, start, warm)
    return _by_power(gradient, start, WARM_ITERATIONS if warm else COLD_ITERATIONS)


@plain_math
def _by_svd(gradient: FactoredGradient, start: Basis, warm: bool) -> Basis:
    left_NR, _, right_RK = torch.linalg.svd(gradient.dense(torch.float32), full_matrices=False)
    left, right = start
    if left is not None:
        left = _facing(left_NR[:, : len(left)].t(), left if warm else None)
    if right is not None:
        right = _facing(right_RK[: len(right)], right if warm else None)
    return Basis(left, right)


def _facing(rows: Tensor, old: Tensor | None) -> Tensor:
    """Rows, turned around where they point away from the old ones; an SVD leaves their signs open."""
    if old is None:
        return rows
    return rows * torch.where((rows * old.float()).sum(1, keepdim=True) < 0, -1.0, 1.0)


def _by_power(gradient: FactoredGradient, start: Basis, iterations: int) -> Basis:
    left, right = start
    for _ in range(iterations):
        if right is not None:
            other = orthonormal_rows(project_right(gradient, right))
            right = orthonormal_rows(project_left(gradient, other))
            left = None if left is None else other
        else:
            assert left is not None
            left = orthonormal_rows(project_right(gradient, orthonormal_rows(project_left(gradient, left))))
    return Basis(left, right)


@plain_math
def orthonormal_rows(y_RD: Tensor) -> Tensor:
    """Orthonormal rows that span what the rows of `y_RD` do, first to last, and more where these depend.

    Args:
        y_RD: fp32 (R, D), finite, R <= D.
    """
    y = y_RD / y_RD.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    once, failed, _ = _by_cholesky(y)
    twice, failed_again, deviation = _by_cholesky(once)
    # The second pass repairs what the first left, if that was near enough; one read for all three.
    trouble = torch.stack([failed.float(), failed_again.float(), (~(deviation < 0.3)).float()])
    return _by_householder(y) if bool(trouble.any()) else twice


def _by_cholesky(y_RD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows L^-1 Y for Y Y^T = L L^T, whether that failed (0-d), and how far Y Y^T was from 1."""
    gram = y_RD @ y_RD.t()
    factor, info = torch.linalg.cholesky_ex(gram)
    deviation = (gram - torch.eye(len(gram), device=gram.device)).abs().amax()
    return torch.linalg.solve_triangular(factor, y_RD, upper=False), info, deviation


def _by_householder(y_RD: Tensor) -> Tensor:
    columns_DR, triangle = torch.linalg.qr(y_RD.t())
    signs = torch.where(triangle.diagonal() < 0, -1.0, 1.0)
    return (columns_DR * signs).t().contiguous()


@plain_math
def rotated(moment: Tensor, old: Basis, new: Basis, squared: bool) -> Tensor:
    """A moment in the coordinates of a new basis, as far as the old one saw: fp32, of the same shape.

    With A = new old^T, the first moment of A g is A m. That of the squares takes the squares of A, as if the
    coordinates of g were independent.

    Args:
        moment: fp32, in the shape of the projected gradient.
        old: Its basis.
        new: The basis that it is to be in.
        squared: Whether it is a moment of squares.
    """
    between = [
        None if b is None or a is None else (b.float() @ a.float().t()) for a, b in zip(old, new, strict=True)
    ]
    left, right = [turn if turn is None or not squared else turn.square() for turn in between]
    if left is None or right is None:
        turn = right if left is None else left
        assert turn is not None
        return turn @ moment
    return left @ moment @ right.t()
