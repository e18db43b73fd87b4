"""Which form, tile and grid the norm of a weight gradient gets: by tokens, shape, dtype and card.

Measured on an H200 with bf16 operands; each choice says its numbers.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from .plan import ENOUGH_PROGRAMS, FP32, GENERIC, Tile, is_hopper

__all__ = [
    "GramPlan",
    "gram_is_cheaper",
    "gram_plan",
    "norm_tile",
    "processors",
    "uses_descriptors",
    "uses_gram",
]

HOPPER_NORM = Tile(128, 256, 64, num_warps=8, num_stages=3)
DESCRIPTOR_NORM = HOPPER_NORM._replace(num_stages=4)

#: Products from which a GEMM pays for two descriptors on the host (20 us), if it has more tiles than the card
#: has processors. 14336x4096 took 0.329 ms against 0.351 at T=2048 and 1.364 against 1.396 at T=8192;
#: 4096x4096 0.056 against 0.060 at T=1024; 1024x4096, one round of tiles, 0.101 against 0.097 at T=8192.
DESCRIPTOR_PRODUCTS = 1 << 34
#: Whether Triton is one that descriptors were tried with.
HAS_DESCRIPTORS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
#: What the Gram form costs the host more than the GEMM, us (41 against 25); halved, as a host may run ahead.
GRAM_HOST_US = 8
#: Programs of the Gram kernels that a card runs at once: two on each of an H200's 132 processors.
GRAM_SLOTS = 264
#: Tiles of partial sums in the scratch, where the parts are more than two: 32 MiB of 128x128.
GRAM_TILES = 512
#: Rows of a tile that a program of the product takes.
SLICE_ROWS = 8
#: Most tokens, and elements, that a program of the kernel that centres holds in registers.
COLUMN_TOKENS, COLUMN_TILE = 512, 1 << 14


def norm_tile(N: int, K: int, operand: torch.dtype, device: torch.device) -> Tile:
    """Tile of the norm's GEMM."""
    if operand == torch.float32:
        return FP32
    return HOPPER_NORM if is_hopper(device) and HOPPER_NORM.programs(N, K) >= ENOUGH_PROGRAMS else GENERIC


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
        T * N * K >= DESCRIPTOR_PRODUCTS
        and operand != torch.float32
        and all(aligned)
        and strides[1] == strides[3] == 1
        and strides[0] % 8 == strides[2] % 8 == 0
        and is_hopper(device)
        and DESCRIPTOR_NORM.programs(N, K) > processors(device)
        and HAS_DESCRIPTORS
    )


def gram_is_cheaper(tokens: int, out_features: int, in_features: int) -> bool:
    """Whether the Gram form is faster than the GEMM by more than its two further launches cost the host.

    Both times, in us, are fits to an H200, bf16. Measured there, ms of cuBLAS' dW, the GEMM and the Gram form
    for weights of so many rows and 4096 columns:

        T      128                512                1024               2048               8192
        14336  0.046 0.053 0.028  0.097 0.103 0.040  0.167 0.163 0.085  0.314 0.329 0.231  1.29  1.36
         4096  0.020 0.021 0.022  0.034 0.035 0.030  0.053 0.051 0.059  0.093 0.092 0.147  0.363 0.376
         1024  0.010 0.010 0.021  0.013 0.014 0.028  0.018 0.019 0.052  0.027 0.029 0.112  0.089 0.092
    """
    features, weights = out_features + in_features, out_features * in_features
    gemm = 5 + weights / 4.3e6 * (2.65 + 0.0097 * tokens)
    gram = 20 + 1.4e-6 * tokens * features + 2.1e-9 * tokens * tokens * features
    return gram + GRAM_HOST_US < gemm


def uses_gram(tokens: int, out_features: int, in_features: int, operand: torch.dtype) -> bool:
    """Whether the norm goes by the Gram form.

    Not for fp16: a sum of loss-scaled gradients may overflow, which would pass for an overflow of the
    gradient.
    """
    return tokens > 0 and operand != torch.float16 and gram_is_cheaper(tokens, out_features, in_features)


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
    block_f = 64
    if operand == torch.float32:
        block_t, block_f = min(block_t, 64), 32
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
        num_warps=4,
        num_stages=3,
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


@functools.cache
def processors(device: torch.device) -> int:
    """Number of streaming multiprocessors; 132 where there is none to ask."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
