"""Storage of the moments: plain tensors in, plain tensors out.

A format says in which dtype a moment lives and how a tensor of another format becomes one. The update kernels
read and write the stored form; the rest of the code only allocates, converts and counts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FORMATS", "MomentFormat", "format_for", "rounding_key", "state_bytes"]


@dataclass(frozen=True)
class MomentFormat:
    """One way to store a moment.

    Attributes:
        name: Value of the option `state`.
        dtype: dtype of the stored tensor.
    """

    name: str
    dtype: torch.dtype

    def allocate(self, weight: Tensor) -> Tensor:
        """Zero moment for `weight`: its shape, device and memory layout."""
        return torch.zeros_like(weight, dtype=self.dtype, memory_format=torch.preserve_format)

    def convert(self, moment: Tensor, weight: Tensor) -> Tensor:
        """Copy of `moment` in this format, on `weight`'s device and in its memory layout."""
        return self.allocate(weight).copy_(moment)


FORMATS: dict[str, MomentFormat] = {
    "fp32": MomentFormat("fp32", torch.float32),
    "bf16": MomentFormat("bf16", torch.bfloat16),
}


def format_for(option: str, weight: Tensor) -> MomentFormat:
    """Format of `weight`'s moments; "auto" is fp32 for fp32 weights and bf16 for 16-bit ones."""
    if option == "auto":
        option = "fp32" if weight.dtype == torch.float32 else "bf16"
    return FORMATS[option]


def rounding_key(seed: int, step: int, index: int) -> int:
    """Mix (seed, step, parameter index) into the 32-bit key of one update; a resumed run rounds alike."""
    return _mix(_step_key(seed, step), index)


@functools.lru_cache(maxsize=16)
def _step_key(seed: int, step: int) -> int:
    """The part of the key that all parameters of a step share."""
    return _mix((seed ^ 0x9E3779B9) & 0xFFFFFFFF, step)


def _mix(key: int, value: int) -> int:
    key = (key ^ (value & 0xFFFFFFFF)) * 0x85EBCA6B & 0xFFFFFFFF
    key = (key ^ key >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return key ^ key >> 16


def state_bytes(states: object) -> int:
    """Bytes of all tensors in an optimizer's `state` mapping."""
    total = 0
    for state in states.values():  # type: ignore[attr-defined]
        total += sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
    return total
