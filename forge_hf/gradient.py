"""FactoredGradient: a weight gradient as a value computed on demand, not a tensor.

For Y = X W^T the gradient is G = dY^T X. Everything that anybody asks of G can be had from the pairs (dY, X):

    norm          ||G||^2 by a GEMM with a reduce, or from two small Gram matrices
    accumulation  more pairs: G = sum_s dY_s^T X_s
    projection    G Q = dY^T (X Q),  P^T G = (dY P)^T X
    update        tile by tile in a fused kernel (`optim.py` does that)

Bound: pairs cost T (N + K) elements, the dense gradient N K. As soon as the pairs of a weight would cost
more, they are summed into one dense buffer of the dtype that autograd would have used, so memory never
exceeds what torch needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .config import refuse
from .dispatch import backend_for
from .reference import accumulate_dense_, plain_math

__all__ = ["FactoredGradient", "Segment"]


class Segment(NamedTuple):
    """One pair, with the versions its tensors had, so that a later write into them is noticed."""

    dy_TN: Tensor
    x_TK: Tensor
    versions: tuple[int, int]


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor keeps no count, and cannot be written to outside its mode
        return 0


def _compact(tensor: Tensor) -> Tensor:
    """Copy a small view of a large storage, which holding the view would keep alive."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > 1.25 * tensor.nbytes else tensor


def _compact_bytes(tensor: Tensor) -> int:
    """Bytes that holding `_compact(tensor)` costs; an expanded tensor costs less than its elements."""
    storage_bytes, tensor_bytes = tensor.untyped_storage().nbytes(), tensor.nbytes
    return tensor_bytes if storage_bytes > 1.25 * tensor_bytes else storage_bytes


