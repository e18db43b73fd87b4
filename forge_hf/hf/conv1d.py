"""transformers' Conv1D (GPT-2): a linear layer with the weight (in K, out N), on the pair path.

Y = X W + b;  G = X^T dY: the pair of `forge_hf.layers` with its sides exchanged
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..layers import SwappedLinear, register_swap

__all__ = ["connect_conv1d"]


def connect_conv1d(module: Any) -> None:
    """Post-import hook of `transformers.pytorch_utils`; never raises."""
    stock = getattr(module, "Conv1D", None)
    if not isinstance(stock, type):
        return  # its weights stay on ordinary gradients, which is slower and right

    class ForgeConv1D(SwappedLinear, stock):  # type: ignore[misc, valid-type]
        """Conv1D whose weight gradient goes to a receiver as the pair (X, dY)."""

        exchanged = True

        def forward(self, x: Tensor) -> Tensor:
            """Y = X W + b; the stock layer's argument has another name than nn.Linear's."""
            return super().forward(x)

    register_swap(stock, ForgeConv1D)
