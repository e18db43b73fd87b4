"""Time and peak memory of whole training steps at the Llama-3.1-8B shape, one process per line.

    python benchmarks/step.py                                  # every line; 10 minutes on an H200
    python benchmarks/step.py --settings 1x512 --lines forge   # filters: parts of names, comma-separated
    python benchmarks/step.py --shape tiny                     # any machine, to try the script

Random weights and tokens, the same for every line. `step_ms` is the median over the timed steps, from before
the forward to after zero_grad; `peak_gib` is torch.cuda.max_memory_allocated over the same steps. No line
decays weights. "fp32" settings hold fp32 weights and run under bf16 autocast. A line that runs out of memory
or whose package is missing is a result and says so; any other failure makes the exit status 1. FlashAdamW is
from flashoptim, AdamW8bit from bitsandbytes. The CSV goes to --output (default: $OUT, else the current
folder) and is rewritten after every line.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Line(NamedTuple):
    """One optimizer in one configuration.

    Attributes:
        kind: "none", "torch", "bitsandbytes", "flashoptim", "forge" or "galore" (its rank is in the name).
        weights: "bf16", "fp32", or "bf16+8" for 24 bits.
        moments: Their storage.
        mode: "step", or when the update runs inside backward: "backward" or "release"; "" without an update.
        max_norm: Of the clipping, or None.
    """

    kind: str
    weights: str
    moments: str
    mode: str
    max_norm: float | None


class Setting(NamedTuple):
    """Batch, tokens per sequence, gradient checkpointing, and whether weights are fp32 under autocast."""

    batch: int
    length: int
    checkpointing: bool
    fp32: bool = False


BF16_LINES = {
    "forward + dX only": Line("none", "bf16", "none", "", None),
    "adamw_torch_fused no clip": Line("torch", "bf16", "bf16", "step", None),
    "adamw_torch_fused clip 1.0": Line("torch", "bf16", "bf16", "step", 1.0),
    "bitsandbytes AdamW8bit clip 1.0": Line("bitsandbytes", "bf16", "8bit", "step", 1.0),
    "FlashAdamW 24-bit step clip 1.0": Line("flashoptim", "bf16+8", "8bit", "step", 1.0),
    "FlashAdamW bf16 step clip 1.0": Line("flashoptim", "bf16", "8bit", "step", 1.0),
    "FlashAdamW 24-bit release no clip": Line("flashoptim", "bf16+8", "8bit", "release", None),
    "FlashAdamW bf16 release no clip": Line("flashoptim", "bf16", "8bit", "release", None),
    "forge_adamw bf16 step clip 1.0": Line("forge", "bf16", "bf16", "step", 1.0),
    "forge_adamw 8bit step clip 1.0": Line("forge", "bf16", "8bit", "step", 1.0),
    "forge_adamw bf16 backward no clip": Line("forge", "bf16", "bf16", "backward", None),
    "forge_adamw 8bit backward no clip": Line("forge", "bf16", "8bit", "backward", None),
    "galore_adamw 8bit r256 step clip 1.0": Line("galore", "bf16", "8bit", "step", 1.0),
    "galore_adamw 8bit r1024 step clip 1.0": Line("galore", "bf16", "8bit", "step", 1.0),
    "galore_adamw 8bit r1024 backward no clip": Line("galore", "bf16", "8bit", "backward", None),
}
FP32_LINES = {
    "adamw_torch_fused clip 1.0": Line("torch", "fp32", "fp32", "step", 1.0),
    "forge_adamw 8bit step clip 1.0": Line("forge", "fp32", "8bit", "step", 1.0),
}
SETTINGS = {
    "1x512": Setting(1, 512, False),
    "1x2048 checkpointing": Setting(1, 2048, True),
    "4x2048 checkpointing": Setting(4, 2048, True),
    "fp32 1x512 checkpointing": Setting(1, 512, True, fp32=True),
}
PACKAGES = {"bitsandbytes": "bitsandbytes", "flashoptim": "flashoptim"}
COLUMNS = (
    *("setting", "line", "result", "step_ms", "peak_gib", "last_loss", "weights", "moments", "mode", "clip"),
    *("steps", "card", "torch", "transformers", "triton"),
)
LR = 1e-5

Row = dict[str, Any]


def lines_of(setting: Setting) -> dict[str, Line]:
    """The lines that belong to a setting."""
    return FP32_LINES if setting.fp32 else BF16_LINES


def build_model(shape: str, setting: Setting, device: str) -> Any:
    """The model with random weights, made on `device` in the dtype it trains in."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], use_cache=False, tie_word_embeddings=False)
    torch.set_default_dtype(torch.float32 if setting.fp32 else torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    if setting.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def build_optimizer(line: Line, model: Any, rank: int) -> Any:
    """The optimizer of a line, or None; `rank` is GaLore's."""
    import torch

    if line.kind == "torch":
        return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    if line.kind == "bitsandbytes":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(model.parameters(), lr=LR, weight_decay=0.0)
    if line.kind == "flashoptim":
        import flashoptim

        warnings.filterwarnings("ignore", message="master_weight_bits=None")
        bits = 24 if line.weights == "bf16+8" else None
        optimizer = flashoptim.FlashAdamW(
            model.parameters(), lr=LR, weight_decay=0.0, master_weight_bits=bits
        )
        if line.mode == "release":
            flashoptim.enable_gradient_release(model, optimizer)
        return optimizer
    if line.kind == "forge":
        import forge_hf

        return forge_hf.ForgeAdamW(model, lr=LR, weight_decay=0.0, update=line.mode, state=line.moments)
    if line.kind == "galore":
        import forge_hf

        # The first step has all bases found, as every 200th one; later ones are timed.
        return forge_hf.ForgeGaLoreAdamW(
            model,
            lr=LR,
            weight_decay=0.0,
            update=line.mode,
            state=line.moments,
            rank=rank,
            measure_norm=line.max_norm is not None,
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    # Keeps dX flowing to the first layer without any weight gradient.
    model.enable_input_require_grads()
    return None


def clipper(line: Line, model: Any, optimizer: Any) -> Callable[[], object]:
    """What clips the gradients, or does nothing."""
    import torch

    max_norm = line.max_norm
    if max_norm is None:
        return lambda: None
    if line.kind in ("forge", "galore"):
        import forge_hf

        return lambda: forge_hf.clip_grad_norm_(optimizer, max_norm)
    return lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def measure(line: Line, setting: Setting, shape: str, steps: int, warmup: int, rank: int) -> Row:
    """Train in this process.

    Raises:
        RuntimeError: the line does not fit, among others.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    model = build_model(shape, setting, device)
    optimizer = build_optimizer(line, model, rank)
    clip = clipper(line, model, optimizer)
    # With release the hooks have stepped and freed everything when backward returns.
    stepping = optimizer is not None and line.mode != "release"
    size = (steps + warmup, setting.batch, setting.length)
    vocabulary = SHAPES[shape]["vocab_size"]
    tokens = torch.randint(0, vocabulary, size, generator=torch.Generator().manual_seed(1)).to(device)
    times, loss = [], torch.tensor(float("nan"))
    for index, ids in enumerate(tokens):
        if index == warmup and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=setting.fp32):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip()
        if stepping:
            optimizer.step()
            optimizer.zero_grad()
        synchronize()
        if index >= warmup:
            times.append((time.perf_counter() - start) * 1e3)
        loss = loss.detach()  # no graph may live on into the next step
    row: Row = {"step_ms": round(statistics.median(times), 2), "last_loss": round(loss.item(), 4)}
    if device == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return row


def versions() -> Row:
    """The card and the versions of what ran."""
    import torch
    import transformers

    triton = importlib.util.find_spec("triton") and __import__("triton").__version__
    cuda = torch.cuda.is_available()
    return {
        "card": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": triton or "",
    }


def one(line: Line, setting: Setting, shape: str, steps: int, warmup: int, rank: int = 0) -> Row:
    """The row of one line, what keeps it from running included."""
    import torch

    row: Row = {"weights": line.weights, "moments": line.moments, "mode": line.mode}
    row |= {"clip": "" if line.max_norm is None else line.max_norm, "steps": steps, **versions()}
    package = PACKAGES.get(line.kind)
    if package and importlib.util.find_spec(package) is None:
        return {**row, "result": "not installed"}
    if line.kind == "flashoptim" and not torch.cuda.is_available():
        return {**row, "result": "needs a GPU"}
    try:
        return {**row, "result": "ok", **measure(line, setting, shape, steps, warmup, rank)}
    except RuntimeError as error:
        # cuBLAS and Triton have errors of their own for it
        if not any(sign in str(error) for sign in ("out of memory", "ALLOC_FAILED")):
            raise
        return {**row, "result": "out of memory"}


def run_line(name: str, setting: str, arguments: argparse.Namespace) -> Row:
    """Run one line in a process of its own."""
    command = [sys.executable, __file__, "--one", name, setting, "--shape", arguments.shape]
    command += ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup)]
    row: Row = {"setting": setting, "line": name}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.timeout)
    except subprocess.TimeoutExpired:
        return {**row, "result": f"more than {arguments.timeout} s"}
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return {**row, "result": "failed"}
    return {**row, **json.loads(done.stdout.strip().splitlines()[-1])}


def chosen(names: Sequence[str], filters: str) -> list[str]:
    """The names that a comma-separated filter means: an exact name only itself, else every name it is in."""
    parts = [part.strip() for part in filters.split(",") if part.strip()]
    wanted = {name for part in parts for name in names if (name == part if part in names else part in name)}
    return [name for name in names if not parts or name in wanted]


def write(rows: Sequence[Row], path: Path) -> None:
    """Write the CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    """Run every line and print the table; 1 if a line failed for no reason that is a result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--settings", default="", help="parts of setting names: " + ", ".join(SETTINGS))
    parser.add_argument("--lines", default="", help="parts of line names: " + ", ".join(BF16_LINES))
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--timeout", type=float, default=90, help="seconds for one line")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--one", nargs=2, metavar=("LINE", "SETTING"), help=argparse.SUPPRESS)
    # transformers and bitsandbytes try `import kernels`, a package, and would find the file of this folder.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    arguments = parser.parse_args()
    if arguments.one:
        name, setting = arguments.one
        line = lines_of(SETTINGS[setting])[name]
        rank = next((int(word[1:]) for word in name.split() if word[0] == "r" and word[1:].isdigit()), 0)
        size = (arguments.shape, arguments.steps, arguments.warmup)
        print(json.dumps(one(line, SETTINGS[setting], *size, rank)))
        return 0
    todo = [
        (name, setting)
        for setting in chosen(list(SETTINGS), arguments.settings)
        for name in chosen(list(lines_of(SETTINGS[setting])), arguments.lines)
    ]
    if not todo:
        parser.error("no line matches --lines and --settings")
    rows: list[Row] = []
    print(f"{'setting':25} {'line':34} {'step ms':>9} {'peak GiB':>9} {'last loss':>10}", flush=True)
    for count, (name, setting) in enumerate(todo, 1):
        began = time.perf_counter()
        row = run_line(name, setting, arguments)
        rows.append(row)
        figures = [row.get(column, "-") for column in ("step_ms", "peak_gib", "last_loss")]
        verdict = "" if row["result"] == "ok" else f"  {row['result']}"
        print(f"{setting:25} {name:34} {figures[0]:>9} {figures[1]:>9} {figures[2]:>10}{verdict}", flush=True)
        print(f"[{count}/{len(todo)}] {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        write(rows, arguments.output / f"step_{arguments.shape}.csv")
    results = ("ok", "out of memory", "not installed", "needs a GPU")
    return 0 if all(row["result"] in results for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
