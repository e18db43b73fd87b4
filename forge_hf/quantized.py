"""8-bit moments: one byte per element and a power-of-two unit per block of 64, in plain torch.

    first moment   x = sign(c) c^2 unit,   codes -126 ... 126
    second moment  x = c^4 unit,           codes 1 ... 253

Companding: within a block, gradients spread over orders of magnitude. Linear codes spend nearly all of them
on the largest tenth, and a second moment that is rounded to 0 makes its weight explode, so code 0 stands only
in a moment that was never written. The unit is a power of two, so that the grid stays where it is while a
block's maximum drifts: a unit that followed the maximum would round every element anew at every step.

Error bound, with A the block's largest finite magnitude. The unit is the smallest power of two for which A
has a code, so A / unit lies in (7938, 15876] (first moment) or (2.04e9, 4.10e9] (second). An element of size
|x| in [c^2, (c+1)^2) unit, or [c^4, (c+1)^4) unit, becomes one of these two ends, so

    |error|  <  (2 c + 1) unit                      <=  2 sqrt(|x| unit) + unit   <  A / 44
    |error|  <  (4 c^3 + 6 c^2 + 4 c + 1) unit                                    <  A / 52

and at most half of that when rounding to the nearest. Stochastic rounding is linear in the value, so its mean
is the value. A second moment below `unit` becomes `unit`, which is less than A / 2.04e9 and has a root of
less than 1 / 45000 of the block's largest. A unit is at least 2^-126: blocks with A below 2^-112 (2^-94) have
fewer codes. A block with an element that is not finite, or beyond 3.2e38, decodes to infinities and NaN
altogether (unit infinity): a run that has come there is lost, and must not look alive.

Blocks run along the rows of `rows_and_columns(shape)`; the last one of a row may be shorter. Shapes: codes
like the weight, int8 or uint8; scale (rows, ceil(columns / 64)) uint8, the exponent field of the fp32 unit, 0
in a moment that was never written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "BLOCK",
    "Moment",
    "QuantizedMoment",
    "dequantize",
    "quantize_",
    "rows_and_columns",
    "uniform_of",
    "zeros",
]

#: Elements that share a unit.
BLOCK = 64
#: The unit's exponent below that of the maximum, and what the maximum is multiplied by first: 2^14 / 126^2
#: and 2^32 / 253^4, rounded up.
SIGNED = (14, 1.0320)
UNSIGNED = (32, 1.0483)


class QuantizedMoment(NamedTuple):
    """A moment as stored.

    Attributes:
        codes: int8 (first moment, momentum) or uint8 (second moment), contiguous, of the weight's shape.
        scale: uint8, (rows, ceil(columns / 64)), contiguous.
    """

    codes: Tensor
    scale: Tensor

    @property
    def signed(self) -> bool:
        """Whether this is a first moment."""
        return self.codes.dtype == torch.int8


#: A moment in any format.
Moment = Tensor | QuantizedMoment


def rows_and_columns(shape: torch.Size) -> tuple[int, int]:
    """The matrix as which a tensor is cut into blocks: (N, rest), or one row for vectors."""
    if len(shape) < 2:
        return 1, shape.numel()
    return shape[0], shape[1:].numel()


def zeros(weight: Tensor, signed: bool) -> QuantizedMoment:
    """A moment of zeros for `weight` (contiguous)."""
    rows, columns = rows_and_columns(weight.shape)
    codes = torch.zeros(weight.shape, dtype=torch.int8 if signed else torch.uint8, device=weight.device)
    scale = torch.zeros((rows, -(-columns // BLOCK)), dtype=torch.uint8, device=weight.device)
    return QuantizedMoment(codes, scale)


def dequantize(moment: QuantizedMoment) -> Tensor:
    """The moment as an fp32 tensor of the weight's shape."""
    rows, columns = rows_and_columns(moment.codes.shape)
    codes = moment.codes.reshape(rows, columns).float()
    unit = _spread((moment.scale.to(torch.int32) << 23).view(torch.float32), columns)
    values = codes * codes.abs() * unit if moment.signed else codes.square().square() * unit
    return values.reshape(moment.codes.shape)


def quantize_(moment: QuantizedMoment, values: Tensor, uniform: Tensor | None = None) -> None:
    """Store `values` in `moment`.

    Args:
        moment: Written in place.
        values: fp32, of the moment's shape; the sign of a second moment is dropped.
        uniform: fp32 in [0, 1), of the same shape, rounds stochastically; None rounds to the nearest.
    """
    rows, columns = rows_and_columns(moment.codes.shape)
    values = values.reshape(rows, columns)
    threshold: Tensor | float = 0.5 if uniform is None else uniform.reshape(rows, columns)
    size = values.abs()
    field = _unit_field(size, *(SIGNED if moment.signed else UNSIGNED))
    scaled = size * _spread(((254 - field.clamp(max=254)) << 23).view(torch.float32), columns)
    if moment.signed:
        lower = scaled.sqrt().floor_()
        gap, above = 2.0 * lower + 1.0, scaled - lower.square()
    else:
        lower = scaled.sqrt().sqrt_().floor_()
        gap = ((4.0 * lower + 6.0) * lower + 4.0) * lower + 1.0
        above = scaled - lower.square().square()
    codes = lower + (threshold * gap < above)
    codes = codes.copysign(values) if moment.signed else codes.clamp(min=1.0)
    # Where the unit is infinite any code will do, but converting NaN to an integer is undefined.
    codes = torch.where(_spread(field, columns) == 255, 1.0, codes)
    moment.codes.copy_(codes.reshape(moment.codes.shape))
    moment.scale.copy_(field)


def _unit_field(size: Tensor, shift: int, margin: float) -> Tensor:
    """int32 exponent field of each block's unit: (rows, blocks), from 1 on; 255 where not all is finite."""
    rows, columns = size.shape
    padded = torch.nn.functional.pad(size, (0, -columns % BLOCK))
    top = padded.view(rows, padded.shape[1] // BLOCK, BLOCK).amax(2) * margin
    field = ((top.view(torch.int32) + 0x7FFFFF) >> 23).sub_(shift).clamp_(min=1)
    return torch.where(top.isfinite(), field, 255)


def uniform_of(random_bits: Tensor, signed: bool) -> Tensor:
    """Numbers in [0, 1) from 32 random bits: from their lower half for first moments, else the upper."""
    half = random_bits & 0xFFFF if signed else random_bits >> 16
    return half.to(torch.float32) * 2.0**-16


def _spread(per_block: Tensor, columns: int) -> Tensor:
    return per_block.repeat_interleave(BLOCK, dim=1)[:, :columns]
