"""Time the update and norm kernels at the shapes of a model's linear layers, beside cuBLAS, torch and others.

    PYTHONPATH=. python benchmarks/kernels.py [--model llama-8b] [--tokens 512 2048 8192] [--output DIR]

Three quarters of a minute on an H200. Columns, median ms of `triton.testing.do_bench` (which flushes the L2
cache between runs), bf16 dy and x:
    dW       dy^T x by cuBLAS, written in bf16; mean of a run before and one after the other columns
    fused    the same, then `torch._fused_adamw_`; weight and moments bf16, or fp32 (the gradient is cast)
    ours     `wgrad_update_`, AdamW, stochastic rounding; weight and moments in the same two ways, and a bf16
             weight with 8-bit moments
    flash    dW, then step() of flashoptim's FlashAdamW on this one weight, bf16 without master bits (which it
             rounds to the nearest), 8-bit moments
    bnb      dW, then step() of bitsandbytes' AdamW8bit, likewise
    norm     `wgrad_norm_sq`
A missing package leaves its column empty. Brackets hold the ratio to dW. The last columns are ours over the
floor: the larger of dW's FLOP and the update's bytes at the rates in PEAK. At small shapes the host cannot
keep up and every column shows its Python; --hide-host keeps the card busy until all launches are queued, and
times the kernels alone. Writes kernels.csv into --output or $OUT.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib.metadata
import importlib.util
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from forge_hf import quantized
from forge_hf.kernels import launch
from forge_hf.scalars import StepScalars

F32, BF16 = torch.float32, torch.bfloat16
#: (out features, in features)
SHAPES = {
    "llama-8b": {
        "q_proj": (4096, 4096),
        "k_proj": (1024, 4096),
        "v_proj": (1024, 4096),
        "o_proj": (4096, 4096),
        "gate_proj": (14336, 4096),
        "up_proj": (14336, 4096),
        "down_proj": (4096, 14336),
    },
    "roberta-base": {
        "query": (768, 768),
        "key": (768, 768),
        "value": (768, 768),
        "attention.output": (768, 768),
        "intermediate": (3072, 768),
        "output": (768, 3072),
    },
    "qwen3-0.6b": {
        "q_proj": (2048, 1024),
        "k_proj": (1024, 1024),
        "v_proj": (1024, 1024),
        "o_proj": (1024, 2048),
        "gate_proj": (3072, 1024),
        "up_proj": (3072, 1024),
        "down_proj": (1024, 3072),
    },
}
#: FLOP/s of bf16 products and bytes/s of a copy, measured on an H200; other cards have another floor.
PEAK = (790e12, 4.3e12)
BETAS, EPS, DECAY, STEP, LR = (0.9, 0.999), 1e-8, 0.1, 10, 1e-7
#: Longer than Python takes for any of the columns, about half a millisecond.
HOST_CYCLES = 1_000_000
PEERS = ("flashoptim", "bitsandbytes")

Row = dict[str, Any]


Timer = Callable[[Callable[[], object]], float]


def do_bench_ms(function: Callable[[], object], rep_ms: int) -> float:
    """Median of repeated runs, Python included where the host is the slower one."""
    return float(triton.testing.do_bench(function, warmup=rep_ms // 3, rep=rep_ms, return_mode="median"))


def kernels_ms(function: Callable[[], object], rep_ms: int) -> float:
    """Median of repeated runs whose launches were all queued before the first one began."""
    cache = torch.empty(2**28, dtype=torch.int8, device="cuda")
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    began = time.perf_counter()
    while len(events) < 5 or time.perf_counter() - began < rep_ms * 1e-3:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        torch.cuda._sleep(HOST_CYCLES)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        events.append((start, end))
    return statistics.median(start.elapsed_time(end) for start, end in events)


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


def our_update(weight: Tensor, dy: Tensor, x: Tensor, moments: list[Any]) -> Callable[[], object]:
    """The same by `wgrad_update_`, with stochastic rounding."""
    scalars = StepScalars(LR, *BETAS, EPS, DECAY, 1 - BETAS[0] ** STEP, (1 - BETAS[1] ** STEP) ** 0.5)
    return lambda: launch.wgrad_update_(weight, [(dy, x)], moments, "adamw", scalars, rng_key=7)


def quantized_moments(weight: Tensor) -> list[quantized.QuantizedMoment]:
    """8-bit moments with the values of `moments_of`."""
    moments = []
    for signed, values in zip((True, False), moments_of(weight.float()), strict=True):
        moments.append(quantized.zeros(weight, signed=signed))
        quantized.quantize_(moments[-1], values)
    return moments


def peer_update(package: str, weight: Tensor, dy: Tensor, x: Tensor) -> Callable[[], None]:
    """The gradient by cuBLAS, then another package's 8-bit AdamW on this one parameter."""
    parameter = torch.nn.Parameter(weight.clone())
    optimizer: Any
    if package == "flashoptim":
        from flashoptim import FlashAdamW

        warnings.filterwarnings("ignore", message="master_weight_bits=None")
        optimizer = FlashAdamW([parameter], lr=LR, betas=BETAS, weight_decay=DECAY, master_weight_bits=None)
    else:
        from bitsandbytes.optim import AdamW8bit

        optimizer = AdamW8bit([parameter], lr=LR, betas=BETAS, weight_decay=DECAY)

    def run() -> None:
        parameter.grad = dy.T @ x
        optimizer.step()

    return run


