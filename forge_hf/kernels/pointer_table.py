"""Tables of addresses on the device, by which one launch serves many tensors.

A row is one weight: the addresses of its tensors and its random key, as int64. Kernels read a row with
`address`, which says that addresses are multiples of 16, so that loads stay wide.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..quantized import Moment

__all__ = ["ELEMENTS", "address", "addresses_of", "checked_key", "elements_of", "pointer_table", "tensors_of"]

#: torch's dtypes as the kernels' constexprs.
ELEMENTS: dict[torch.dtype, Any] = {
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
    # A third of the time that torch takes to go through a list.
    table = torch.frombuffer(bytearray(struct.pack(f"{len(rows)}q", *rows)), dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory()
    return table.view(-1, columns).to(device, non_blocking=True)


def _columns_of(moments: Sequence[Moment]) -> list[torch.Tensor | None]:
    """Both moments and both scales."""
    stored: list[torch.Tensor | None] = [None, None, None, None]
    for index, moment in enumerate(moments):
        stored[index], stored[index + 2] = (moment, None) if isinstance(moment, torch.Tensor) else moment
    return stored


def elements_of(
    names: tuple[str, ...], tensors: tuple[torch.Tensor | None, ...], moments: Sequence[Moment]
) -> dict[str, Any]:
    """The ELEMENTs of a kernel for groups: of `tensors` by `names`, then M, V, M_SCALE and V_SCALE."""
    every = zip((*names, "M", "V", "M_SCALE", "V_SCALE"), (*tensors, *_columns_of(moments)), strict=True)
    return {name: None if tensor is None else ELEMENTS[tensor.dtype] for name, tensor in every}


def tensors_of(moments: Sequence[Moment]) -> list[torch.Tensor]:
    """All tensors of the moments."""
    tensors: list[torch.Tensor] = []
    for moment in moments:
        tensors.extend((moment,) if isinstance(moment, torch.Tensor) else moment)
    return tensors


def addresses_of(tensors: tuple[torch.Tensor | None, ...], moments: Sequence[Moment]) -> list[int] | None:
    """Addresses of `tensors`, both moments and both scales, 0 for what is not there.

    None if one is not a multiple of 16.
    """
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (*tensors, *_columns_of(moments))]
    return None if any([address & 15 for address in addresses]) else addresses


def checked_key(rng_key: int | None) -> int:
    """A random key as the table has it.

    Raises:
        ValueError: it is not in [0, 2^32).
    """
    if rng_key is not None and not 0 <= rng_key < 1 << 32:
        raise ValueError(f"rng_key must be in [0, 2**32), got {rng_key}")
    return rng_key or 0
