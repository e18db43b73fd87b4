"""Check the Triton kernels on a GPU at real shapes, then time the update against cuBLAS and fused AdamW.

    PYTHONPATH=. python benchmarks/check_kernels.py            about a minute on an H200, 40 GiB at most
    TRITON_INTERPRET=1 ... check_kernels.py --smoke            tiny shapes on the CPU, no timing

Three-way: our largest distance to float64 must not exceed the one of plain torch in the same dtypes, plus
fp32 noise. Prints a table, writes check_kernels.csv into $OUT if that is set, and exits with 1 on a failure.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from forge_hf import rounding as rounding_of_torch
from forge_hf.kernels import launch, norm_plan, tiles
from forge_hf.scalars import StepScalars

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DEVICE = "cpu" if tiles.INTERPRET else "cuda"
KEY = 3_000_000_019
LR = 1e-3
SCALARS = {
    "adamw": StepScalars(LR, 0.9, 0.999, 1e-8, 0.1, 1 - 0.9**10, (1 - 0.999**10) ** 0.5),
    "lion": StepScalars(LR, 0.9, 0.99, weight_decay=0.1),
    "sgd": StepScalars(LR, weight_decay=0.1, momentum=0.9, nesterov=True),
}
# As in tests/kernel_cases.py, with room for sums over up to 2048 tokens in the order of a plain loop, whose
# rounding grows with the root of their number.
ULPS = 8 * 2.0**-24
SUM_ULP = 2.0**-24
LR_SHARE = 1e-3
# Tensor cores cut off, not round, while they accumulate: the Gram form's sums over N = 14336 positive terms
# came out 1.06e-4 too small on an H200, at every T. The norm, its root, is then 5e-5 off.
NORM_RTOL = 2e-4

Row = dict[str, Any]


def inputs(
    N: int, K: int, T: int, dtype: torch.dtype, moment: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Weight, dy, x and two moments of the sizes that training has."""
    torch.manual_seed(N + K + T)
    dy, x = 0.02 * torch.randn(T, N, device=DEVICE), torch.randn(T, K, device=DEVICE)
    moments = [0.01 * torch.randn(N, K, device=DEVICE), 1e-3 * (torch.rand(N, K, device=DEVICE) + 0.01)]
    weight = 0.02 * torch.randn(N, K, device=DEVICE)
    return weight.to(dtype), dy.to(dtype), x.to(dtype), [m.to(moment) for m in moments]


def plain_rule(
    rule: str, w: Tensor, g: Tensor, moments: Sequence[Tensor], s: StepScalars
) -> tuple[Tensor, ...]:
    """The rule op by op, in the dtypes of the arguments."""
    if rule == "adamw":
        m, v = s.beta1 * moments[0] + (1 - s.beta1) * g, s.beta2 * moments[1] + (1 - s.beta2) * g * g
        denominator = v.sqrt() / s.bias_correction2_sqrt + s.eps
        return w * (1 - s.lr * s.weight_decay) - s.lr / s.bias_correction1 * m / denominator, m, v
    if rule == "lion":
        u = (s.beta1 * moments[0] + (1 - s.beta1) * g).sign()
        return w * (1 - s.lr * s.weight_decay) - s.lr * u, s.beta2 * moments[0] + (1 - s.beta2) * g
    d = g + s.weight_decay * w
    m = s.momentum * moments[0] + d
    return w - s.lr * (d + s.momentum * m), m


def three_way(rule: str, N: int, K: int, T: int, dtype: torch.dtype, moment: torch.dtype) -> Row:
    """One update and both norms; the error is of the weight, in units of lr."""
    w, dy, x, moments = inputs(N, K, T, dtype, moment)
    moments = moments[: 2 if rule == "adamw" else 1]
    s = SCALARS[rule]
    g64 = dy.double().T @ x.double()
    exact = plain_rule(rule, w.double(), g64, [m.double() for m in moments], s)
    usual = plain_rule(rule, w, dy.T @ x, moments, s)
    norm_sq = launch.wgrad_update_(w, [(dy, x)], moments, rule, s, want_norm_sq=True)
    alone = launch.wgrad_norm_sq([(dy, x)])
    ok, errors = True, []
    for index, (got, want, plain) in enumerate(zip((w, *moments), exact, usual, strict=True)):
        error = (got.double() - want).abs().max().item()
        plain_error = (plain.to(got.dtype).double() - want).abs().max().item()
        slack = (ULPS + SUM_ULP * T**0.5) * want.abs().max().item() + (LR_SHARE * LR if index == 0 else 0.0)
        ok &= error <= plain_error + slack
        errors.append((error, plain_error))
    wanted = g64.square().sum().item()
    norm_error = max(abs(got.item() - wanted) / wanted for got in (norm_sq, alone) if norm_sq is not None)
    form = "gram" if norm_plan.gram_is_cheaper(T, N, K) else "gemm"
    return {
        "check": f"{rule} {form}",
        "shape": f"{N}x{K} T={T}",
        "dtypes": f"{_short(dtype)}/{_short(moment)}",
        "error": errors[0][0] / LR,
        "torch_error": errors[0][1] / LR,
        "norm_error": norm_error,
        "ok": ok and norm_error <= NORM_RTOL,
    }


