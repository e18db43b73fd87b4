"""Squared Frobenius norm of a weight gradient from its pair, without the gradient, by the GEMM.

    ||G||^2 = sum_tiles sum (dy^T x)^2               2 T N K FLOP

Each program writes one partial and one more program adds them up: no atomics, so the same pair gives the same
bits. `wgrad_gram` is faster for few tokens. Shapes: dy (T, N), x (T, K).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .embedding import RowSums, load_rows
from .norm_plan import DESCRIPTOR_NORM, norm_tile, processors, uses_descriptors
from .plan import Tile
from .replay import Launch, alignment
from .tiles import GROUP_N, INTERPRET, accumulate_tile, dot, tile_order

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.4; `norm_plan.uses_descriptors` says no there
    TensorDescriptor = None

__all__ = [
    "FINISH_BLOCK",
    "descriptor_norm_sq",
    "finish_launch",
    "finished",
    "gemm_constants",
    "gemm_norm_sq",
    "product_tile",
    "summed",
]

#: Partials that the last program reads at once.
FINISH_BLOCK = 2048


@triton.jit
def product_tile(
    dy_ptr, x_ptr, pid, T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
    EVEN: tl.constexpr, EVEN_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Tile number `pid` of dy^T x, with its row and column among the tiles."""
    pid_n, pid_k = tile_order(pid, tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K), GROUP)
    acc = accumulate_tile(
        dy_ptr, x_ptr, pid_n * BLOCK_N + tl.arange(0, BLOCK_N), pid_k * BLOCK_K + tl.arange(0, BLOCK_K),
        T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
        EVEN, EVEN_T, BLOCK_N, BLOCK_K, BLOCK_T, INTERPRET,
    )  # fmt: skip
    return acc, pid_n, pid_k


