"""Peak memory and step time of whole training steps at the Llama-3.1-8B shape, one process per line.

    python benchmarks/llama8b_memory.py               # the README table; needs a GPU with 80 GB
    python benchmarks/llama8b_memory.py --shape tiny    # seconds, on any machine, to try the script

Random weights in bf16, random tokens, the same batch for every optimizer; moments in bf16 unless the name
says 8bit. Peak is torch.cuda.max_memory_allocated over the timed steps; time is the median of them. Every
line runs in a process of its own, and all lines of a table come from one call. Writes CSV to --output
(default: $OUT, else the current folder).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

SHAPES = {
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}

# name -> (optimizer, update mode, max_norm, moments)
LINES = {
    "forward + dX only": ("none", "", None, "none"),
    "adamw_torch_fused, no clip": ("torch", "", None, "bf16"),
    "adamw_torch_fused, clip 1.0": ("torch", "", 1.0, "bf16"),
    "forge_adamw step, clip 1.0": ("forge", "step", 1.0, "bf16"),
    "forge_adamw backward, no clip": ("forge", "backward", None, "bf16"),
    "forge_adamw_8bit step, clip 1.0": ("forge", "step", 1.0, "8bit"),
    "forge_adamw_8bit backward, no clip": ("forge", "backward", None, "8bit"),
}

SETTINGS = {
    "1x512": (1, 512, False),
    "1x2048 checkpointing": (1, 2048, True),
    "4x2048 checkpointing": (4, 2048, True),
}


def measure(line: str, setting: str, shape: str, steps: int) -> dict:
    """Run one line in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    kind, update, max_norm, moments = LINES[line]
    batch, length, checkpointing = SETTINGS[setting]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(**SHAPES[shape], use_cache=False, tie_word_embeddings=False)
    with torch.device(device):
        model = LlamaForCausalLM(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = _optimizer(kind, update, moments, model, torch)
    tokens = torch.randint(0, config.vocab_size, (steps + 3, batch, length), device=device)
    times, losses = [], []
    for step, ids in enumerate(tokens):
        if step == 3:
            _synchronize(torch, device)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        _synchronize(torch, device)
        if step >= 3:
            times.append((time.perf_counter() - start) * 1e3)
        losses.append(loss.item())
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")
    return {
        "line": line,
        "setting": setting,
        "step_ms": round(statistics.median(times), 1),
        "peak_gib": round(peak_gib, 2),
        "last_loss": round(losses[-1], 4),
        "card": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "transformers": __import__("transformers").__version__,
        "weights": "bf16",
        "moments": moments,
    }


def _optimizer(kind: str, update: str, moments: str, model, torch):
    if kind == "torch":
        return torch.optim.AdamW(
            model.parameters(), lr=1e-5, weight_decay=0.0, fused=torch.cuda.is_available()
        )
    if kind == "forge":
        import forge_hf

        return forge_hf.ForgeAdamW(model, lr=1e-5, weight_decay=0.0, update=update, state=moments)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    # Keeps dX flowing to the first layer without any weight gradient.
    model.enable_input_require_grads()
    return None


def _synchronize(torch, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Run every line in a process of its own and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["1x512", "1x2048 checkpointing"])
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--one", nargs=2, metavar=("LINE", "SETTING"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one, arguments.shape, arguments.steps)))
        return
    rows = []
    print(f"{'setting':22} {'optimizer':32} {'step ms':>9} {'peak GiB':>9} {'last loss':>10}", flush=True)
    for setting in arguments.settings:
        for line in arguments.lines:
            command = [sys.executable, __file__, "--one", line, setting, "--shape", arguments.shape]
            result = subprocess.run(
                [*command, "--steps", str(arguments.steps)], capture_output=True, text=True
            )
            if result.returncode:
                print(f"{setting:22} {line:32} failed:\n{result.stderr[-1500:]}", flush=True)
                continue
            row = json.loads(result.stdout.strip().splitlines()[-1])
            rows.append(row)
            figures = f"{row['step_ms']:9.1f} {row['peak_gib']:9.2f} {row['last_loss']:10.4f}"
            print(f"{setting:22} {line:32} {figures}", flush=True)
    if rows:
        path = arguments.output / f"llama8b_memory_{arguments.shape}.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    if len(rows) < len(arguments.settings) * len(arguments.lines):
        raise SystemExit("some lines failed")


if __name__ == "__main__":
    main()
