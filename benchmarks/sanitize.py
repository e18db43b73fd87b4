"""A small case of every kernel, to be run under compute-sanitizer on a GPU.

    pip install nvidia-cuda-sanitizer-api
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python benchmarks/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python benchmarks/sanitize.py

Without torch's cache every tensor is an allocation of its own, so that the tool sees an access beside it.
Shapes are ragged, but for kernels that want whole tiles. Prints a line per case; the tool's summary follows,
and with --error-exitcode its exit status is the result.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator

import torch

from forge_hf import quantized
from forge_hf.kernels import launch, plan, tiles, wgrad_gram, wgrad_hopper, wgrad_norm
from forge_hf.scalars import StepScalars
from forge_hf.updates import Update

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DEVICE = "cpu" if tiles.INTERPRET else "cuda"
SCALARS = {
    "adamw": StepScalars(1e-3, 0.9, 0.999, 1e-8, 0.1, 1 - 0.9**10, (1 - 0.999**10) ** 0.5),
    "lion": StepScalars(1e-3, 0.9, 0.99, weight_decay=0.1),
    "sgd": StepScalars(1e-3, weight_decay=0.1, momentum=0.9, nesterov=True),
}
COUNTS = {"adamw": 2, "lion": 1, "sgd": 1}
KEY = 3_000_000_019

Case = tuple[str, Callable[[], object]]


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Random values on the device."""
    return torch.randn(*shape, device=DEVICE).to(dtype)


def moments_of(rule: str, shape: tuple[int, ...], form: str) -> tuple[quantized.Moment, ...]:
    """Moments of zeros: "fp32", "bf16" or "8bit"."""
    zeros = torch.zeros(shape, device=DEVICE)
    if form == "8bit":
        return tuple(quantized.zeros(zeros, signed=index == 0) for index in range(COUNTS[rule]))
    dtype = F32 if form == "fp32" else BF16
    return tuple(zeros.to(dtype, copy=True) for _ in range(COUNTS[rule]))


def update_of(rule: str, N: int, K: int, T: int, dtype: torch.dtype, form: str, low: bool = False) -> Update:
    """An update by one pair."""
    below = torch.zeros(N, K, dtype=torch.int8, device=DEVICE) if low else None
    pair = randn(T, N, dtype=dtype), randn(T, K, dtype=dtype)
    coefficient = torch.tensor(0.5, device=DEVICE)
    moments = moments_of(rule, (N, K), form)
    return Update(randn(N, K, dtype=dtype), pair, moments, rule, SCALARS[rule], coefficient, KEY, below)


def run_update(update: Update, lookups: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()) -> object:
    """Through the entry for one weight, with its norm."""
    weight, pair, moments, rule, scalars, coefficient, key, low = update
    return launch.wgrad_update_(
        weight, [pair], moments, rule, scalars,
        coefficient=coefficient, rng_key=key, low=low, want_norm_sq=True, lookups=lookups,
    )  # fmt: skip


def cases() -> Iterator[Case]:
    """All of them, by name."""
    for rule in SCALARS:
        for dtype, form in ((F32, "fp32"), (BF16, "bf16"), (BF16, "8bit"), (F16, "bf16"), (F32, "8bit")):
            for N, K, T in ((65, 130, 33), (128, 256, 64)):
                name = f"{rule} {dtype} {form} {N}x{K} T={T}".replace("torch.", "")
                yield name, lambda a=(rule, N, K, T, dtype, form): run_update(update_of(*a))
            yield (
                f"dense {rule} {dtype} {form}".replace("torch.", ""),
                lambda r=rule, d=dtype, f=form: launch.dense_update_(
                    randn(33, 130, dtype=d), randn(33, 130, dtype=d), moments_of(r, (33, 130), f),
                    r, SCALARS[r], rng_key=KEY,
                ),
            )  # fmt: skip
    yield "low bits", lambda: run_update(update_of("adamw", 65, 130, 33, BF16, "8bit", low=True))
    for count in (3, 40):
        group = [
            update_of("adamw", 65, 130, 33, BF16, form) for form in ("bf16", "8bit") for _ in range(count)
        ]
        yield f"group of {count}", lambda g=group: launch.wgrad_updates_(g, True)
    dense = [
        Update(randn(n), randn(n), moments_of("adamw", (n,), form), "adamw", SCALARS["adamw"], None, KEY)
        for n in (1, 70, 1024, 5000)
        for form in ("fp32", "bf16")
    ]
    yield "group of dense", lambda: launch.dense_updates_(dense)
    ids = torch.randint(0, 65, (50,), device=DEVICE)
    lookups = ((ids, randn(50, 130)),)
    yield "table", lambda: launch.wgrad_update_(
        randn(65, 130), [], moments_of("adamw", (65, 130), "bf16"), "adamw", SCALARS["adamw"], rng_key=KEY,
        lookups=lookups, want_norm_sq=True,
    )  # fmt: skip
    yield "tied", lambda: run_update(update_of("adamw", 65, 130, 33, BF16, "bf16"), lookups)
    yield "table into a buffer", lambda: launch.accumulate_lookups_(randn(65, 130), lookups)
    for T, N, K in ((33, 65, 130), (200, 300, 400), (600, 128, 256)):
        pair = randn(T, N), randn(T, K)
        yield f"gram {N}x{K} T={T}", lambda p=pair: wgrad_gram.centred_gram_norm_sq(*p)
        yield f"gemm norm {N}x{K} T={T}", lambda p=pair: wgrad_norm.gemm_norm_sq(*p)
        yield f"norms {N}x{K} T={T}", lambda p=pair: launch.wgrad_norms_sq([p] * 3)
    if plan.is_hopper(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)):
        pair = randn(128, 256), randn(128, 512)
        yield "descriptors", lambda: wgrad_norm.descriptor_norm_sq(*pair)
        for tile in (wgrad_hopper.SQUARE, wgrad_hopper.WIDE):
            yield f"hopper {tile.block_n}x{tile.block_k}", lambda t=tile: hopper(t)


def hopper(tile: wgrad_hopper.HopperTile) -> object:
    """The warp-specialised kernel, on a weight smaller than those that are given to it."""
    most, wide = wgrad_hopper.LARGE, wgrad_hopper.WIDE_TOKENS
    try:
        wgrad_hopper.LARGE = 0
        wgrad_hopper.WIDE_TOKENS = 1 << 30 if tile == wgrad_hopper.SQUARE else 0
        return run_update(update_of("adamw", 512, 1024, 256, BF16, "bf16"))
    finally:
        wgrad_hopper.LARGE, wgrad_hopper.WIDE_TOKENS = most, wide


def main() -> None:
    """Run the cases whose name has the given part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of the names to run")
    only = parser.parse_args().only
    if DEVICE == "cuda" and os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1":
        print("note: set PYTORCH_NO_CUDA_MEMORY_CACHING=1, or accesses beside a tensor go unseen")
    count = 0
    for name, run in cases():
        if only in name:
            run()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            print(name, flush=True)
            count += 1
    print(f"{count} cases ran")


if __name__ == "__main__":
    main()
