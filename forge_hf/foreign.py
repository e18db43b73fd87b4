"""Optimizer checkpoints of other libraries, read as ours."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .config import refuse

__all__ = ["from_bitsandbytes"]

#: bitsandbytes nests its quantised tensors under this key when it saves them.
_NESTED = "__bnb_optimizer_quant_state__"
#: Elements per block of its 8-bit optimizers.
_BLOCK_SIZE = 256


def from_bitsandbytes(saved: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """State of one parameter of a bitsandbytes optimizer with fp32 moments under `names`; others unchanged.

    Args:
        saved: State of one parameter.
        names: Our keys of the moments.

    Raises:
        ForgeRefusal: the moments are quantised and bitsandbytes is not installed.
    """
    saved = {**saved, **saved.get(_NESTED, {})}
    saved.pop(_NESTED, None)
    if "state1" not in saved:
        return saved
    result = {"step": saved.get("step", 1)}
    for number, name in enumerate(names, start=1):
        moment = saved.get(f"state{number}")
        if isinstance(moment, Tensor):
            result[name] = _dequantized(moment, saved.get(f"qmap{number}"), saved.get(f"absmax{number}"))
    return result


def _dequantized(moment: Tensor, code: Tensor | None, absmax: Tensor | None) -> Tensor:
    if code is None or absmax is None:
        return moment
    try:
        from bitsandbytes.functional import dequantize_blockwise
    except ImportError as error:
        raise refuse(
            "state_file", problem="it holds 8-bit moments of bitsandbytes, which is not installed"
        ) from error
    return dequantize_blockwise(moment, absmax=absmax, code=code, blocksize=_BLOCK_SIZE)