@triton.jit(do_not_specialize=["T"])
def _gemm_norm_kernel(
    dy_ptr, x_ptr, partial_ptr, head_ptr, sums_ptr, T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
    EVEN: tl.constexpr, EVEN_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    acc, pid_n, pid_k = product_tile(
        dy_ptr, x_ptr, pid, T, N, K, stride_dt, stride_dn, stride_xt, stride_xk,
        EVEN, EVEN_T, BLOCK_N, BLOCK_K, BLOCK_T, GROUP, INTERPRET,
    )  # fmt: skip
    if head_ptr is not None:
        n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc += load_rows(head_ptr, sums_ptr, n, pid_k * BLOCK_K + tl.arange(0, BLOCK_K), N, K)
    tl.store(partial_ptr + pid, tl.sum(acc * acc))


@triton.jit(do_not_specialize=["T"])
def _descriptor_norm_kernel(
    dy_desc, x_desc, partial_ptr, T, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """The same with blocks from the copy engine, one program a processor: each takes many tiles."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_k = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_n * tiles_k, tl.num_programs(0), flatten=True):
        pid_n, pid_k = tile_order(tile, tiles_n, tiles_k, GROUP)
        acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        for start in range(0, T, BLOCK_T):
            dy = dy_desc.load([start, pid_n * BLOCK_N])
            x = x_desc.load([start, pid_k * BLOCK_K])
            acc = dot(tl.trans(dy), x, acc, INTERPRET)
        tl.store(partial_ptr + tile, tl.sum(acc * acc))


@triton.jit
def finished(partial_ptr, count, BLOCK: tl.constexpr):
    """Sum of `count` partials, at least 0."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    lane = tl.arange(0, BLOCK)
    for start in range(0, count, BLOCK):
        total += tl.load(partial_ptr + start + lane, mask=lane < count - start, other=0.0)
    norm_sq = tl.sum(total)
    # As a comparison, which leaves NaN alone.
    return tl.where(norm_sq < 0.0, 0.0, norm_sq)


@triton.jit(do_not_specialize=["count"])
def _finish_kernel(partial_ptr, out_ptr, count, BLOCK: tl.constexpr):
    tl.store(out_ptr, finished(partial_ptr, count, BLOCK))


@functools.lru_cache(maxsize=1024)
def finish_launch(count: int, device_index: int | None) -> Launch:
    """Launch that takes (partials, out): the sum of `count` fp32 elements, at least 0, by one program."""
    return Launch(_finish_kernel, (1,), (count,), {"BLOCK": FINISH_BLOCK}, num_warps=4)


def summed(count: int, device: torch.device, launch: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """The sum (0-d fp32) of `count` partials, which `launch` writes into the tensor that it is given."""
    partials = torch.empty(count, dtype=torch.float32, device=device)
    result = torch.empty((), dtype=torch.float32, device=device)
    launch(partials)
    finish_launch(count, device.index)(partials, result)
    return result


class _Gemm(NamedTuple):
    programs: int
    tile: Tile
    gemm: Launch


@functools.lru_cache(maxsize=1024)
def _gemm_launches(
    T: int,
    N: int,
    K: int,
    strides: tuple[int, ...],
    operand: torch.dtype,
    device: torch.device,
    aligned: tuple,
    with_rows: bool,
) -> _Gemm:
    tile = norm_tile(N, K, operand, device)
    programs = tile.programs(N, K)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    gemm = Launch(
        _gemm_norm_kernel, (programs,), (T, N, K, *strides), gemm_constants(T, N, K, tile), **options
    )
    return _Gemm(programs, tile, gemm)


def gemm_constants(T: int, N: int, K: int, tile: Tile) -> dict[str, int | bool]:
    """The constants of `product_tile`."""
    even = {"EVEN": N % tile.block_n == 0 and K % tile.block_k == 0, "EVEN_T": T % tile.block_t == 0}
    return {**even, **_blocks(tile)}


@functools.lru_cache(maxsize=1024)
def _descriptor_launches(T: int, N: int, K: int, device: torch.device) -> _Gemm:
    tile = DESCRIPTOR_NORM
    programs = tile.programs(N, K)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    grid = (min(programs, processors(device)),)
    gemm = Launch(_descriptor_norm_kernel, grid, (T, N, K), _blocks(tile), **options)
    return _Gemm(programs, tile, gemm)


def _blocks(tile: Tile) -> dict[str, int | bool]:
    blocks = {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "BLOCK_T": tile.block_t}
    return {**blocks, "GROUP": GROUP_N, "INTERPRET": INTERPRET}


def gemm_norm_sq(dy_TN: torch.Tensor, x_TK: torch.Tensor, rows: RowSums | None = None) -> torch.Tensor:
    """||dy^T x + rows||_F^2 by the GEMM with a reduction for an epilogue (0-d fp32)."""
    (T, N), K, device = dy_TN.shape, x_TK.shape[1], dy_TN.device
    if not (T and N and K):
        assert rows is None, "lookups alone have a norm of their own"
        return torch.zeros((), dtype=torch.float32, device=device)
    aligned, strides = alignment(dy_TN, x_TK), (*dy_TN.stride(), *x_TK.stride())
    if rows is None and uses_descriptors(T, N, K, strides, aligned, dy_TN.dtype, device):
        return descriptor_norm_sq(dy_TN, x_TK)
    launches = _gemm_launches(T, N, K, strides, dy_TN.dtype, device, aligned, rows is not None)
    head_of, sums = (None, None) if rows is None else rows
    return summed(
        launches.programs, device, lambda partials: launches.gemm(dy_TN, x_TK, partials, head_of, sums)
    )


def descriptor_norm_sq(dy_TN: torch.Tensor, x_TK: torch.Tensor) -> torch.Tensor:
    """`gemm_norm_sq` through tensor descriptors, for pairs that `norm_plan.uses_descriptors` allows."""
    (T, N), K, device = dy_TN.shape, x_TK.shape[1], dy_TN.device
    launches = _descriptor_launches(T, N, K, device)
    tile = launches.tile
    dy = TensorDescriptor(dy_TN, [T, N], [dy_TN.stride(0), 1], [tile.block_t, tile.block_n])
    x = TensorDescriptor(x_TK, [T, K], [x_TK.stride(0), 1], [tile.block_t, tile.block_k])
    return summed(launches.programs, device, lambda partials: launches.gemm(dy, x, partials))