class FactoredGradient:
    """Gradient of one weight: coefficient * (sum over segments of dY^T X + buffer).

    Args:
        weight: The weight (N, K); gives shape, dtype of the dense form, and device.
        name: Its name, for messages.

    Attributes:
        segments: Held pairs, oldest first.
        buffer: Dense sum (N, K) in the weight's dtype, or None. Either `segments` or `buffer` is in use, not
            both.
        coefficient: 0-d fp32 tensor that multiplies everything (clipping, unscaling), or None for 1.
    """

    def __init__(self, weight: Tensor, name: str = "weight") -> None:
        self.shape = weight.shape
        self.dtype = weight.dtype
        self.device = weight.device
        self.name = name
        self.segments: list[Segment] = []
        self.buffer: Tensor | None = None
        self.coefficient: Tensor | None = None
        self._weight = weight
        self._norm_sq: Tensor | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing has been added."""
        return not self.segments and self.buffer is None

    @property
    def dense_bytes(self) -> int:
        """Bytes of the gradient that autograd would have stored."""
        return self.shape.numel() * self.dtype.itemsize

    def storages(self) -> dict[int, int]:
        """Bytes of each storage that is held, by address, so that tensors sharing one count once."""
        tensors = (
            [self.buffer]
            if self.buffer is not None
            else [t for segment in self.segments for t in segment[:2]]
        )
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    def held_bytes(self) -> int:
        """Bytes held now."""
        return sum(self.storages().values())

    def add_pair(
        self,
        dy_TN: Tensor,
        x_TK: Tensor,
        bounded: bool = True,
        keep_input: Callable[[Tensor], Tensor] = _compact,
    ) -> None:
        """Add dY^T X.

        Args:
            dy_TN: (T, N), gradient of the layer's output.
            x_TK: (T, K), its input, same dtype.
            bounded: Sum into a dense buffer when the pairs would need more memory than it. False for a pair
                that is consumed at once.
            keep_input: Returns the form in which `x_TK` is held beyond this call: itself, or a copy.
        """
        self._fold_coefficient()
        self._norm_sq = None
        dy_TN, x_TK = dy_TN.detach(), x_TK.detach()
        if self.buffer is not None:
            accumulate_dense_(self.buffer, dy_TN, x_TK)
            return
        if bounded:
            held = [tensor for segment in self.segments for tensor in segment[:2]]
            if sum(map(_compact_bytes, [*held, dy_TN, x_TK])) > self.dense_bytes:
                accumulate_dense_(self._densify(), dy_TN, x_TK)
                return
            dy_TN, x_TK = _compact(dy_TN), keep_input(x_TK)
        self.segments.append(Segment(dy_TN, x_TK, (_version(dy_TN), _version(x_TK))))

    def add_dense(self, grad: Tensor) -> None:
        """Add a gradient that exists as a tensor (N, K), such as one that autograd produced."""
        self._fold_coefficient()
        self._norm_sq = None
        self._densify().add_(grad)

    def accumulate(self, other: FactoredGradient) -> None:
        """Add another gradient of the same weight."""
        if other.coefficient is not None or other.buffer is not None:
            self.add_dense(other.dense())
            return
        for dy_TN, x_TK in other.pairs():
            self.add_pair(dy_TN, x_TK)

    def scale_(self, coefficient: Tensor) -> None:
        """Multiply by a 0-d tensor on this device, without touching the pairs and without synchronising."""
        coefficient = coefficient.detach().to(device=self.device, dtype=torch.float32)
        self.scale_by_(coefficient.clone() if self.coefficient is None else coefficient)

    def scale_by_(self, coefficient: Tensor) -> None:
        """`scale_` by a 0-d fp32 tensor on this device that nobody writes to: it is kept without a copy."""
        self.coefficient = coefficient if self.coefficient is None else self.coefficient * coefficient

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The held (dy_TN, x_TK).

        Raises:
            ForgeRefusal: a held tensor was written to since it was handed over.
        """
        pairs = []
        for dy_TN, x_TK, (dy_version, x_version) in self.segments:
            if _version(dy_TN) != dy_version:
                raise refuse("pair_modified", what="output gradient", param=self.name)
            if _version(x_TK) != x_version:
                raise refuse("pair_modified", what="input", param=self.name)
            pairs.append((dy_TN, x_TK))
        return pairs

    def norm_sq(self) -> Tensor:
        """||coefficient * G||_F^2 as a 0-d fp32 tensor."""
        norm_sq = self.unscaled_norm_sq()
        return norm_sq if self.coefficient is None else norm_sq * self.coefficient.square()

    def unscaled_norm_sq(self) -> Tensor:
        """||G||_F^2 before the coefficient; computed once, until something is added."""
        if self._norm_sq is None:
            if self.buffer is not None:
                self._norm_sq = torch.linalg.vector_norm(self.buffer, dtype=torch.float32).square()
            elif self.segments:
                self._norm_sq = backend_for(self._weight).wgrad_norm_sq(self.pairs())
            else:
                self._norm_sq = torch.zeros((), dtype=torch.float32, device=self.device)
        return self._norm_sq

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The gradient as a new tensor (N, K), in the weight's dtype or `dtype`; the pairs stay."""
        dtype = dtype or self.dtype
        result = torch.zeros(self.shape, dtype=dtype, device=self.device)
        if self.buffer is not None:
            result.copy_(self.buffer)
        for dy_TN, x_TK in self.pairs():
            accumulate_dense_(result, dy_TN, x_TK)
        return result if self.coefficient is None else result.mul_(self.coefficient)

    @plain_math
    def project_right(self, basis_KR: Tensor) -> Tensor:
        """G Q = sum dY^T (X Q) as fp32 (N, R), for Q of shape (K, R)."""
        basis = basis_KR.float()
        if self.buffer is not None:
            result = self.buffer.float() @ basis
        else:
            result = torch.zeros(self.shape[0], basis.shape[1], dtype=torch.float32, device=self.device)
            for dy_TN, x_TK in self.pairs():
                result.addmm_(dy_TN.float().t(), x_TK.float() @ basis)
        return result if self.coefficient is None else result.mul_(self.coefficient)

    @plain_math
    def project_left(self, basis_NR: Tensor) -> Tensor:
        """P^T G = sum (dY P)^T X as fp32 (R, K), for P of shape (N, R)."""
        basis = basis_NR.float()
        if self.buffer is not None:
            result = basis.t() @ self.buffer.float()
        else:
            result = torch.zeros(basis.shape[1], self.shape[1], dtype=torch.float32, device=self.device)
            for dy_TN, x_TK in self.pairs():
                result.addmm_((dy_TN.float() @ basis).t(), x_TK.float())
        return result if self.coefficient is None else result.mul_(self.coefficient)

    def _densify(self) -> Tensor:
        """Sum the pairs into the dense buffer, one after the other, freeing each."""
        if self.buffer is None:
            pairs = self.pairs()
            self.buffer = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self.segments.clear()
            while pairs:
                accumulate_dense_(self.buffer, *pairs.pop(0))
        return self.buffer

    def _fold_coefficient(self) -> None:
        """Apply the coefficient before more is added, since it belongs to what was there."""
        if self.coefficient is not None:
            self._densify().mul_(self.coefficient)
            self.coefficient = None
