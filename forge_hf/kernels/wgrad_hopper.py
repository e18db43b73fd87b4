"""Weight gradient and update on an H100 or H200: one tile is multiplied while another is updated.

    G = dy^T x;   norm_sq = sum G^2;   w, moments = rule(w, coefficient * G, moments)

Shapes: dy (T, N), x (T, K), weight and moments (N, K). The kernel is in `hopper_roles`. Its random bits and
its arithmetic are those of `wgrad_update`. Source: FORGE, arXiv 2606.22932, section 3.

Measured on an H200, ms, bf16 throughout, AdamW, stochastic rounding, for 14336x4096 and 4096x14336:

                     T=512        T=2048       T=8192
    cuBLAS' dW alone 0.10 0.11    0.31 0.33    1.30 1.27
    wgrad_update     0.295 0.346  0.508 0.517  1.452 1.540
    SQUARE           0.236 0.252  0.542 0.544  1.914 1.994
    WIDE             0.320 0.332  0.451 0.457  1.431 1.474

Without any update WIDE takes 0.09, 0.34 and 1.40 where cuBLAS took 0.10, 0.34 and 1.40: the rest is what both
roles lose to each other. For 4096x4096 at T=512 SQUARE took 0.256 and `wgrad_update` 0.096, so smaller
weights go there; the time is probably the host's, which describes five tensors at each launch.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from ..quantized import Moment, QuantizedMoment
from .norm_plan import processors
from .plan import is_hopper
from .replay import Launch
from .rules import RuleArguments, named
from .tiles import GROUP_N, INTERPRET
from .wgrad_norm import summed

_roles: Any = None
if not INTERPRET and triton.__version__.startswith("3.6."):  # the language changes with every version
    with contextlib.suppress(ImportError):
        _roles = importlib.import_module(".hopper_roles", __package__)

#: Whether this Triton can compile the kernel, and whether it is wanted: FORGE_HF_HOPPER=0 turns it off.
COMPILES = _roles is not None and os.environ.get("FORGE_HF_HOPPER", "1") != "0"

__all__ = ["COMPILES", "HopperTile", "HopperUpdate", "hopper_tile", "hopper_update"]


class HopperTile(NamedTuple):
    """Block sizes, depth of the rings and warps of one program."""

    block_n: int
    block_k: int
    block_t: int
    stages: int
    #: Rows of a tile that are updated at a time, and neighbouring elements per thread.
    rows: int
    vector: int
    #: Warps that update, and registers of each thread of the program.
    update_warps: int
    registers: int
    #: Slices of weight and moments on their way into shared memory; 0 loads them into registers.
    slots: int


#: Short products: the update is the longer part, and wants more of its operands under way.
SQUARE = HopperTile(128, 128, 64, 3, 32, 8, 8, 128, 2)
#: Long products want fewer reads of dy and x, and a deep ring.
WIDE = HopperTile(128, 256, 32, 4, 8, 8, 4, 168, 0)
#: From these tokens on WIDE is faster.
WIDE_TOKENS = 1024
#: Elements of a weight from which the kernel was found faster; at 2^24 it was not.
LARGE = 1 << 25


def hopper_tile(
    weight: torch.Tensor, dy_TN: torch.Tensor, x_TK: torch.Tensor, moments: Sequence[Moment]
) -> HopperTile | None:
    """The tile for these arguments, or None where this kernel does not fit or was not found faster."""
    (N, K), T = weight.shape, dy_TN.shape[0]
    if not (COMPILES and T and is_hopper(weight.device)):
        return None
    if any(isinstance(moment, QuantizedMoment) for moment in moments):
        return None
    state = (weight, *(moment for moment in moments if isinstance(moment, torch.Tensor)))
    if dy_TN.dtype not in (torch.bfloat16, torch.float16) or any(tensor.itemsize != 2 for tensor in state):
        return None
    if any(not _copies(tensor) for tensor in (dy_TN, x_TK, *state)):
        return None
    tile = SQUARE if T < WIDE_TOKENS else WIDE
    if N % tile.block_n or K % tile.block_k or N * K < LARGE:
        return None
    return tile


def _copies(matrix: torch.Tensor) -> bool:
    """Whether the copy engine can read it: rows without gaps inside, which begin at multiples of 16 bytes."""
    aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.itemsize % 16 == 0
    return aligned and matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]


class HopperUpdate(NamedTuple):
    """The launch of one weight's update, which only the tensors change; see `wgrad_update.FusedUpdate`."""

    programs: int
    tile: HopperTile
    update: Launch

    def run(
        self,
        weight: torch.Tensor,
        dy_TN: torch.Tensor,
        x_TK: torch.Tensor,
        arguments: RuleArguments,
        want_norm_sq: bool,
    ) -> torch.Tensor | None:
        """Launch; returns the squared norm (0-d fp32) if wanted."""
        tile = self.tile
        _, m, v, _, _, coefficient, numbers = arguments.pointers
        state = [None, None, None]
        if tile.slots:
            state = [
                None if tensor is None else _roles.descriptor(tensor, tile.rows, tile.block_k)
                for tensor in (weight, m, v)
            ]
        dy = _roles.descriptor(dy_TN, tile.block_t, tile.block_n)
        x = _roles.descriptor(x_TK, tile.block_t, tile.block_k)

        def launch(partials: torch.Tensor | None) -> None:
            self.update(dy, x, *state, weight, m, v, coefficient, numbers, partials, arguments.rng_key)

        if want_norm_sq:
            return summed(self.programs, weight.device, launch)
        launch(None)
        return None


def hopper_update(
    weight: torch.Tensor,
    dy_TN: torch.Tensor,
    x_TK: torch.Tensor,
    moments: Sequence[Moment],
    constants: tuple[str, bool, bool],
    low: torch.Tensor | None = None,
) -> HopperUpdate | None:
    """The launches for these tensors and all like them, or None where `hopper_tile` has none."""
    tile = None if low is not None else hopper_tile(weight, dy_TN, x_TK, moments)
    if tile is None:
        return None
    (N, K), T = weight.shape, dy_TN.shape[0]
    tiles = (N // tile.block_n) * (K // tile.block_k)
    flags = {
        **named(constants),
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "BLOCK_T": tile.block_t,
        "STAGES": tile.stages,
        "ROWS": tile.rows,
        "VECTOR": tile.vector,
        "UPDATE_WARPS": tile.update_warps,
        "UPDATE_REGISTERS": tile.registers,
        "GROUP": GROUP_N,
        "SLOTS": tile.slots,
    }
    grid = (min(tiles, processors(weight.device)),)
    launch = Launch(_roles.wgrad_hopper_kernel, grid, (T, N, K), flags, num_warps=8, maxnreg=tile.registers)
    return HopperUpdate(tiles, tile, launch)
