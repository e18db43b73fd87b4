"""The one choice between the two backends: Triton kernels, or plain torch.

`FORGE_HF_BACKEND` is "auto" (Triton for weights on a GPU that it supports, else torch), "triton" or
"reference"; a change acts on the next optimizer that is built and after the next `step()`. Both backends
offer the same functions with the same arguments (see `reference.py`).
"""

from __future__ import annotations

import functools
import importlib.util
import os
from types import ModuleType

from torch import Tensor

from . import reference
from .config import ForgeConfigError

__all__ = ["backend_for", "backend_name", "reread_environment"]


@functools.cache
def _choice() -> str:
    choice = os.environ.get("FORGE_HF_BACKEND", "auto")
    if choice not in ("auto", "triton", "reference"):
        raise ForgeConfigError(f"FORGE_HF_BACKEND='{choice}' is unknown. Valid: auto, triton, reference.")
    return choice


def reread_environment() -> None:
    """Look at `FORGE_HF_BACKEND` again before the next use; every look costs a microsecond."""
    _choice.cache_clear()


@functools.cache
def _triton_launchers() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from .kernels import launch

    return launch


def backend_for(weight: Tensor) -> ModuleType:
    """Module whose functions update `weight`.

    Raises:
        ForgeConfigError: `FORGE_HF_BACKEND` has an unknown value, or asks for Triton where it cannot run.
    """
    choice = _choice()
    if choice == "reference":
        return reference
    # On a CPU the kernels could only run in Triton's interpreter, which is for tests.
    if choice == "triton" or weight.is_cuda:
        launchers = _triton_launchers()
        if launchers is not None and launchers.available(weight) and weight.is_contiguous():
            return launchers
        if choice == "triton":
            raise ForgeConfigError(
                f"FORGE_HF_BACKEND='triton' cannot update this weight ({weight.device}, "
                f"contiguous={weight.is_contiguous()}). "
                "Fix: install triton and use a GPU, or FORGE_HF_BACKEND=auto."
            )
    return reference


def backend_name(weight: Tensor) -> str:
    """Name of the backend that updates `weight`, "triton" or "reference"."""
    return "reference" if backend_for(weight) is reference else "triton"
