"""Projections of a factored gradient onto few directions, from its pairs.

    right   Q G^T   = sum (Q X^T) dY      (R, N), for rows Q (R, K)
    left    P G     = sum (P dY^T) X      (R, K), for rows P (R, N)
    both    P G Q^T = sum (P dY^T)(X Q^T) (R, R)

Two thin products each, fewer operations than G itself while R is below N K / (N + K). Results are fp32 and
before the gradient's coefficient. 16-bit pairs on a GPU are multiplied in their own dtype with fp32 sums, as
their gradient would be. A direction is a row, so that results and bases are contiguous operands of the
update.

Source: Zhao et al. 2024 (GaLore, arXiv 2403.03507), section 3, for the projections.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .gradient import FactoredGradient
from .reference import HAS_OUT_DTYPE, plain_math
from .row_sums import row_sums

__all__ = ["project_both", "project_left", "project_right"]


@plain_math
def project_right(gradient: FactoredGradient, basis_RK: Tensor) -> Tensor:
    """Q G^T as fp32 (R, N).

    Raises:
        ForgeRefusal: a held pair was written to.
    """
    if gradient.buffer is not None:
        return _product(basis_RK, gradient.buffer.t())
    result = basis_RK.new_zeros(basis_RK.shape[0], gradient.shape[0], dtype=torch.float32)
    for dy_TN, x_TK in gradient.pairs():
        result += _product(_thin(basis_RK, x_TK), dy_TN)
    for ids_T, dy_TK in gradient.lookups():
        rows, sums = row_sums(ids_T, _thin(basis_RK, dy_TK).t())
        result.index_add_(1, rows, sums.t().float())
    return result


@plain_math
def project_left(gradient: FactoredGradient, basis_RN: Tensor) -> Tensor:
    """P G as fp32 (R, K).

    Raises:
        ForgeRefusal: a held pair was written to.
    """
    if gradient.buffer is not None:
        return _product(basis_RN, gradient.buffer)
    result = basis_RN.new_zeros(basis_RN.shape[0], gradient.shape[1], dtype=torch.float32)
    for dy_TN, x_TK in gradient.pairs():
        result += _product(_thin(basis_RN, dy_TN), x_TK)
    for ids_T, dy_TK in gradient.lookups():
        rows, sums = row_sums(ids_T, dy_TK)
        result += _product(basis_RN[:, rows].float(), sums)
    return result


@plain_math
def project_both(gradient: FactoredGradient, basis_RN: Tensor, basis_RK: Tensor) -> Tensor:
    """P G Q^T as fp32 (R, R).

    Raises:
        ForgeRefusal: a held pair was written to.
    """
    if gradient.buffer is not None or gradient.looked_up:
        return project_left(gradient, basis_RN) @ basis_RK.float().t()
    result = basis_RN.new_zeros(basis_RN.shape[0], basis_RK.shape[0], dtype=torch.float32)
    for dy_TN, x_TK in gradient.pairs():
        result += _product(_thin(basis_RN, dy_TN), _thin(basis_RK, x_TK).t())
    return result


def _multiplies_natively(operand: Tensor) -> bool:
    return HAS_OUT_DTYPE and operand.is_cuda and operand.dtype != torch.float32


def _thin(basis: Tensor, operand_TD: Tensor) -> Tensor:
    """Basis @ operand^T (R, T), in the operand's dtype where it is multiplied so, else fp32."""
    if _multiplies_natively(operand_TD):
        return basis.to(operand_TD.dtype) @ operand_TD.t()
    return basis.float() @ operand_TD.float().t()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A @ b in fp32."""
    if _multiplies_natively(b):
        return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
    return a.float() @ b.float()
