"""Weight gradient by the vendor's GEMM, some rows at a time, each followed by the element-wise update.

    for rows:  G = dy[:, rows]^T x;   norm_sq += sum G^2;   w[rows], moments[rows] = rule(coefficient * G)

For fp32 operands, which `torch.mm` multiplies as it is told to (IEEE, unless TF32 was allowed), and for 8-bit
moments at few tokens (`plan.uses_chunks`). G is fp32 either way; the buffer of one chunk is the only part of
the gradient that exists.
Shapes: dy (T, N), x (T, K), weight and moments (N, K).
"""

from __future__ import annotations

import contextlib
import functools

import torch
import triton

from .elementwise import BLOCK, dense_launch
from .embedding import RowSums, add_rows
from .replay import Launch, alignment
from .rules import RuleArguments

__all__ = ["chunk_rows", "launch_wgrad_chunks"]

#: Bytes of a chunk's gradient.
BUFFER_BYTES = 64 << 20
#: Rows of a chunk are a multiple of this; with K % 8 == 0 that makes whole blocks of the element-wise kernel.
ROW_STEP = 128


def chunk_rows(N: int, K: int) -> int:
    """Rows per chunk, the same for all but the last; 0 where no chunk fits the buffer or ends in a block."""
    most = BUFFER_BYTES // (4 * K) // ROW_STEP * ROW_STEP if K % 8 == 0 else 0
    if not most:
        return 0
    rows = triton.cdiv(N, triton.cdiv(N, most))
    return triton.cdiv(rows, ROW_STEP) * ROW_STEP


def launch_wgrad_chunks(
    weight: torch.Tensor,
    dy_TN: torch.Tensor,
    x_TK: torch.Tensor,
    arguments: RuleArguments,
    want_norm_sq: bool,
    chunk: int,
    rows: RowSums | None = None,
) -> torch.Tensor | None:
    """Update on checked arguments, `chunk` rows of the weight (a multiple of ROW_STEP) at a time."""
    N, K = weight.shape
    buffer = None
    if dy_TN.dtype == torch.float32:
        buffer = torch.empty((min(chunk, N), K), dtype=torch.float32, device=weight.device)
    partials = None
    if want_norm_sq:
        partials = torch.empty(triton.cdiv(N * K, BLOCK), dtype=torch.float32, device=weight.device)
    # Of no chunk's gradient: what the allocator hands out is aligned.
    kinds = (dy_TN.dtype, weight.dtype, partials is None, alignment(weight), arguments.kinds())
    launches = _launches(N, K, chunk, arguments.constants, weight.device, kinds)
    with torch.no_grad(), _no_autocast(weight.device.type):
        for first, last, launch in launches:
            if buffer is None:
                grad = _fp32_product(dy_TN[:, first:last].t(), x_TK)
            else:
                grad = torch.mm(dy_TN[:, first:last].t(), x_TK, out=buffer[: last - first])
            if rows is not None:
                add_rows(grad, rows, first)
            launch(grad, weight, *arguments.pointers, partials, arguments.rng_key)
    return None if partials is None else partials.sum()


@functools.lru_cache(maxsize=1024)
def _launches(
    N: int,
    K: int,
    chunk: int,
    constants: tuple[str, bool, bool],
    device: torch.device,
    kinds: tuple[object, ...],
) -> list[tuple[int, int, Launch]]:
    """First and last row of each chunk, and the launch of its update."""
    spans = [(first, min(first + chunk, N)) for first in range(0, N, chunk)]
    return [
        (first, last, dense_launch(1, (last - first) * K, first * K // BLOCK, constants, device, kinds))
        for first, last in spans
    ]


def _no_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Autocast would round fp32 operands; only where on, as the context itself costs microseconds."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


# torch.mm(..., out_dtype=) keeps cuBLAS' fp32 accumulator; it came with torch 2.8.
_HAS_OUT_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)


def _fp32_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product of 16-bit matrices in fp32."""
    if left.is_cuda and _HAS_OUT_DTYPE:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
