"""Kernel launches of which only the tensors change, without Triton's look-up of the compiled kernel.

On the host of an H200 a launch through `kernel[grid](...)` took 19 us, mostly to find out again which
compiled kernel fits the arguments. Who keeps a `Launch` for each shape, stride, device and alignment knows
that; dtypes it looks at itself.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from .tiles import INTERPRET, LAUNCH_OPTIONS

__all__ = ["Launch", "alignment"]

#: Before, `CompiledKernel[grid]` took other arguments (Triton 3.6 is the oldest that this was run on).
REPLAYS = not INTERPRET and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)


def alignment(*tensors: torch.Tensor) -> tuple[bool, ...]:
    """What a key must say of each tensor beside its dtype: Triton compiles anew for unaligned pointers."""
    return tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _kind(argument: Any) -> object:
    """What is compiled in of an argument: its dtype, or the one of what a descriptor describes."""
    if argument is None or isinstance(argument, int):
        return type(argument)
    return (argument if isinstance(argument, torch.Tensor) else argument.base).dtype


class Launch:
    """One kernel, its grid, and all its arguments but the tensors, which come first in its signature.

    Whoever keeps one must keep another for each device and alignment of the tensors.
    """

    __slots__ = ("_constants", "_grid", "_kernel", "_numbers", "_options", "_rest", "_runners")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[int, ...],
        constants: dict[str, Any],
        **options: Any,
    ) -> None:
        """Keep the arguments.

        Args:
            kernel: What `triton.jit` made.
            grid: Programs on one to three axes.
            numbers: Run-time arguments after the tensors.
            constants: The constexpr arguments, in the order of the signature, which they end.
            options: `num_warps` and the like.

        Raises:
            ValueError: `constants` are not the last names of the signature.
        """
        if list(kernel.arg_names[len(kernel.arg_names) - len(constants) :]) != list(constants):
            raise ValueError(f"{list(constants)} do not end {kernel.arg_names}")
        self._kernel, self._numbers, self._constants = kernel, numbers, constants
        self._grid = (*grid, 1, 1)[:3]
        self._options = {**LAUNCH_OPTIONS, **options}
        self._rest = (*numbers, *constants.values())
        self._runners: dict[tuple[object, ...], Any] = {}

    def __call__(self, *tensors: Any) -> None:
        """Launch on the current device and stream, which must be the same device each time.

        What is None and the dtypes are compiled in, so each pattern of them has a kernel of its own.
        """
        kinds = tuple([_kind(tensor) for tensor in tensors])
        runner = self._runners.get(kinds)
        if runner is not None:
            runner(*tensors, *self._rest)
            return
        compiled = self._kernel[self._grid](*tensors, *self._numbers, **self._constants, **self._options)
        if REPLAYS:
            self._runners[kinds] = compiled[self._grid]
