"""Sums of an embedding's output gradients by row of the table, in plain torch.

    sums[u] = sum of dY_t over the tokens t with ids_t = rows[u]

Legend: T tokens, U rows with tokens, N rows of the table, K columns. The sums are in fp32 and always added up
in the same order; tokens with id -1 have no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Lookup", "RowSums", "add_row_sums_", "row_sums"]

#: (ids_T, dy_TK): what an embedding hands over.
Lookup = tuple[Tensor, Tensor]
#: (rows_U, sums_UK): ascending and distinct row numbers (int64), and fp32 sums.
RowSums = tuple[Tensor, Tensor]


def row_sums(ids_T: Tensor, dy_TK: Tensor) -> RowSums:
    """Rows that occur in `ids_T`, and the sum of each one's gradients.

    Args:
        ids_T: (T,) integers, -1 for a token without a gradient.
        dy_TK: (T, K), any floating dtype and strides.
    """
    known = ids_T >= 0
    if not known.all():
        ids_T, dy_TK = ids_T[known], dy_TK[known]
    rows, place = torch.unique(ids_T.long(), return_inverse=True)
    sums = torch.zeros(rows.shape[0], dy_TK.shape[1], dtype=torch.float32, device=dy_TK.device)
    if sums.is_cuda:  # whose index_add_ adds in any order
        sums.index_put_((place,), dy_TK.float(), accumulate=True)
    else:
        sums.index_add_(0, place, dy_TK.float())
    return rows, sums


def add_row_sums_(grad: Tensor, parts: Sequence[RowSums], first_row: int) -> None:
    """Add to `grad`, rows of the gradient from `first_row` on, what `parts` hold of them."""
    last_row = first_row + grad.shape[0]
    for rows, sums in parts:
        ends = torch.tensor([first_row, last_row], device=rows.device)
        low, high = torch.searchsorted(rows, ends).tolist()
        grad[rows[low:high] - first_row] += sums[low:high].to(grad.dtype)
