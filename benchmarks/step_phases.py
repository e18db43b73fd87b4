"""Where the time of a training step goes on the host: forward, backward, clipping, step, waiting for the GPU.

    PYTHONPATH=. python benchmarks/step_phases.py [--layers 16] [--length 512] [--steps 8]

Half of a Llama-3.1-8B by default (16 layers, bf16 weights, random), batch 1, no checkpointing. All lines come
from one process, one after the other, so their peak memory is not comparable; `step.py` measures
that. Medians in ms; "wait" is what the GPU still had to do when Python was through.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from step import SHAPES
from transformers import LlamaConfig, LlamaForCausalLM

import forge_hf

# name -> (options of ForgeAdamW, or None for torch's fused AdamW; max_norm)
LINES = {
    "forge_adamw step, clip 1.0": ({"update": "step"}, 1.0),
    "forge_adamw backward, no clip": ({"update": "backward"}, None),
    "forge_adamw_8bit step, clip 1.0": ({"update": "step", "state": "8bit"}, 1.0),
    "forge_adamw_8bit backward, no clip": ({"update": "backward", "state": "8bit"}, None),
    "adamw_torch_fused, clip 1.0": (None, 1.0),
    "adamw_torch_fused, no clip": (None, None),
}
PHASES = ("forward", "backward", "clip", "step", "wait")


def measure(model: torch.nn.Module, optimizer, max_norm: float | None, ids: torch.Tensor, steps: int):
    """Median ms of the whole step and of each phase."""
    totals, phases = [], []
    for step in range(steps + 3):
        _synchronize()
        marks = [time.perf_counter()]
        loss = model(input_ids=ids, labels=ids).loss
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        marks.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        _synchronize()
        marks.append(time.perf_counter())
        if step >= 3:
            totals.append(1e3 * (marks[-1] - marks[0]))
            phases.append([1e3 * (after - before) for before, after in zip(marks, marks[1:], strict=False)])
    return statistics.median(totals), [statistics.median(column) for column in zip(*phases, strict=True)]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.bfloat16)
    shape = {**SHAPES[arguments.shape], "num_hidden_layers": arguments.layers}
    config = LlamaConfig(**shape, use_cache=False, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).train()
    ids = torch.randint(0, config.vocab_size, (1, arguments.length), device=device)
    print(f"{'optimizer':36} {'step':>7} " + " ".join(f"{phase:>8}" for phase in PHASES))
    for name, (options, max_norm) in LINES.items():
        if options is None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
        else:
            optimizer = forge_hf.ForgeAdamW(model, lr=1e-5, **options)
        total, phases = measure(model, optimizer, max_norm, ids, arguments.steps)
        print(f"{name:36} {total:7.1f} " + " ".join(f"{phase:8.1f}" for phase in phases), flush=True)
        if options is not None:
            optimizer.detach()
        del optimizer


if __name__ == "__main__":
    main()
