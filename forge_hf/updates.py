"""What one update of one weight needs, so that a backend can take many of them at once."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .quantized import Moment
from .scalars import StepScalars

__all__ = ["Update"]


class Update(NamedTuple):
    """The arguments of `wgrad_update_` or `dense_update_` of one weight.

    Attributes:
        weight: fp32, bf16 or fp16, changed in place.
        gradient: One pair (dy (T, N), x (T, K)) of a weight (N, K), a dense gradient of its shape, or None
            where it is given apart.
        moments: In the order of `Rule.moment_names`, changed in place.
        rule: "adamw", "lion" or "sgd".
        scalars: The numbers of this step.
        coefficient: 0-d fp32 tensor that multiplies the gradient, or None.
        rng_key: Key of stochastic rounding, or None for the nearest.
        low: Low bits of a bf16 weight, or None.
    """

    weight: Tensor
    gradient: Tensor | tuple[Tensor, Tensor] | None
    moments: tuple[Moment, ...]
    rule: str
    scalars: StepScalars
    coefficient: Tensor | None = None
    rng_key: int | None = None
    low: Tensor | None = None
