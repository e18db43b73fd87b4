"""Storage of the moments and of a weight's low bits: plain tensors in the optimizer's state.

A format says how a moment is stored and how a tensor of another format becomes one. The update kernels read
and write the stored form; the rest of the code only allocates, converts and counts.

    key                  tensor
    step                 0-d fp32 on the CPU
    exp_avg, ...         the moment, in formats "fp32" and "bf16"
    exp_avg_codes, ...   its int8 or uint8 codes in format "8bit" (see `quantized.py`)
    exp_avg_scale, ...   their units, uint8
    weight_low           int8 or int16, only with `weight_bits` (see `rounding.py`)

Codes have a key of their own, so that torch's AdamW does not find moments in them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import quantized
from .quantized import Moment, QuantizedMoment

__all__ = [
    "CODES",
    "LOW_BITS",
    "SCALE",
    "UNSIGNED",
    "allocate_moment",
    "convert_moment",
    "format_for",
    "has_moment",
    "low_bits_of",
    "moment_of",
    "rounding_key",
    "state_bytes",
]

#: Suffixes of the keys of an 8-bit moment, and the key of a weight's low bits.
CODES, SCALE, LOW_BITS = "_codes", "_scale", "weight_low"
#: Tensors with fewer elements keep fp32 moments in format "8bit".
SMALLEST_QUANTIZED = 4096
#: Moments that are never negative.
UNSIGNED = frozenset({"exp_avg_sq"})
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LOW_DTYPES = {24: torch.int8, 32: torch.int16}


def format_for(option: str, weight: Tensor) -> str:
    """Format of `weight`'s moments: "fp32", "bf16" or "8bit".

    "auto" is fp32 for fp32 weights and bf16 for 16-bit ones. "8bit" is fp32 for tensors of fewer than 4,096
    elements, which need the precision more than the memory, and for those that are not contiguous.
    """
    if option == "auto":
        return "fp32" if weight.dtype == torch.float32 else "bf16"
    if option == "8bit" and (weight.numel() < SMALLEST_QUANTIZED or not weight.is_contiguous()):
        return "fp32"
    return option


def allocate_moment(state: dict[str, Any], name: str, option: str, weight: Tensor) -> None:
    """Put a moment of zeros for `weight` into `state`: its shape, device and memory layout."""
    name_of_format = format_for(option, weight)
    if name_of_format == "8bit":
        moment = quantized.zeros(weight, signed=name not in UNSIGNED)
        state[name + CODES], state[name + SCALE] = moment
    else:
        dtype = _DTYPES[name_of_format]
        state[name] = torch.zeros_like(weight, dtype=dtype, memory_format=torch.preserve_format)


def convert_moment(state: dict[str, Any], name: str, option: str, weight: Tensor, moment: Moment) -> None:
    """Put a copy of `moment` into `state` in the format that `option` means, on `weight`'s device."""
    allocate_moment(state, name, option, weight)
    target = moment_of(state, name)
    if isinstance(target, QuantizedMoment) and isinstance(moment, QuantizedMoment):
        target.codes.copy_(moment.codes)
        target.scale.copy_(moment.scale)
        return
    values = quantized.dequantize(moment) if isinstance(moment, QuantizedMoment) else moment.detach()
    if isinstance(target, QuantizedMoment):
        quantized.quantize_(target, values.to(device=weight.device, dtype=torch.float32))
    else:
        target.copy_(values)


def moment_of(state: Mapping[str, Any], name: str) -> Moment:
    """The moment as the backends take it.

    Raises:
        KeyError: `state` has none.
    """
    codes = state.get(name + CODES)
    return state[name] if codes is None else QuantizedMoment(codes, state[name + SCALE])


def has_moment(state: Mapping[str, Any], name: str) -> bool:
    """Whether `state` holds the moment in any format."""
    return name in state or name + CODES in state


def low_bits_of(state: dict[str, Any], weight_bits: int, weight: Tensor) -> Tensor | None:
    """The low bits of a bf16 `weight`, zero at first; None with `weight_bits` 16 and for other weights.

    Those of a weight that is no longer bf16 are dropped: it is now what it was cast to.
    """
    if weight_bits == 16 or weight.dtype != torch.bfloat16:
        state.pop(LOW_BITS, None)
        return None
    if LOW_BITS not in state:
        dtype = _LOW_DTYPES[weight_bits]
        state[LOW_BITS] = torch.zeros_like(weight, dtype=dtype, memory_format=torch.preserve_format)
    low: Tensor = state[LOW_BITS]
    return low


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
