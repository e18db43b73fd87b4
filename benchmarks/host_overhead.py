"""Host time of a training step per linear layer, without any kernel: what forge_hf's Python costs.

A stack of small linear layers on the CPU, with a backend that does nothing, so that what remains is the
engine between the launches: layers, slots, tape, clipping and step. The same stack of nn.Linear without an
optimizer is measured beside it and subtracted; its matrix products are part of both.

    python benchmarks/host_overhead.py --layers 100 --steps 30

Prints microseconds of process time per layer, the smallest of all steps, in each phase and mode.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from forge_hf import ForgeAdamW, gradient, update

WIDTH, TOKENS = 16, 4
PHASES = ("forward", "backward", "clip", "step", "zero_grad")
MODES: dict[str, dict[str, Any]] = {
    "step": {"update": "step"},
    "step, bf16": {"update": "step", "dtype": torch.bfloat16},
    "backward": {"update": "backward"},
    "backward, bf16": {"update": "backward", "dtype": torch.bfloat16},
}


def stub_backend() -> SimpleNamespace:
    """A backend whose functions cost nothing."""
    norm_sq = torch.ones(())
    return SimpleNamespace(
        wgrad_update_=lambda *_, **__: norm_sq,
        dense_update_=lambda *_, **__: None,
        wgrad_norm_sq=lambda *_: norm_sq,
    )


def phases(model: nn.Module, optimizer: Any, max_norm: float) -> dict[str, Callable[[Any], Any]]:
    """The five parts of a step; each takes the result of the one before."""
    width, dtype = model[0].in_features, model[0].weight.dtype
    # A result of an operation, as a layer's input inside a model is.
    x = torch.randn(TOKENS, width, dtype=dtype, requires_grad=True) * 1.0
    x = x.detach().requires_grad_() * 1.0
    if optimizer is None:
        return {
            "forward": lambda _: model(x.detach().requires_grad_() * 1.0).sum(),
            "backward": lambda loss: loss.backward(),
            "clip": lambda _: None,
            "step": lambda _: None,
            "zero_grad": lambda _: [setattr(p, "grad", None) for p in model.parameters()],
        }
    return {
        "forward": lambda _: model(x.detach().requires_grad_() * 1.0).sum(),
        "backward": lambda loss: loss.backward(),
        "clip": lambda _: optimizer.clip_grad_norm_(max_norm),
        "step": lambda _: optimizer.step(),
        "zero_grad": lambda _: optimizer.zero_grad(),
    }


def measure(parts: dict[str, Callable[[Any], Any]], layers: int, steps: int) -> dict[str, float]:
    """Smallest process time of each phase, in microseconds per layer."""
    best = dict.fromkeys(PHASES, float("inf"))
    for _ in range(steps):
        value = None
        for name, part in parts.items():
            start = time.process_time_ns()
            value = part(value)
            best[name] = min(best[name], (time.process_time_ns() - start) / 1000 / layers)
    return best


def build(layers: int, update_mode: str | None, dtype: torch.dtype) -> dict[str, Callable[[Any], Any]]:
    """Phases of a stack of `layers` linear layers, stock when `update_mode` is None."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to(dtype)
    if update_mode is None:
        return phases(model, None, 0.0)
    optimizer = ForgeAdamW(model, update=update_mode)
    return phases(model, optimizer, 1.0 if update_mode == "step" else float("inf"))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", choices=list(MODES), help="print cProfile's table of this mode instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stub: Callable[[Tensor], Any] = lambda _weight, backend=stub_backend(): backend  # noqa: E731
    update.backend_for = gradient.backend_for = stub  # type: ignore[assignment]
    if options.profile:
        mode = dict(MODES[options.profile])
        parts = build(options.layers, mode["update"], mode.get("dtype", torch.float32))
        measure(parts, options.layers, 5)
        with cProfile.Profile() as profile:
            measure(parts, options.layers, options.steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    print(f"{'us per layer':16}" + "".join(f"{name:>11}" for name in (*PHASES, "sum")))
    for name, mode in MODES.items():
        dtype = mode.get("dtype", torch.float32)
        stock = measure(build(options.layers, None, dtype), options.layers, options.steps)
        ours = measure(build(options.layers, mode["update"], dtype), options.layers, options.steps)
        extra = [ours[phase] - stock[phase] for phase in PHASES]
        print(f"{name:16}" + "".join(f"{value:11.1f}" for value in (*extra, sum(extra))))
        print(f"{'  stock':16}" + "".join(f"{stock[phase]:11.1f}" for phase in PHASES))


if __name__ == "__main__":
    main()
