"""ProjectedGradient: a gradient that may shrink to its projection as soon as nothing else needs it.

Until it is reduced it is a FactoredGradient. `reduce_` keeps R (see `subspace.py`) and, if asked to, the norm
of the whole gradient, and drops pairs and buffer; later pairs are added to R. Their norm cannot be added:
||G1 + G2||^2 has a cross term, so whoever asks for it then is told so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .config import refuse
from .gradient import FactoredGradient, compact
from .subspace import Basis, project

__all__ = ["ProjectedGradient"]


class ProjectedGradient(FactoredGradient):
    """Gradient of a weight of a `ForgeGaLoreAdamW`.

    Attributes:
        low_rank: fp32, the projected gradient before the coefficient, or None before `reduce_`.
        basis: The basis of `low_rank`, or None before.
        fresh: Whether the optimizer's state does not hold that basis yet.
    """

    low_rank: Tensor | None = None
    basis: Basis | None = None
    fresh: bool = False

    @property
    def empty(self) -> bool:
        """Whether nothing has been added."""
        return super().empty and self.low_rank is None

    def storages(self) -> dict[int, int]:
        """Bytes of each storage that is held, by address."""
        if self.low_rank is None:
            return super().storages()
        assert self.basis is not None
        own = [self.low_rank, *(side for side in self.basis if side is not None and self.fresh)]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in own}

    def reduce_(self, basis: Basis, fresh: bool, want_norm: bool) -> Tensor:
        """Keep only the projection on `basis`; returns it.

        Args:
            basis: The basis; its rows are orthonormal.
            fresh: Whether the optimizer's state does not hold it yet.
            want_norm: Measure the norm of the whole gradient first, which is lost otherwise.

        Raises:
            ForgeRefusal: a held pair was written to.
        """
        if want_norm:
            self.unscaled_norm_sq()
        self.measurable = want_norm
        self.low_rank = project(self, basis)
        self.basis, self.fresh = basis, fresh
        self.segments.clear()
        self.looked_up.clear()
        self.buffer = None
        return self.low_rank

    def add_pair(
        self,
        dy_TN: Tensor,
        x_TK: Tensor,
        bounded: bool = True,
        keep_input: Callable[[Tensor], Tensor] = compact,
        exchanged: bool = False,
    ) -> None:
        """Add dY^T X, to the projection where there is one; see `FactoredGradient.add_pair`."""
        if self.low_rank is None:
            super().add_pair(dy_TN, x_TK, bounded, keep_input, exchanged)
        else:
            self._add(lambda part: part.add_pair(dy_TN, x_TK, bounded=False))

    def add_lookup(self, ids_T: Tensor, dy_TK: Tensor) -> None:
        """Add dY_t to row ids_t, to the projection where there is one."""
        if self.low_rank is None:
            super().add_lookup(ids_T, dy_TK)
        else:
            self._add(lambda part: part.add_lookup(ids_T, dy_TK))

    def add_dense(self, grad: Tensor) -> None:
        """Add a dense gradient, to the projection where there is one."""
        if self.low_rank is None:
            super().add_dense(grad)
        else:
            self._add(lambda part: part.add_dense(grad))

    def unscaled_norm_sq(self) -> Tensor:
        """||G||_F^2 of the whole gradient before the coefficient.

        Raises:
            ForgeRefusal: the gradient was reduced without it, or something was added since.
        """
        if self.low_rank is not None and self._norm_sq is None:
            raise refuse("projected_norm", param=self.name)
        return super().unscaled_norm_sq()

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The gradient as a new tensor (N, K).

        Raises:
            ForgeRefusal: only its projection is left.
        """
        if self.low_rank is not None:
            raise refuse("projected_dense", param=self.name)
        return super().dense(dtype)

    def _add(self, fill: Callable[[FactoredGradient], None]) -> None:
        assert self.low_rank is not None and self.basis is not None
        part = FactoredGradient(self._weight, self.name)
        fill(part)
        if self.coefficient is not None:
            self.low_rank.mul_(self.coefficient)
            self.coefficient = None
        self.low_rank += project(part, self.basis)
        self._norm_sq = None
