"""8-bit moments: one byte per element and a power-of-two unit per block of 64, in plain torch.

    first moment   x = sign(c) c^2 unit,  codes -126 ... 126   (127, -127: infinity; -128: NaN)
    second moment  x = c^4 unit,          codes 0 ... 253      (254: infinity; 255: NaN)

Companding: within a block, gradients spread over orders of magnitude. Linear codes spend nearly all of them
on the largest tenth, and a second moment that is rounded to 0 makes its weight explode, so a positive one
never gets code 0. The unit is a power of two, so that the grid stays where it is while a block's maximum
drifts: a unit that followed the maximum would round every element anew at every step.

Error bound, with A the block's largest finite magnitude. The unit is the smallest power of two for which A
has a code, so A / unit lies in (7938, 15876] (first moment) or (2.04e9, 4.10e9] (second). An element of size
|x| in [c^2, (c+1)^2) unit, or [c^4, (c+1)^4) unit, becomes one of these two ends, so

    |error|  <  (2 c + 1) unit                      <=  2 sqrt(|x| unit) + unit   <  A / 44
    |error|  <  (4 c^3 + 6 c^2 + 4 c + 1) unit                                    <  A / 52

and at most half of that when rounding to the nearest. Stochastic rounding is linear in the value, so its mean
is the value, but for 0 < x < unit of a second moment, which becomes `unit`: less than A / 2.04e9, whose root
is 1 / 45000 of the block's largest. A unit is at least 2^-126: blocks with A below 2^-112 (2^-94) have fewer
codes.

Blocks run along the rows of `rows_and_columns(shape)`; the last one of a row may be shorter. Shapes: codes
like the weight, int8 or uint8; scale (rows, ceil(columns / 64)) uint8, the exponent field of the fp32 unit, 0
in a moment that was never written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BLOCK", "Moment", "QuantizedMoment", "dequantize", "quantize_", "rows_and_columns", "zeros"]

#: Elements that share a unit.
BLOCK = 64
#: Largest code of a finite value, the unit's exponent below that of the maximum, and what the maximum is
#: multiplied by first: 2^14 / 126^2 and 2^32 / 253^4, rounded up.
SIGNED = (126, 14, 1.0320)
UNSIGNED = (253, 32, 1.0483)


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
    if moment.signed:
        values = codes * codes.abs() * unit
        top = SIGNED[0]
        values[codes > top] = float("inf")
        values[codes < -top] = float("-inf")
        values[codes < -top - 1] = float("nan")
    else:
        values = codes.square().square() * unit
        top = UNSIGNED[0]
        values[codes > top] = float("inf")
        values[codes > top + 1] = float("nan")
    return values.reshape(moment.codes.shape)


def quantize_(moment: QuantizedMoment, values: Tensor, uniform: Tensor | None = None) -> None:
    """Store `values` in `moment`.

    Args:
        moment: Written in place.
        values: fp32, of the moment's shape; negative values of a second moment count as 0.
        uniform: fp32 in [0, 1), of the same shape, rounds stochastically; None rounds to the nearest.
    """
    rows, columns = rows_and_columns(moment.codes.shape)
    values = values.reshape(rows, columns)
    threshold: Tensor | float = 0.5 if uniform is None else uniform.reshape(rows, columns)
    top, shift, margin = SIGNED if moment.signed else UNSIGNED
    finite = values.isfinite()
    size = torch.where(finite, values.abs() if moment.signed else values.clamp(min=0.0), 0.0)
    field = _exponent_field(size, margin, shift)
    inverse = _spread(((254 - field) << 23).view(torch.float32), columns)
    scaled = size * inverse
    if moment.signed:
        lower = scaled.sqrt().floor_().clamp_(max=top)
        gap, base = 2.0 * lower + 1.0, lower.square()
    else:
        lower = scaled.sqrt().sqrt_().floor_().clamp_(max=top)
        base = lower.square().square()
        gap = (lower + 1.0).square().square() - base
    codes = (lower + (threshold * gap < scaled - base)).clamp_(max=top)
    if moment.signed:
        codes = torch.where(finite, codes.copysign(values), (top + 1.0) * values.sign())
        codes = torch.where(values.isnan(), -(top + 2.0), codes)
    else:
        codes = torch.where(scaled > 0, codes.clamp(min=1.0), codes)
        codes = torch.where(finite, codes, torch.where(values > 0, top + 1.0, 0.0))
        codes = torch.where(values.isnan(), top + 2.0, codes)
    moment.codes.copy_(codes.reshape(moment.codes.shape))
    moment.scale.copy_(field)


def _block_maximum(size: Tensor) -> Tensor:
    """Largest element of each block of `size` (rows, columns)."""
    rows, columns = size.shape
    padded = torch.nn.functional.pad(size, (0, -columns % BLOCK))
    return padded.view(rows, padded.shape[1] // BLOCK, BLOCK).amax(2)


def _exponent_field(size: Tensor, margin: float, shift: int) -> Tensor:
    """int32 exponent field of each block's unit, at least 1, whose unit is the smallest normal number."""
    bits = (_block_maximum(size) * margin).view(torch.int32)
    return ((bits + 0x7FFFFF) >> 23).clamp_(min=shift + 1) - shift


def _spread(per_block: Tensor, columns: int) -> Tensor:
    return per_block.repeat_interleave(BLOCK, dim=1)[:, :columns]