def measure(N: int, K: int, T: int, timer: Timer, peers: Sequence[str]) -> Row:
    """All columns for one shape; None where a package is not in `peers`."""
    bf16_weight, dy, x = operands(N, K, T)
    row: Row = {"N": N, "K": K, "T": T, "dw_ms": 0.0}
    dw_before_ms = timer(lambda: dy.T @ x)
    for dtype, name in ((BF16, "bf16"), (F32, "fp32")):
        weight = bf16_weight.to(dtype)
        moments = moments_of(weight)
        row[f"fused_{name}_ms"] = timer(fused_adamw(weight, dy, x, moments))
        row[f"ours_{name}_ms"] = timer(our_update(weight, dy, x, moments))
        row[f"floor_{name}_ms"] = floor_ms(N, K, T, weight.nbytes + sum(moment.nbytes for moment in moments))
    weight, codes = bf16_weight.clone(), quantized_moments(bf16_weight)
    row["ours_8bit_ms"] = timer(our_update(weight, dy, x, codes))
    kept_bytes = weight.nbytes + sum(moment.codes.nbytes + moment.scale.nbytes for moment in codes)
    row["floor_8bit_ms"] = floor_ms(N, K, T, kept_bytes)
    for package in PEERS:
        update = peer_update(package, bf16_weight, dy, x) if package in peers else None
        row[f"{package}_8bit_ms"] = None if update is None else timer(update)
    row["norm_ms"] = timer(lambda: launch.wgrad_norm_sq([(dy, x)]))
    # The card's clock falls by a tenth or more under long products, so once cool and once warm.
    row["dw_ms"] = (dw_before_ms + timer(lambda: dy.T @ x)) / 2
    return row


def floor_ms(N: int, K: int, T: int, kept_bytes: int) -> float:
    """The least that a product and reading and writing weight and moments can take together."""
    return 1e3 * max(2 * T * N * K / PEAK[0], 2 * kept_bytes / PEAK[1])


#: Columns of the printed table and their heads.
SHOWN = {
    "fused_bf16_ms": "fused bf16",
    "ours_bf16_ms": "ours bf16",
    "fused_fp32_ms": "fused fp32",
    "ours_fp32_ms": "ours fp32",
    "ours_8bit_ms": "ours 8-bit",
    "flashoptim_8bit_ms": "flash 8-bit",
    "bitsandbytes_8bit_ms": "bnb 8-bit",
    "norm_ms": "norm",
}
STATES = ("bf16", "fp32", "8bit")


def line(row: Row) -> str:
    """One line of the table."""
    cells = [
        "-" if row[column] is None else f"{row[column]:.4f} ({row[column] / row['dw_ms']:.2f})"
        for column in SHOWN
    ]
    floors = [f"{row[f'ours_{name}_ms'] / row[f'floor_{name}_ms']:.2f}" for name in STATES]
    shape = f"{row['N']}x{row['K']}"
    return (
        f"{shape:>10} {row['T']:>5}  {row['dw_ms']:.4f}"
        + "".join(f"{cell:>15}" for cell in cells)
        + "".join(f"{floor:>6}" for floor in floors)
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=["llama-8b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--rep", type=int, default=40, help="milliseconds of repeats per cell")
    parser.add_argument("--hide-host", action="store_true", help="time the kernels without Python")
    parser.add_argument("--output", default=os.environ.get("OUT"), help="folder for kernels.csv")
    return parser.parse_args(arguments)


def main() -> int:
    """Run and print."""
    # transformers and bitsandbytes try `import kernels`, a package, and would find the file of this folder.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    options = parse()
    if not torch.cuda.is_available() or not launch.available(torch.zeros((), device="cuda")):
        print("no GPU that the kernels support", file=sys.stderr)
        return 2
    peers = [package for package in PEERS if importlib.util.find_spec(package)]
    versions = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **{package: importlib.metadata.version(package) if package in peers else "" for package in PEERS},
        "precision": "bf16 operands, fp32 accumulation",
        "timer": "kernels" if options.hide_host else "do_bench",
    }
    timer = functools.partial(kernels_ms if options.hide_host else do_bench_ms, rep_ms=options.rep)
    print(*(f"{name} {value or 'not installed'}" for name, value in versions.items()), sep=", ")
    heads = "".join(f"{head:>15}" for head in SHOWN.values())
    print(f"    weight     T      dW{heads}  over floor: {' '.join(STATES)}")
    rows: list[Row] = []
    for model in options.model:
        by_shape: dict[tuple[int, int], list[str]] = {}
        for name, shape in SHAPES[model].items():
            by_shape.setdefault(shape, []).append(name)
        print(model)
        for (N, K), names in by_shape.items():
            for T in options.tokens:
                row = measure(N, K, T, timer, peers)
                rows.append({"model": model, "weights": " ".join(names), **row, **versions})
                print(line(rows[-1]), flush=True)
        show_worst([row for row in rows if row["model"] == model], options.tokens)
        if options.output:
            write(rows, Path(options.output) / "kernels.csv")
    return 0


def show_worst(rows: Sequence[Row], tokens: Sequence[int]) -> None:
    """Print the largest ratio to dW of every column of ours, over the shapes."""
    for column in (*(f"ours_{name}_ms" for name in STATES), "norm_ms"):
        ratios = []
        for T in tokens:
            worst, shape = max((r[column] / r["dw_ms"], f"{r['N']}x{r['K']}") for r in rows if r["T"] == T)
            ratios.append(f"{worst:.2f} at T={T} ({shape})")
        print(f"worst {column[:-3]} over dW: " + ", ".join(ratios))


def write(rows: Sequence[Row], path: Path) -> None:
    """Write the CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
