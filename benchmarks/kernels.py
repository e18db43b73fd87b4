"""Time the update and norm kernels at the shapes of Llama-3.1-8B's linear layers, beside cuBLAS and torch.

    PYTHONPATH=. python benchmarks/kernels.py [--tokens 512 2048 8192] [--output DIR]

Half a minute on an H200. Columns, median ms of `triton.testing.do_bench` (which flushes the L2 cache between
runs), bf16 dy and x:
    dW       dy^T x by cuBLAS, written in bf16; mean of a run before and one after the other columns
    fused    the same, then `torch._fused_adamw_`; weight and moments bf16, or fp32 (the gradient is cast)
    ours     `wgrad_update_`, AdamW, stochastic rounding; weight and moments in the same two ways
    norm     `wgrad_norm_sq`
Brackets hold the ratio to dW. The last columns are ours over the floor: the larger of dW's FLOP and the
update's bytes at the rates in PEAK. Writes kernels.csv into --output or $OUT.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from forge_hf.kernels import launch
from forge_hf.scalars import StepScalars

F32, BF16 = torch.float32, torch.bfloat16
#: (out features, in features)
SHAPES = {
    "q_proj": (4096, 4096),
    "k_proj": (1024, 4096),
    "v_proj": (1024, 4096),
    "o_proj": (4096, 4096),
    "gate_proj": (14336, 4096),
    "up_proj": (14336, 4096),
    "down_proj": (4096, 14336),
}
#: FLOP/s of bf16 products and bytes/s of a copy, measured on an H200; other cards have another floor.
PEAK = (790e12, 4.3e12)
BETAS, EPS, DECAY, STEP, LR = (0.9, 0.999), 1e-8, 0.1, 10, 1e-7

Row = dict[str, Any]


def median_ms(function: Callable[[], object], rep_ms: int) -> float:
    """Median of repeated runs."""
    return float(triton.testing.do_bench(function, warmup=rep_ms // 3, rep=rep_ms, return_mode="median"))


def operands(N: int, K: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weight (N, K), dy (T, N) and x (T, K) of random bf16 numbers; zeros would run faster."""
    torch.manual_seed(N + K + T)
    weight, dy = 0.02 * torch.randn(N, K, device="cuda"), 0.02 * torch.randn(T, N, device="cuda")
    return weight.to(BF16), dy.to(BF16), torch.randn(T, K, device="cuda").to(BF16)


def moments_of(weight: Tensor) -> list[Tensor]:
    """Both moments, of sizes that training has, in the weight's dtype."""
    first = 0.01 * torch.randn_like(weight, dtype=F32)
    second = 1e-3 * (torch.rand_like(weight, dtype=F32) + 0.01)
    return [first.to(weight.dtype), second.to(weight.dtype)]


def fused_adamw(weight: Tensor, dy: Tensor, x: Tensor, moments: list[Tensor]) -> Callable[[], None]:
    """The gradient by cuBLAS, then torch's own update."""
    step = torch.tensor(float(STEP), device="cuda")

    def run() -> None:
        torch._fused_adamw_(
            [weight], [(dy.T @ x).to(weight.dtype)], [moments[0]], [moments[1]], [], [step],
            lr=LR, beta1=BETAS[0], beta2=BETAS[1], weight_decay=DECAY, eps=EPS, amsgrad=False, maximize=False,
        )  # fmt: skip

    return run


def our_update(weight: Tensor, dy: Tensor, x: Tensor, moments: list[Tensor]) -> Callable[[], object]:
    """The same by `wgrad_update_`, with stochastic rounding."""
    scalars = StepScalars(LR, *BETAS, EPS, DECAY, 1 - BETAS[0] ** STEP, (1 - BETAS[1] ** STEP) ** 0.5)
    return lambda: launch.wgrad_update_(weight, [(dy, x)], moments, "adamw", scalars, rng_key=7)


def measure(N: int, K: int, T: int, rep_ms: int) -> Row:
    """All columns for one shape."""
    bf16_weight, dy, x = operands(N, K, T)
    row: Row = {"N": N, "K": K, "T": T, "dw_ms": 0.0}
    dw_before_ms = median_ms(lambda: dy.T @ x, rep_ms)
    for dtype, name in ((BF16, "bf16"), (F32, "fp32")):
        weight = bf16_weight.to(dtype)
        moments = moments_of(weight)
        row[f"fused_{name}_ms"] = median_ms(fused_adamw(weight, dy, x, moments), rep_ms)
        row[f"ours_{name}_ms"] = median_ms(our_update(weight, dy, x, moments), rep_ms)
        moved_bytes = 2 * (weight.nbytes + sum(moment.nbytes for moment in moments))
        row[f"floor_{name}_ms"] = 1e3 * max(2 * T * N * K / PEAK[0], moved_bytes / PEAK[1])
    row["norm_ms"] = median_ms(lambda: launch.wgrad_norm_sq([(dy, x)]), rep_ms)
    # The card's clock falls by a tenth or more under long products, so once cool and once warm.
    row["dw_ms"] = (dw_before_ms + median_ms(lambda: dy.T @ x, rep_ms)) / 2
    return row


def line(row: Row) -> str:
    """One line of the table."""
    columns = ("fused_bf16_ms", "ours_bf16_ms", "fused_fp32_ms", "ours_fp32_ms", "norm_ms")
    cells = [f"{row[column]:.4f} ({row[column] / row['dw_ms']:.2f})" for column in columns]
    floors = [f"{row[f'ours_{name}_ms'] / row[f'floor_{name}_ms']:.2f}" for name in ("bf16", "fp32")]
    shape = f"{row['N']}x{row['K']}"
    return f"{shape:>10} {row['T']:>5}  {row['dw_ms']:.4f} " + "".join(
        f"{cell:>16}" for cell in [*cells, *floors]
    )


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--rep", type=int, default=40, help="milliseconds of repeats per cell")
    parser.add_argument("--output", default=os.environ.get("OUT"), help="folder for kernels.csv")
    options = parser.parse_args()
    if not torch.cuda.is_available() or not launch.available(torch.zeros((), device="cuda")):
        print("no GPU that the kernels support", file=sys.stderr)
        return 2
    versions = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "precision": "bf16 operands, fp32 accumulation",
    }
    print(*versions.values(), sep=", ")
    heads = ("fused bf16", "ours bf16", "fused fp32", "ours fp32", "norm", "floors bf16", "fp32")
    print("    weight     T      dW " + "".join(f"{head:>16}" for head in heads))
    by_shape: dict[tuple[int, int], list[str]] = {}
    for name, shape in SHAPES.items():
        by_shape.setdefault(shape, []).append(name)
    rows: list[Row] = []
    for (N, K), names in by_shape.items():
        for T in options.tokens:
            rows.append({"weights": " ".join(names), **measure(N, K, T, options.rep), **versions})
            print(line(rows[-1]), flush=True)
    for column in ("ours_bf16_ms", "ours_fp32_ms", "norm_ms"):
        ratios = []
        for T in options.tokens:
            worst, shape = max((r[column] / r["dw_ms"], f"{r['N']}x{r['K']}") for r in rows if r["T"] == T)
            ratios.append(f"{worst:.2f} at T={T} ({shape})")
        print(f"worst {column[:-3]} over dW: " + ", ".join(ratios))
    if options.output:
        with (Path(options.output) / "kernels.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
