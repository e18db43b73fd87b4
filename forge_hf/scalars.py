"""The numbers of one update that are the same for every element of a weight."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["StepScalars"]


class StepScalars(NamedTuple):
    """Python floats of one update; each rule reads the ones that it needs (see `rules.py`)."""

    lr: float
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    bias_correction1: float = 1.0
    bias_correction2_sqrt: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
