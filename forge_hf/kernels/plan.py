"""Which path and which tile a weight gets: fixed tables by tokens, shape, dtypes and card.

A table instead of autotuning: the update kernel changes its inputs, so a tuning run would train the model.
Measured on an H200, ms for weights of 14336x4096 and 4096x4096, bf16 throughout, AdamW, stochastic rounding:

    tile                T=512        T=2048       T=8192 (14336x4096 only)
    64x128, 4 warps     0.32 0.11    0.62 0.21    2.17
    128x128, 8 warps    0.29 0.10    0.52 0.17    1.56
    128x256, 16 warps   0.31 0.10    0.50 0.17    1.43
    cuBLAS in chunks    0.38 0.14    0.60 0.19    1.58
    cuBLAS' dW alone    0.10 0.04    0.31 0.10    1.20

Chunks lose although the 128x256 main loop is only as fast as cuBLAS: their gradient does not stay in the L2
cache beside the weight and the moments, and each chunk is two launches.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from .tiles import INTERPRET

__all__ = [
    "GramPlan",
    "Tile",
    "gram_is_cheaper",
    "gram_plan",
    "norm_tile",
    "processors",
    "update_tile",
    "uses_chunks",
    "uses_descriptors",
]


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
        return triton.cdiv(N, self.block_n) * triton.cdiv(K, self.block_k)


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
HOPPER_NORM = Tile(128, 256, 64, num_warps=8, num_stages=3)
DESCRIPTOR_NORM = HOPPER_NORM._replace(num_stages=4)

#: Below, the epilogue takes longer than the main loop.
PAIR_TOKENS = 1024
#: Fewer tiles than this leave more than half of an H200's 132 processors idle.
ENOUGH_PROGRAMS = 66
#: fp32 operands go to the vendor's GEMM in chunks from this many tokens and products on: 384x1536 at T=4096
#: took 0.12 ms against 0.22, 4096x4096 at T=2048 1.43 against 1.51, but at T=512 0.47 against 0.40.
CHUNK_TOKENS, CHUNK_PRODUCTS = 2048, 1 << 26
#: Tokens from which a GEMM is long enough to pay for two descriptors on the host.
DESCRIPTOR_TOKENS = 1024
#: Whether Triton is one that descriptors were tried with.
HAS_DESCRIPTORS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
#: Features from which the Gram form is worth its latency: at T=512, 18432 took 0.05 ms against 0.10 for the
#: GEMM, and 8192 took 0.042 against 0.036.
GRAM_FEATURES = 16384
#: Programs of the Gram kernels that a card runs at once: two on each of an H200's 132 processors.
GRAM_SLOTS = 264
#: Tiles of partial sums in the scratch, where the parts are more than two: 32 MiB of 128x128.
GRAM_TILES = 512
#: Rows of a tile that a program of the product takes.
SLICE_ROWS = 8
#: Most tokens, and elements, that a program of the kernel that centres holds in registers.
COLUMN_TOKENS, COLUMN_TILE = 512, 1 << 14


def update_tile(T: int, N: int, K: int, operand: torch.dtype, state_bytes: int, device: torch.device) -> Tile:
    """Tile of the fused update kernel; `state_bytes` is the widest item of weight and moments."""
    if operand == torch.float32:
        return FP32
    if not _is_hopper(device):
        return GENERIC
    narrow = state_bytes <= 2
    wide = HOPPER_WIDE if narrow else HOPPER_WIDE_FP32
    tiles = [HOPPER_PAIR, wide] if narrow and T < PAIR_TOKENS else [wide, HOPPER_PAIR] if narrow else [wide]
    return next((tile for tile in tiles if tile.programs(N, K) >= ENOUGH_PROGRAMS), GENERIC)


def uses_chunks(T: int, N: int, K: int, operand: torch.dtype) -> bool:
    """Whether `wgrad_chunks` takes the update: large fp32 products, at fewer tokens too if TF32 is allowed.

    TF32 made 4096x4096 at T=512 0.23 ms, against 0.40 for the fused kernel, whose products are always IEEE.
    """
    return (
        operand == torch.float32 and T * N * K >= CHUNK_PRODUCTS and (T >= CHUNK_TOKENS or _tf32_is_allowed())
    )


def _tf32_is_allowed() -> bool:
    matmul = torch.backends.cuda.matmul
    # The older setting may not be read once the newer one (torch 2.9) was written.
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


def norm_tile(N: int, K: int, operand: torch.dtype, device: torch.device) -> Tile:
    """Tile of the norm's GEMM."""
    if operand == torch.float32:
        return FP32
    return HOPPER_NORM if _is_hopper(device) and HOPPER_NORM.programs(N, K) >= ENOUGH_PROGRAMS else GENERIC


