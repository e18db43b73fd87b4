"""Tables of addresses on the device, by which one launch serves many tensors.

A row is one weight: the addresses of its tensors and its random key, as int64. Kernels read a row with
`address`, which says that addresses are multiples of 16, so that loads stay wide: `fits` before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl

__all__ = ["address", "fits", "pointer_table"]


@triton.jit
def address(table_ptr, column: tl.constexpr, ELEMENT: tl.constexpr):
    """Pointer to ELEMENT (a dtype) in a column of the row at `table_ptr`, or None if ELEMENT is None."""
    if ELEMENT is None:
        pointer = None
    else:
        pointer = tl.load(table_ptr + column).to(tl.pointer_type(ELEMENT), bitcast=True)
        # Of the pointer: the compiler forgets what it knew of an integer that becomes one.
        pointer = tl.multiple_of(pointer, 16)
    return pointer


def fits(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether the tensors' addresses may go into a table."""
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


def pointer_table(rows: Sequence[Sequence[torch.Tensor | int | None]], device: torch.device) -> torch.Tensor:
    """The table (rows, columns) of the tensors' addresses (0 for None) and integers, int64 on `device`.

    It is copied without waiting for the device. The tensors must live until the kernels that read the table
    are queued, as for every launch.
    """
    values = [
        [item.data_ptr() if isinstance(item, torch.Tensor) else item or 0 for item in row] for row in rows
    ]
    table = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)
