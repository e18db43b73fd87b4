"""Tile sizes by dtype, the order in which tiles run, and the GEMM main loop that update and norm share.

    acc = sum_t dy[t, n] * x[t, k]        (BLOCK_N, BLOCK_K), fp32

Shapes: dy (T, N), x (T, K) with any strides, fp32, bf16 or fp16, both the same dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = [
    "GROUP_N",
    "INTERPRET",
    "LAUNCH_OPTIONS",
    "Tile",
    "accumulate_tile",
    "dot",
    "gemm_tile",
    "gram_tile",
    "tile_order",
    "to_fp32",
]

#: Row blocks of the weight that share the same columns of x while those are in the L2 cache.
GROUP_N = 8


#: Fused multiply-adds said aloud: Triton 3.10 turns its default around.
LAUNCH_OPTIONS = {"enable_fp_fusion": True}


class Tile(NamedTuple):
    """Block sizes and launch options of one GEMM program."""

    block_n: int
    block_k: int
    block_t: int
    num_warps: int
    num_stages: int


# A table instead of autotuning: the update kernel changes its inputs, so a tuning run would train the model.
# 64x128 with 4 warps keeps several programs on one SM, whose epilogues and main loops then overlap; on an
# H200 it beat 128x128 with 8 warps at T=512 (0.44 against 0.52 ms for 14336x4096). Three stages are 72 KiB,
# which fits the 99 KiB of consumer cards too. fp32 has no tensor-core path with IEEE products: the unrolled
# FMA loop asks for a short BLOCK_T.
_GEMM_16BIT = Tile(64, 128, 64, num_warps=4, num_stages=3)
_GEMM_FP32 = Tile(64, 64, 16, num_warps=4, num_stages=3)


def gemm_tile(dtype: torch.dtype) -> Tile:
    """Tile of the dy^T x kernels for operands of `dtype`."""
    return _GEMM_FP32 if dtype == torch.float32 else _GEMM_16BIT


def gram_tile(tokens: int, dtype: torch.dtype) -> tuple[int, int]:
    """Token and feature block of the Gram kernel.

    Half of the square of token tiles runs, so small tiles at small T: 512 tokens make 136 programs of 32x32,
    about one per SM, but 36 of 64x64.
    """
    block_t = 16 if tokens <= 16 else 32 if tokens <= 512 else 64
    return block_t, 32 if dtype == torch.float32 else 128


@triton.jit
def tile_order(pid, tiles_n, tiles_k, GROUP: tl.constexpr):
    """Row and column of tile number `pid`, walking down GROUP rows before the next column."""
    per_group = GROUP * tiles_k
    first = (pid // per_group) * GROUP
    rows = tl.minimum(tiles_n - first, GROUP)
    inside = pid % per_group
    return first + inside % rows, inside // rows


#: Whether Triton interprets these kernels in Python on the CPU; it decides so when `triton.jit` runs above.
INTERPRET = not isinstance(tile_order, triton.JITFunction)


@triton.jit
def to_fp32(value, INTERPRET: tl.constexpr):
    """Widen to fp32; under the interpreter bf16 goes by its bits, whose cast loses subnormals there."""
    if INTERPRET and value.dtype == tl.bfloat16:
        return (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def dot(left, right, acc, INTERPRET: tl.constexpr):
    """`acc + left @ right` in fp32, IEEE products for fp32 operands.

    The interpreter multiplies the uint16 codes of bf16 operands (errors of 1e10, no message), so there they
    are widened first; products of 16-bit numbers are exact in fp32 either way.
    """
    if INTERPRET:
        left = to_fp32(left, INTERPRET)
        right = to_fp32(right, INTERPRET)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def accumulate_tile(
    dy_ptr, x_ptr, offs_n, offs_k, T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One tile of dy^T x, 0 outside the matrix; EVEN says that every block is full and loads need no mask."""
    offs_t = tl.arange(0, BLOCK_T)
    step_dt = tl.cast(stride_dt, tl.int64)
    step_xt = tl.cast(stride_xt, tl.int64)
    dy_ptrs = dy_ptr + offs_n.to(tl.int64)[:, None] * stride_dn + offs_t[None, :] * step_dt
    x_ptrs = x_ptr + offs_t[:, None] * step_xt + offs_k.to(tl.int64)[None, :] * stride_xk
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in range(0, T, BLOCK_T):
        if EVEN:
            dy = tl.load(dy_ptrs)
            x = tl.load(x_ptrs)
        else:
            inside = offs_t < T - start
            dy = tl.load(dy_ptrs, mask=(offs_n < N)[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_ptrs, mask=inside[:, None] & (offs_k < K)[None, :], other=0.0)
        acc = dot(dy, x, acc, INTERPRET)
        dy_ptrs += BLOCK_T * step_dt
        x_ptrs += BLOCK_T * step_xt
    return acc