def uses_descriptors(
    T: int,
    N: int,
    K: int,
    strides: tuple[int, ...],
    aligned: tuple[bool, ...],
    operand: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether the norm's GEMM reads dy and x (strides of both) through the copy engine of Hopper cards."""
    return (
        T >= DESCRIPTOR_TOKENS
        and operand != torch.float32
        and all(aligned)
        and strides[1] == strides[3] == 1
        and strides[0] % 8 == strides[2] % 8 == 0
        and DESCRIPTOR_NORM.programs(N, K) >= ENOUGH_PROGRAMS
        and _is_hopper(device)
        and HAS_DESCRIPTORS
    )


def gram_is_cheaper(tokens: int, out_features: int, in_features: int) -> bool:
    """Whether the Gram form is faster than the GEMM, whose FLOP/s it reaches about half of."""
    features = out_features + in_features
    return features >= GRAM_FEATURES and 2 * tokens * features < 2 * out_features * in_features


class GramPlan(NamedTuple):
    """Blocks, grid and scratch of the Gram kernels for one pair; scratch counts fp32 elements."""

    #: Tile of the Gram matrices and block of features; `side` tiles a side.
    block_t: int
    block_f: int
    num_warps: int
    num_stages: int
    side: int
    #: Whether no load of the Gram tiles needs a mask.
    even: bool
    #: Features of a program, and how many such parts dy and x have.
    features: int
    parts_n: int
    parts_k: int
    #: Block of the kernel that centres, and how many blocks of columns dy and x have.
    column_rows: int
    column_width: int
    blocks_n: int
    blocks_k: int
    #: Number of the product's partials, which come first in the scratch; where the sums over columns, the
    #: tiles and the centred x begin; its length.
    partials: int
    columns_at: int
    tiles_at: int
    centred_at: int
    scratch: int


def gram_plan(T: int, N: int, K: int, operand: torch.dtype) -> GramPlan:
    """Tile, parts and scratch of the Gram kernels."""
    block_t = next(block for block in (16, 32, 64, 128) if T <= block or block == 128)
    block_f, num_warps, num_stages = 64, 8 if block_t == 128 else 4, 3
    if operand == torch.float32:
        block_t, block_f, num_warps = min(block_t, 64), 32, 4
    side = triton.cdiv(T, block_t)
    pairs = side * (side + 1) // 2
    features = _gram_features(pairs, N, K, block_f)
    parts_n, parts_k = triton.cdiv(N, features), triton.cdiv(K, features)
    # All tokens at once, where they fit the registers, are read once.
    rows = max(16, triton.next_power_of_2(T))
    rows, width = (rows, min(64, COLUMN_TILE // rows)) if rows <= COLUMN_TOKENS else (128, 64)
    blocks_n, blocks_k = triton.cdiv(N, width), triton.cdiv(K, width)
    partials = (pairs + side) * (block_t // SLICE_ROWS)
    columns_at = triton.cdiv(partials, 32) * 32
    tiles_at = columns_at + triton.cdiv((blocks_n + blocks_k) * (T + 1), 32) * 32
    centred_at = tiles_at + (parts_n + parts_k) * pairs * block_t * block_t
    return GramPlan(
        block_t=block_t,
        block_f=block_f,
        num_warps=num_warps,
        num_stages=num_stages,
        side=side,
        even=T % block_t == 0 and N % block_f == 0 and K % block_f == 0,
        features=features,
        parts_n=parts_n,
        parts_k=parts_k,
        column_rows=rows,
        column_width=width,
        blocks_n=blocks_n,
        blocks_k=blocks_k,
        partials=partials,
        columns_at=columns_at,
        tiles_at=tiles_at,
        centred_at=centred_at,
        scratch=centred_at + triton.cdiv(T * K * operand.itemsize, 4),
    )


def _gram_features(pairs: int, N: int, K: int, block_f: int) -> int:
    """Features of a program: the fewest rounds of GRAM_SLOTS programs, in scratch of at most GRAM_TILES."""
    least = 4 * block_f
    best, choice = float("inf"), triton.cdiv(max(N, K, 1), least) * least
    for parts in range(2, max(3, GRAM_TILES // max(pairs, 1) + 1)):
        features = triton.cdiv(triton.cdiv(N + K, parts), least) * least
        count = triton.cdiv(N, features) + triton.cdiv(K, features)
        # A program's start and end take about as long as four blocks of features.
        cost = triton.cdiv(pairs * count, GRAM_SLOTS) * (features + least)
        if cost < best and pairs * count <= max(GRAM_TILES, 2 * pairs):
            best, choice = cost, features
    return choice


def _is_hopper(device: torch.device) -> bool:
    return not INTERPRET and torch.version.hip is None and _capability(device.index) == (9, 0)


@functools.cache
def processors(device: torch.device) -> int:
    """Number of streaming multiprocessors; 132 where there is none to ask."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@functools.cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
