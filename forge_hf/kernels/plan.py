"""Which path and which tile a weight gets: fixed tables by tokens, shape, dtypes and card.

A table instead of autotuning: the update kernel changes its inputs, so a tuning run would train the model.
Measured on an H200, ms for weights of 14336x4096 and 4096x4096, bf16 throughout, AdamW, stochastic rounding:

    tile                T=512        T=2048       T=8192 (14336x4096 only)
    64x128, 4 warps     0.32 0.11    0.62 0.21    2.17
    128x128, 8 warps    0.29 0.10    0.52 0.17    1.56
    128x256, 16 warps   0.31 0.10    0.50 0.17    1.43
    cuBLAS in chunks    0.38 0.14    0.60 0.19    1.58
    cuBLAS' dW alone    0.10 0.04    0.31 0.10    1.20

8-bit moments: 128x256 in parts of 64 columns, as larger parts spill; at few tokens see `uses_chunks`.

Chunks lose although the 128x256 main loop is only as fast as cuBLAS: their gradient does not stay in the L2
cache beside the weight and the moments, and each chunk is two launches.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .tiles import INTERPRET

__all__ = ["Tile", "is_hopper", "update_tile", "uses_chunks"]


class Tile(NamedTuple):
    """Block sizes and launch options of one GEMM program."""

    block_n: int
    block_k: int
    block_t: int
    num_warps: int
    num_stages: int
    #: In how many pieces the epilogue goes: two of rows, each in parts / 2 of columns.
    parts: int = 4
    #: Cap on registers per thread, where two programs fit on a processor that would otherwise hold one.
    max_registers: int | None = None

    def programs(self, N: int, K: int) -> int:
        """Number of tiles of an (N, K) weight."""
        return -(-N // self.block_n) * -(-K // self.block_k)


# Three stages are 72 KiB, which fits the 99 KiB of consumer cards too. fp32 has no tensor-core path with IEEE
# products: the unrolled FMA loop asks for a short BLOCK_T.
GENERIC = Tile(64, 128, 64, num_warps=4, num_stages=3)
FP32 = Tile(64, 64, 16, num_warps=4, num_stages=3)
# Two programs on a processor, one multiplying while the other updates: best where the update takes longer.
HOPPER_PAIR = Tile(128, 128, 64, num_warps=8, num_stages=3, max_registers=128)
# The fewest reads of dy and x; 16 warps keep enough loads of weight and moments in flight.
HOPPER_WIDE = Tile(128, 256, 32, num_warps=16, num_stages=5)
# fp32 weights or moments take twice the registers, and half the columns are as many bytes.
HOPPER_WIDE_FP32 = HOPPER_WIDE._replace(parts=8)

#: Below, the epilogue takes longer than the main loop.
PAIR_TOKENS = 1024
#: Fewer tiles than this leave more than half of an H200's 132 processors idle.
ENOUGH_PROGRAMS = 66
#: fp32 operands go to the vendor's GEMM in chunks from this many tokens and products on: 384x1536 at T=4096
#: took 0.12 ms against 0.22, 4096x4096 at T=2048 1.43 against 1.51, but at T=512 0.47 against 0.40.
CHUNK_TOKENS, CHUNK_PRODUCTS = 2048, 1 << 26
#: Tokens up to which, and elements of the weight from which, updates with 8-bit moments go in chunks. Smaller
#: weights share a launch (`groups.py`), which saves the host more than the GPU loses.
QUANTIZED_CHUNK_TOKENS, QUANTIZED_CHUNK_SIZE = 4096, 1 << 25


def update_tile(
    T: int,
    N: int,
    K: int,
    operand: torch.dtype,
    state_bytes: int,
    device: torch.device,
    quantized: bool = False,
) -> Tile:
    """Tile of the fused update kernel.

    Args:
        T: Tokens.
        N: Rows of the weight.
        K: Columns of the weight.
        operand: dtype of dy and x.
        state_bytes: The widest item of weight and moments.
        device: Where the kernel runs.
        quantized: Whether a moment is 8-bit. The parts of the epilogue are then whole blocks of 64 columns.
    """
    if operand == torch.float32:
        return FP32._replace(parts=2) if quantized else FP32
    if not is_hopper(device):
        return GENERIC
    narrow = state_bytes <= 2 and not quantized
    wide = HOPPER_WIDE if narrow else HOPPER_WIDE_FP32
    tiles = [HOPPER_PAIR, wide] if narrow and T < PAIR_TOKENS else [wide, HOPPER_PAIR] if narrow else [wide]
    return next((tile for tile in tiles if tile.programs(N, K) >= ENOUGH_PROGRAMS), GENERIC)


def uses_chunks(
    T: int, N: int, K: int, operand: torch.dtype, device: torch.device, quantized: bool = False
) -> bool:
    """Whether `wgrad_chunks` takes the update.

    fp32 operands: large products, at fewer tokens too if TF32 is allowed, which made 4096x4096 at T=512 0.23
    ms, against 0.40 for the fused kernel, whose products are always IEEE. 16-bit operands: only where 8-bit
    moments make the epilogue longer than the product, as the element-wise kernel does the same work with more
    warps: 14336x4096 took 0.37 ms against 0.49 at T=512, 0.60 to 0.71 at 2048, 1.89 to 1.78 at 8192.
    """
    if operand == torch.float32:
        return T * N * K >= CHUNK_PRODUCTS and (T >= CHUNK_TOKENS or _tf32_is_allowed())
    return quantized and T <= QUANTIZED_CHUNK_TOKENS and N * K >= QUANTIZED_CHUNK_SIZE and is_hopper(device)


def _tf32_is_allowed() -> bool:
    matmul = torch.backends.cuda.matmul
    # The older setting may not be read once the newer one (torch 2.9) was written.
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


def is_hopper(device: torch.device) -> bool:
    """Whether kernels run on an H100 or H200 there, and not in the interpreter."""
    cuda = device.type == "cuda" and torch.version.hip is None
    return cuda and not INTERPRET and _capability(device.index) == (9, 0)


@functools.cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
