"""The order in which tiles run, and the GEMM main loop that update and norm share.

    acc = sum_t dy[t, n] * x[t, k]        (BLOCK_N, BLOCK_K), fp32

Shapes: dy (T, N), x (T, K) with any strides, fp32, bf16 or fp16, both the same dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = [
    "CUDA",
    "GROUP_N",
    "INTERPRET",
    "LAUNCH_OPTIONS",
    "accumulate_tile",
    "dot",
    "tile_order",
    "to_fp32",
]

#: Row blocks of the weight that share the same columns of x while those are in the L2 cache.
GROUP_N = 8

#: Fused multiply-adds said aloud: Triton 3.10 turns its default around.
LAUNCH_OPTIONS = {"enable_fp_fusion": True}


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

#: Whether kernels may use PTX.
CUDA = tl.constexpr(not INTERPRET and torch.version.hip is None)


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
    EVEN: tl.constexpr, EVEN_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One tile of dy^T x, 0 outside the matrix.

    EVEN says that tiles divide N and K, EVEN_T that blocks divide T; loads then need no mask on that side.
    """
    offs_t = tl.arange(0, BLOCK_T)
    step_dt = tl.cast(stride_dt, tl.int64)
    step_xt = tl.cast(stride_xt, tl.int64)
    dy_ptrs = dy_ptr + offs_n.to(tl.int64)[:, None] * stride_dn + offs_t[None, :] * step_dt
    x_ptrs = x_ptr + offs_t[:, None] * step_xt + offs_k.to(tl.int64)[None, :] * stride_xk
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in range(0, T, BLOCK_T):
        if EVEN and EVEN_T:
            dy = tl.load(dy_ptrs)
            x = tl.load(x_ptrs)
        elif EVEN:
            dy = tl.load(dy_ptrs, mask=(offs_t < T - start)[None, :], other=0.0)
            x = tl.load(x_ptrs, mask=(offs_t < T - start)[:, None], other=0.0)
        else:
            inside = offs_t < T - start
            dy = tl.load(dy_ptrs, mask=(offs_n < N)[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_ptrs, mask=inside[:, None] & (offs_k < K)[None, :], other=0.0)
        acc = dot(dy, x, acc, INTERPRET)
        dy_ptrs += BLOCK_T * step_dt
        x_ptrs += BLOCK_T * step_xt
    return acc
