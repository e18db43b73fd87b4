"""Does a run with 8-bit or bf16 moments end where the fp32 run ends? A small Llama on public-domain books.

    python benchmarks/convergence.py prepare TEXT_FOLDER DATA_FOLDER   # once, CPU: tokenizer, token arrays
    python benchmarks/convergence.py run DATA_FOLDER --minutes 5       # GPU; a process per (variant, seed)
    python benchmarks/convergence.py plot convergence.csv convergence.png

TEXT_FOLDER holds classics_train.txt.gz and classics_valid.txt.gz. 59.7M weights, batches of 16 x 256 tokens,
cosine schedule to a tenth with 5 % warm-up, lr 1e-3 (Lion 1e-4), weight decay 0.1, clipping at 1.0. Data and
fp32 initial weights follow from the seed alone. A variant is "within" the seed spread if its mean final
loss differs from that of adamw_fp32 by at most the range (largest minus smallest) of adamw_fp32's seeds.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

VOCABULARY, LENGTH, BATCH = 8192, 256, 16
SHAPES = {
    "33m": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1376},
    "60m": {
        "hidden_size": 640,
        "num_hidden_layers": 10,
        "num_attention_heads": 10,
        "intermediate_size": 1712,
    },
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
}
#: name -> (optimizer, dtype of the weights, its options)
VARIANTS = {
    "adamw_fp32": ("torch", "fp32", {}),
    "forge_8bit": ("ForgeAdamW", "bf16", {"state": "8bit"}),
    "forge_bf16": ("ForgeAdamW", "bf16", {}),
    "adamw_bf16": ("torch", "bf16", {}),
    "forge_fp32": ("ForgeAdamW", "fp32", {}),
    "forge_8bit_fp32w": ("ForgeAdamW", "fp32", {"state": "8bit"}),
    "forge_8bit_w24": ("ForgeAdamW", "bf16", {"state": "8bit", "weight_bits": 24}),
    "lion_fp32": ("ForgeLion", "fp32", {}),
    "lion_8bit": ("ForgeLion", "fp32", {"state": "8bit"}),
}


def prepare(text: Path, folder: Path) -> None:
    """Train a byte-level BPE on the training text and store both texts as uint16 tokens."""
    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir(parents=True, exist_ok=True)
    texts = {}
    for part in ("train", "valid"):
        with gzip.open(text / f"classics_{part}.txt.gz", "rt", encoding="utf-8") as file:
            texts[part] = file.read()
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts["train"].splitlines(keepends=True), VOCABULARY, show_progress=True)
    for part, content in texts.items():
        lines = tokenizer.encode_batch(content.splitlines(keepends=True))
        tokens = np.fromiter((token for line in lines for token in line.ids), dtype=np.uint16)
        np.save(folder / f"{part}.npy", tokens)
        print(f"{part}: {len(tokens)} tokens")


def schedule(step: int, steps: int) -> float:
    """Factor of the learning rate."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def train(variant: str, seed: int, arguments: argparse.Namespace) -> None:
    """One run in this process; one JSON line per evaluation on stdout."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, dtype, options = VARIANTS[variant]
    torch.manual_seed(seed)
    config = LlamaConfig(
        **SHAPES[arguments.shape],
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        use_cache=False,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(device)
    if dtype == "bf16":
        model.to(torch.bfloat16)
    lr = 1e-4 if kind == "ForgeLion" else 1e-3
    if kind == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, fused=device == "cuda")
    else:
        import forge_hf

        optimizer = getattr(forge_hf, kind)(model, lr=lr, weight_decay=0.1, update="step", **options)
    data = {
        part: torch.from_numpy(np.load(arguments.data / f"{part}.npy").astype(np.int32))
        for part in ("train", "valid")
    }
    starts = torch.randint(
        len(data["train"]) - LENGTH, (arguments.steps, BATCH), generator=torch.Generator().manual_seed(seed)
    )
    tokens = data["train"].to(device)
    valid = data["valid"][: 64 * LENGTH].view(64, LENGTH).long().to(device)
    lane = torch.arange(LENGTH, device=device)
    starts = starts.to(device)
    autocast = torch.autocast(device, torch.bfloat16, enabled=dtype == "fp32")
    losses, began = [], time.perf_counter()
    for step in range(arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step, arguments.steps)
        batch = tokens[starts[step][:, None] + lane].long()
        with autocast:
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if (step + 1) % arguments.every == 0 or step + 1 == arguments.steps:
            model.eval()
            with torch.no_grad(), autocast:
                chunks = [model(input_ids=part, labels=part).loss.float() for part in valid.split(16)]
            model.train()
            row = {
                "variant": variant,
                "seed": seed,
                "step": step + 1,
                "train_loss": round(torch.stack(losses).float().mean().item(), 5),
                "valid_loss": round(torch.stack(chunks).mean().item(), 5),
                "seconds": round(time.perf_counter() - began, 1),
                "weights": sum(p.numel() for p in model.parameters()),
            }
            losses.clear()
            print(json.dumps(row), flush=True)


def run(arguments: argparse.Namespace) -> None:
    """Start the runs, some at a time, until all are done or the time is up; then the table."""
    ends = time.monotonic() + 60 * arguments.minutes
    waiting = [(variant, seed) for seed in range(arguments.seeds) for variant in arguments.variants]
    running: dict[subprocess.Popen, tuple[str, int]] = {}
    folder = Path(arguments.output)
    logs = folder / "convergence_runs"
    logs.mkdir(parents=True, exist_ok=True)
    total = len(waiting)
    while (waiting or running) and time.monotonic() < ends:
        while waiting and len(running) < arguments.parallel:
            variant, seed = waiting.pop(0)
            command = [sys.executable, __file__, "one", str(arguments.data), "--variant", variant]
            command += ["--seed", str(seed), "--steps", str(arguments.steps), "--shape", arguments.shape]
            command += ["--every", str(arguments.every)]
            log = logs / f"{variant}_{seed}"
            with log.with_suffix(".jsonl").open("w") as out, log.with_suffix(".err").open("w") as err:
                environment = {**os.environ, "OMP_NUM_THREADS": "2"}
                process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
            running[process] = (variant, seed)
        time.sleep(0.5)
        running = {process: key for process, key in running.items() if process.poll() is None}
        print(
            f"\r{total - len(waiting) - len(running)} of {total} runs done",
            end="",
            file=sys.stderr,
            flush=True,
        )
    for process in running:
        process.kill()
    print(file=sys.stderr)
    rows = [
        json.loads(line)
        for log in sorted(logs.glob("*.jsonl"))
        for line in log.read_text().splitlines()
        if line.endswith("}")
    ]
    if not rows:
        raise SystemExit(f"no run got anywhere; see {logs}")
    with (folder / "convergence.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    table(rows, arguments.steps, arguments.seeds)


def table(rows: list[dict], steps: int, seeds: int) -> None:
    """Final losses by variant, beside the spread of the reference."""
    finals: dict[str, list[float]] = {}
    for row in rows:
        if int(row["step"]) == steps:
            finals.setdefault(row["variant"], []).append(float(row["valid_loss"]))
    reference = finals.get("adamw_fp32", [])
    mean, spread = (
        (sum(reference) / len(reference), max(reference) - min(reference))
        if reference
        else (math.nan, math.nan)
    )
    print(f"{'variant':18} {'runs':>4} {'mean':>8} {'min':>8} {'max':>8} {'to fp32':>8}  within {spread:.4f}")
    for variant in VARIANTS:
        if variant in finals:
            values = finals[variant]
            own = sum(values) / len(values)
            verdict = "yes" if abs(own - mean) <= spread else "no"
            figures = f"{own:8.4f} {min(values):8.4f} {max(values):8.4f} {own - mean:+8.4f}"
            print(f"{variant:18} {len(values):>2}/{seeds} {figures}  {verdict}")


def plot(source: Path, target: Path) -> None:
    """Validation loss over steps: mean and range over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves: dict[str, dict[int, list[float]]] = {}
    with source.open() as file:
        for row in csv.DictReader(file):
            curves.setdefault(row["variant"], {}).setdefault(int(row["step"]), []).append(
                float(row["valid_loss"])
            )
    figure, axes = plt.subplots(figsize=(8, 5))
    for variant in (name for name in VARIANTS if name in curves):
        steps = sorted(curves[variant])
        values = [curves[variant][step] for step in steps]
        line = axes.plot(steps, [sum(v) / len(v) for v in values], label=variant)[0]
        axes.fill_between(
            steps, [min(v) for v in values], [max(v) for v in values], color=line.get_color(), alpha=0.2
        )
    axes.set(xlabel="step", ylabel="validation loss", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(target, dpi=150)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare")
    one.add_argument("text", type=Path)
    one.add_argument("folder", type=Path)
    for name in ("run", "one"):
        one = commands.add_parser(name)
        one.add_argument("data", type=Path)
        one.add_argument("--shape", choices=SHAPES, default="60m")
        one.add_argument("--steps", type=int, default=2000)
        one.add_argument("--every", type=int, default=200, help="steps between evaluations")
        if name == "one":
            one.add_argument("--variant", choices=VARIANTS, required=True)
            one.add_argument("--seed", type=int, required=True)
        else:
            one.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
            one.add_argument("--seeds", type=int, default=3)
            one.add_argument("--parallel", type=int, default=4)
            one.add_argument("--minutes", type=float, default=9.0)
            one.add_argument("--output", default=os.environ.get("OUT", "."))
    one = commands.add_parser("plot")
    one.add_argument("source", type=Path)
    one.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        prepare(arguments.text, arguments.folder)
    elif arguments.command == "run":
        run(arguments)
    elif arguments.command == "one":
        train(arguments.variant, arguments.seed, arguments)
    else:
        plot(arguments.source, arguments.target)


if __name__ == "__main__":
    main()
