"""Tables of addresses on the device, by which one launch serves many tensors.

A row is one weight: the addresses of its tensors and its random key, as int64. Kernels read a row with
`address`, which says that addresses are multiples of 16, so that loads stay wide.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

__all__ = ["ELEMENTS", "address", "pointer_table"]

#: torch's dtypes as the kernels' constexprs.
ELEMENTS = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.uint8: tl.uint8,
}


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


def pointer_table(rows: Sequence[int], columns: int, device: torch.device) -> torch.Tensor:
    """The table (rows, columns) of addresses and other integers, given row after row; int64 on `device`.

    It is copied without waiting for the device. What the addresses belong to must live until the kernels that
    read the table are queued, as for every launch. Parts of it are aligned if `columns` is even.
    """
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.view(-1, columns).to(device, non_blocking=True)
