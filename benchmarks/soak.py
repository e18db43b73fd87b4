"""A soak: thousands of steps of a small model with random sequence lengths, beside adamw_torch.

    python benchmarks/soak.py                                   # 3,000 steps; minutes on a GPU
    python benchmarks/soak.py --steps 40 --optim galore_adamw   # any machine

Every step has another batch size and length, and the schedule changes the rate. After a warm-up nothing may
grow or compile: prints the growth of memory, Triton's late compilations, and the losses of both runs. Exit
status 1 if allocated memory grew by more than 1 % after the warm-up, if anything was compiled in the second
half, or if the mean losses of the last tenth differ by more than 2 % (not asked of GaLore).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

VOCABULARY, LENGTHS, BATCHES = 512, (1, 160), (1, 9)


def build(device: str) -> Any:
    """The same small Llama every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=352, num_hidden_layers=2,
        num_attention_heads=4, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of Triton kernels as they are compiled."""
    names: list[str] = []
    try:
        from triton import knobs
    except ImportError:  # not installed, or before 3.4
        yield names
        return
    before = knobs.runtime.jit_post_compile_hook

    def note(*args: Any, **kwargs: Any) -> None:
        names.append(str(kwargs.get("fn", args[0] if args else "?")))

    knobs.runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before


def run(optim: str, steps: int, device: str) -> tuple[list[float], list[int], int]:
    """Losses, allocated bytes at ten points, and kernels compiled in the second half."""
    import torch

    import forge_hf

    model = build(device)
    kinds = {"forge_adamw": forge_hf.ForgeAdamW, "galore_adamw": forge_hf.ForgeGaLoreAdamW}
    if optim == "adamw_torch":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        extra = {"rank": 16, "update_proj_gap": 20} if optim == "galore_adamw" else {}
        optimizer = kinds[optim](model, lr=1e-3, **extra)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    draw = torch.Generator().manual_seed(1)
    losses, memory, late = [], [], 0
    with compilations() as names:
        for step in range(steps):
            if step == steps // 2:
                late = len(names)
            batch = int(torch.randint(*BATCHES, (1,), generator=draw))
            length = int(torch.randint(*LENGTHS, (1,), generator=draw)) + 1
            first = torch.randint(0, 32, (batch, 1), generator=draw)
            ids = ((first + torch.arange(length) * 3) % VOCABULARY).to(device)  # a rule that can be learned
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(float(loss.detach()))
            del loss
            if device == "cuda" and step % max(1, steps // 10) == 0:
                memory.append(torch.cuda.memory_allocated())
    return losses, memory, len(names) - late


def main() -> int:
    """Run both and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--optim", choices=("forge_adamw", "galore_adamw"), default="forge_adamw")
    arguments = parser.parse_args()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tail, means, faults = max(1, arguments.steps // 10), {}, []
    for optim in ("adamw_torch", arguments.optim):
        began = time.perf_counter()
        losses, memory, compiled = run(optim, arguments.steps, device)
        means[optim] = sum(losses[-tail:]) / tail
        grown = max(memory[len(memory) // 2 :]) / memory[1] - 1 if len(memory) > 2 else 0.0
        seconds = time.perf_counter() - began
        print(
            f"{optim:13} loss {losses[0]:.4f} -> {means[optim]:.4f}  memory {grown:+.2%}  "
            f"compiled late {compiled}  {seconds:.0f} s", flush=True,
        )  # fmt: skip
        if not all(map(math.isfinite, losses)) or (optim != "adamw_torch" and (grown > 0.01 or compiled)):
            faults.append(optim)
    off = means[arguments.optim] / means["adamw_torch"] - 1
    print(f"last tenth: {off:+.2%}")
    close = arguments.optim == "galore_adamw" or abs(off) < 0.02
    return int(bool(faults) or not close)


if __name__ == "__main__":
    sys.exit(main())