def _short(dtype: torch.dtype) -> str:
    return {F32: "fp32", BF16: "bf16", F16: "fp16"}[dtype]


def _result(check: str, shape: str, dtypes: str, error: float, ok: bool) -> Row:
    return {
        "check": check,
        "shape": shape,
        "dtypes": dtypes,
        "error": error,
        "torch_error": "",
        "norm_error": "",
        "ok": ok,
    }


def _differing(left: Tensor, right: Tensor) -> int:
    view = torch.int16 if left.itemsize == 2 else torch.int32
    return int((left.view(view) != right.view(view)).sum())


def stochastic_bits(count: int, dtype: torch.dtype) -> Row:
    """The weight becomes -gradient, rounded; the bits must be the reference's."""
    values = torch.randn(count, device=DEVICE) * 10.0 ** torch.randn(count, device=DEVICE)
    w = torch.zeros(count, device=DEVICE, dtype=dtype)
    launch.dense_update_(w, -values, (), "sgd", StepScalars(lr=1.0), rng_key=KEY)
    wrong = _differing(w, rounding_of_torch.round_stochastic(values, dtype, KEY, 0))
    return _result("stochastic bits", str(count), _short(dtype), wrong, wrong == 0)


def repeatable_and_strided(N: int, K: int, T: int) -> Row:
    """Twice the same call, and once each with a transposed dy and with two segments: the same bits."""
    results = []
    for form in ("usual", "again", "transposed", "segments"):
        w, dy, x, moments = inputs(N, K, T, BF16, BF16)
        pairs = [(dy.T.contiguous().T if form == "transposed" else dy, x)]
        if form == "segments":
            pairs = [(dy[: T // 3], x[: T // 3]), (dy[T // 3 :], x[T // 3 :])]
        norm_sq = launch.wgrad_update_(
            w, pairs, moments, "adamw", SCALARS["adamw"], rng_key=KEY, want_norm_sq=True
        )
        results.append((w, *moments, norm_sq))
    wrong = sum(
        _differing(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True) if a.ndim
    )
    same_norm = all(torch.equal(results[0][-1], other[-1]) for other in results[1:])
    return _result(
        "repeat, strides, segments", f"{N}x{K} T={T}", "bf16/bf16", wrong, wrong == 0 and same_norm
    )


def beyond_32_bit_bytes(N: int, K: int) -> Row:
    """A weight of more than 2**31 bytes: first, middle and last rows against float64."""
    w, dy, x, moments = inputs(N, K, 64, F32, F32)
    dy, x = dy.to(BF16), x.to(BF16)
    blocks = [slice(0, 64), slice(N // 2, N // 2 + 64), slice(N - 64, N)]
    before = [[t[rows].double() for t in (w, *moments)] for rows in blocks]
    launch.wgrad_update_(w, [(dy, x)], moments, "adamw", SCALARS["adamw"])
    error = 0.0
    for rows, (w64, *moments64) in zip(blocks, before, strict=True):
        g64 = dy[:, rows].double().T @ x.double()
        want = plain_rule("adamw", w64, g64, moments64, SCALARS["adamw"])[0]
        error = max(error, (w[rows].double() - want).abs().max().item())
    return _result(
        "more than 2^31 bytes", f"{N}x{K} T=64", "bf16 fp32/fp32", error / LR, error <= LR_SHARE * LR
    )


def beyond_32_bit_elements(N: int, K: int) -> list[Row]:
    """More than 2**32 elements, rounded stochastically: one token makes G exact, so bits must match."""
    _, dy, x, _ = inputs(64, K, 1, BF16, BF16)
    dy = torch.randn(1, N, device=DEVICE).to(BF16)
    starts = sorted({0, min(N - 64, 2**31 // K - 32), min(N - 64, 2**32 // K - 32), N - 64})
    rows = []
    w = torch.zeros(N, K, dtype=BF16, device=DEVICE)
    grad: Tensor | None = None
    for check in ("wgrad", "dense"):
        if check == "wgrad":
            launch.wgrad_update_(w, [(dy, x)], (), "sgd", StepScalars(lr=1.0), rng_key=KEY)
        else:
            grad = w.clone()  # any gradient will do; the weight starts at 0 again
            w.zero_()
            launch.dense_update_(w, grad, (), "sgd", StepScalars(lr=0.7), rng_key=KEY)
        wrong = 0
        for start in starts:
            part = slice(start, start + 64)
            value = (
                0.0 - dy[0, part].float()[:, None] * x[0].float()
                if grad is None
                else 0.0 - 0.7 * grad[part].float()
            )
            want = rounding_of_torch.round_stochastic(value, BF16, KEY, 0, start * K)
            wrong += _differing(w[part], want)
        rows.append(_result(f"more than 2^32 elements, {check}", f"{N}x{K}", "bf16", wrong, wrong == 0))
    return rows


def time_update(N: int, K: int, T: int) -> Row:
    """Median ms of cuBLAS dW, dW and fused AdamW, our update (stochastic rounding), our norm; all bf16."""
    w, dy, x, moments = inputs(N, K, T, BF16, BF16)
    s = SCALARS["adamw"]._replace(lr=1e-7)
    step = torch.tensor(10.0, device=DEVICE)
    usual_w, usual_moments = w.clone(), [m.clone() for m in moments]

    def median(function: Callable[[], object]) -> float:
        return float(triton.testing.do_bench(function, warmup=10, rep=40, return_mode="median"))

    def usual() -> None:
        torch._fused_adamw_(
            [usual_w], [dy.T @ x], [usual_moments[0]], [usual_moments[1]], [], [step],
            lr=s.lr, beta1=s.beta1, beta2=s.beta2, weight_decay=s.weight_decay, eps=s.eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    return {
        "shape": f"{N}x{K} T={T}",
        "dw_ms": median(lambda: dy.T @ x),
        "dw_fused_adamw_ms": median(usual),
        "wgrad_update_ms": median(
            lambda: launch.wgrad_update_(w, [(dy, x)], moments, "adamw", s, rng_key=KEY)
        ),
        "wgrad_norm_ms": median(lambda: launch.wgrad_norm_sq([(dy, x)])),
    }


def checks(smoke: bool) -> list[Callable[[], Row | list[Row]]]:
    """All checks, small things first."""
    shapes = [(4096, 4096), (14336, 4096), (1024, 4096), (1000, 777)] if not smoke else [(64, 128), (70, 77)]
    tokens = (1, 77, 512, 2048) if not smoke else (1, 77)
    # fp32 moments of 16-bit weights have no plain torch twin, so only the one case that the design names
    dtypes = [(BF16, BF16), (F16, BF16), (F32, F32)]
    todo: list[Callable[[], Row | list[Row]]] = []
    count = 1 << (24 if not smoke else 12)
    todo += [lambda dtype=dtype: stochastic_bits(count, dtype) for dtype in (BF16, F16)]
    small = (1000, 777, 77) if not smoke else (70, 77, 33)
    todo += [lambda rule=rule: three_way(rule, *small, BF16, BF16) for rule in ("lion", "sgd")]
    todo.append(lambda: repeatable_and_strided(*((1024, 4096, 512) if not smoke else (70, 77, 33))))
    for N, K in shapes:
        for T in tokens:
            todo += [lambda a=(N, K, T, d, m): three_way("adamw", *a) for d, m in dtypes]
    todo.append(lambda: three_way("adamw", *shapes[0], tokens[-1], BF16, F32))
    todo.append(lambda: beyond_32_bit_bytes(*((128256, 4096) if not smoke else (129, 8))))
    todo.append(lambda: beyond_32_bit_elements(*((1_060_000, 4096) if not smoke else (129, 8))))
    return todo


def show(rows: list[Row]) -> None:
    """Print one line per row, floats short."""
    for row in rows:
        cells = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()]
        print(
            "  ".join(
                cell.ljust(width) for cell, width in zip(cells, (32, 20, 15, 10, 10, 10, 6), strict=False)
            )
        )


def main() -> int:
    """Run; 0 if every check passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--smoke", action="store_true", help="tiny shapes, no timing; also in Triton's interpreter"
    )
    smoke = parser.parse_args().smoke
    if not launch.available(torch.zeros((), device=DEVICE if torch.cuda.is_available() else "cpu")):
        print("no GPU that the kernels support", file=sys.stderr)
        return 2
    began = time.perf_counter()
    rows: list[Row] = []
    print("check, shape, weight/moment dtype, error in lr (or wrong elements), torch's error, norm error, ok")
    for check in checks(smoke):
        found = check()
        new = found if isinstance(found, list) else [found]
        show(new)
        rows += new
    timings: list[Row] = []
    if not smoke:
        print(f"\nchecked in {time.perf_counter() - began:.0f} s")
        print("shape, ms: dW, dW + fused AdamW, wgrad_update_, wgrad_norm_sq")
        shapes = [(4096, 4096), (14336, 4096), (1024, 4096)]
        timings = [time_update(N, K, T) for N, K in shapes for T in (512, 2048)]
        show([{"shape": row["shape"], "": "", **row} for row in timings])
    _write_csv(rows, timings)
    passed = sum(bool(row["ok"]) for row in rows)
    verdict = "PASS" if passed == len(rows) else "FAIL"
    print(f"\n{verdict}: {passed} of {len(rows)} checks, {time.perf_counter() - began:.0f} s")
    return 0 if passed == len(rows) else 1


def _write_csv(rows: list[Row], timings: list[Row]) -> None:
    out = os.environ.get("OUT")
    for name, table in (("check_kernels.csv", rows), ("check_kernels_ms.csv", timings)):
        if out and table:
            with (Path(out) / name).open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(table[0]))
                writer.writeheader()
                writer.writerows(table)


if __name__ == "__main__":
    sys.exit(main())
