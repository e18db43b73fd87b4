"""Host time of a training step per linear layer, without any kernel: what the engine's Python costs.

    python benchmarks/host_overhead.py [--layers 100] [--steps 30] [--profile MODE]

A stack of small linear layers on the CPU and a backend that does nothing, so that what remains is the engine
between the launches: layers, slots, tape, clipping and step. The same stack without forge_hf is measured too
and subtracted in the lines marked +; its forward, dX and dW are in the plain lines and in "stock".
Microseconds of process time per layer, the smallest of all steps, in each phase.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from forge_hf import ForgeAdamW, gradient, update

WIDTH, TOKENS = 16, 4
PHASES = ("forward", "backward", "clip", "step", "zero_grad")
MODES = {"step": 1.0, "backward": float("inf")}  # with the clip threshold that each allows

Phase = Callable[[Any], Any]


def stub_backend() -> ModuleType:
    """A backend whose functions cost nothing."""
    norm_sq = torch.ones(())
    stub = ModuleType("stub")
    vars(stub).update(
        wgrad_updates_=lambda updates, *_: [norm_sq] * len(updates),
        dense_updates_=lambda _: None,
        waits_for_company=lambda _: True,
        wgrad_norm_sq=lambda *_: norm_sq,
        wgrad_norms_sq=lambda pairs: norm_sq.expand(len(pairs)),
    )
    return stub


def build(layers: int, mode: str | None, dtype: torch.dtype, bias: bool) -> dict[str, Phase]:
    """The phases of a step, each given the result of the one before; `mode` None is the stock stack."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(layers))).to(dtype)
    optimizer = ForgeAdamW(model, update=mode) if mode is not None else None
    leaf = torch.randn(1, TOKENS, WIDTH, dtype=dtype, requires_grad=True)

    def forward(_: Any) -> Tensor:
        output: Tensor = model(leaf * 1.0)  # no borrowed input, as inside a model
        return output.sum()

    def clip(_: Any) -> None:
        if optimizer is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MODES[mode or ""])

    def step(_: Any) -> None:
        if optimizer is not None:
            optimizer.step()

    def zero_grad(_: Any) -> None:
        model.zero_grad()

    parts: list[Phase] = [forward, lambda loss: loss.backward(), clip, step, zero_grad]
    return dict(zip(PHASES, parts, strict=True))


def measure(parts: dict[str, Phase], layers: int, steps: int) -> list[float]:
    """Smallest process time of each phase, in microseconds per layer."""
    best = dict.fromkeys(PHASES, float("inf"))
    for _ in range(steps):
        value = None
        for name, part in parts.items():
            start = time.process_time_ns()
            value = part(value)
            best[name] = min(best[name], (time.process_time_ns() - start) / 1000 / layers)
    return list(best.values())


def show(name: str, values: list[float]) -> None:
    """Print one line of the table."""
    print(f"{name:28}" + "".join(f"{value:10.1f}" for value in (*values, sum(values))))


def main() -> None:
    """Print the table, or the profile of one mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", choices=list(MODES), help="print cProfile's table of this mode instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    backend = stub_backend()
    update.backend_for = gradient.backend_for = lambda _: backend  # type: ignore[assignment, return-value]
    if options.profile:
        parts = build(options.layers, options.profile, torch.bfloat16, bias=False)
        measure(parts, options.layers, 5)
        with cProfile.Profile() as profile:
            measure(parts, options.layers, options.steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    print(f"{'us per layer':28}" + "".join(f"{name:>10}" for name in (*PHASES, "sum")))
    for dtype, bias in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        kind = f"{str(dtype).removeprefix('torch.')}{', bias' if bias else ''}"
        stock = measure(build(options.layers, None, dtype, bias), options.layers, options.steps)
        show(f"{kind}, stock", stock)
        for mode in MODES:
            ours = measure(build(options.layers, mode, dtype, bias), options.layers, options.steps)
            show(f"{kind}, {mode}", ours)
            show("  +", [mine - theirs for mine, theirs in zip(ours, stock, strict=True)])


if __name__ == "__main__":
    main()
