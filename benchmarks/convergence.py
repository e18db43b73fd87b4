"""Does a run with 8-bit or bf16 moments end where the fp32 run ends? A small Llama on public-domain books.

    python benchmarks/convergence.py --prepare TEXT_FOLDER DATA_FOLDER   # once, CPU: tokenizer, token arrays
    python benchmarks/convergence.py --data DATA_FOLDER --minutes 9      # a process per (variant, seed)
    python benchmarks/convergence.py --table A.csv B.csv                 # the table of several calls together
    python benchmarks/convergence.py --plot convergence.csv convergence.png

TEXT_FOLDER holds classics_train.txt.gz and classics_valid.txt.gz. 59.7M weights, batches of 16 x 256 tokens,
cosine schedule to a tenth with 5 % warm-up, lr 1e-3 and betas (0.9, 0.999), for Lion 1e-4 and (0.9, 0.99),
weight decay 0.1, clipping at 1.0. Data order and fp32 initial weights follow from the seed alone.

fp32 weights run under bf16 autocast, which keeps the residual stream in fp32; bf16 weights keep it in bf16.
Two things therefore differ between adamw_fp32 and the bf16 variants. forge_fp32_w32 holds them apart: it runs
forward in bf16 and stores as fp32 does.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY, LENGTH, BATCH, VALID_ROWS = 8192, 256, 16, 64
READ_EVERY = 50  # steps between two reads of the losses, each of which waits for the device
REFERENCE = "adamw_fp32"
COLUMNS = ("variant", "seed", "step", "train_loss", "val_loss", "seconds")
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SHAPES = {
    name: dict(zip(_SIZES, sizes, strict=True))
    for name, sizes in (("60m", (640, 10, 10, 1712)), ("33m", (512, 8, 8, 1376)), ("tiny", (64, 2, 2, 128)))
}
#: The GaLore paper's settings for a 60M Llama; its decay is 0.
GALORE = {"lr": 1e-2, "rank": 128, "update_proj_gap": 200, "scale": 0.25, "weight_decay": 0.0}
#: name -> (optimizer, dtype of the weights, its options)
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    REFERENCE: ("torch", "fp32", {}),
    "forge_8bit": ("ForgeAdamW", "bf16", {"state": "8bit"}),
    "forge_bf16": ("ForgeAdamW", "bf16", {"state": "bf16"}),
    "adamw_bf16": ("torch", "bf16", {}),
    "forge_fp32": ("ForgeAdamW", "fp32", {"state": "fp32"}),
    "forge_8bit_fp32w": ("ForgeAdamW", "fp32", {"state": "8bit"}),
    "forge_8bit_w24": ("ForgeAdamW", "bf16", {"state": "8bit", "weight_bits": 24}),
    "forge_lion_fp32": ("ForgeLion", "fp32", {"state": "fp32"}),
    "forge_lion_8bit": ("ForgeLion", "bf16", {"state": "8bit"}),
    "forge_fp32_w32": ("ForgeAdamW", "bf16", {"state": "fp32", "weight_bits": 32}),
    "galore_svd": ("ForgeGaLoreAdamW", "fp32", {**GALORE, "subspace": "svd"}),
    "galore_power": ("ForgeGaLoreAdamW", "fp32", GALORE),
    "galore_power_rotate": ("ForgeGaLoreAdamW", "fp32", {**GALORE, "moments": "rotate"}),
    "galore_8bit": ("ForgeGaLoreAdamW", "bf16", {**GALORE, "state": "8bit"}),
}
CONTROLS = (
    "forge_fp32_w32",
    "galore_svd",
    "galore_power",
    "galore_power_rotate",
    "galore_8bit",
)  # when named

Row = dict[str, Any]


def prepare(text: Path, folder: Path) -> None:
    """Train a byte-level BPE on the training text and store both texts as uint16 tokens."""
    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir(parents=True, exist_ok=True)
    texts = {}
    for part in ("train", "valid"):
        with gzip.open(text / f"classics_{part}.txt.gz", "rt", encoding="utf-8") as file:
            texts[part] = file.read()
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts["train"].splitlines(keepends=True), VOCABULARY, show_progress=False)
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


def build(variant: str, seed: int, shape: str, device: str) -> tuple[Any, Any, Any]:
    """Model, optimizer and clipping function of a variant; lr is the peak."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import forge_hf

    kind, dtype, options = VARIANTS[variant]
    torch.manual_seed(seed)
    config = LlamaConfig(
        **SHAPES[shape],
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        use_cache=False,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    if dtype == "bf16":
        for parameter in model.parameters():  # model.to() would round the frequencies of RoPE as well
            parameter.data = parameter.data.to(torch.bfloat16)
    model.to(device)
    if kind == "torch":
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1, fused=True
        )
        return model, optimizer, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    lion = kind == "ForgeLion"
    settings: dict[str, Any] = {
        "lr": 1e-4 if lion else 1e-3,
        "betas": (0.9, 0.99) if lion else (0.9, 0.999),
        "weight_decay": 0.1,
        "update": "step",
        "seed": seed,  # of the rounding: runs of different seeds are to be independent
        **options,
    }
    forge = getattr(forge_hf, kind)(model, **settings)
    return model, forge, lambda: forge_hf.clip_grad_norm_(forge, 1.0)


def train(variant: str, seed: int, arguments: argparse.Namespace) -> None:
    """One run in this process; rows go to its CSV as they come."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = arguments.steps
    model, optimizer, clip = build(variant, seed, arguments.shape, device)
    peaks = [group["lr"] for group in optimizer.param_groups]
    arrays = {part: np.load(arguments.data / f"{part}.npy").astype(np.int32) for part in ("train", "valid")}
    tokens = torch.from_numpy(arrays["train"]).to(device)
    valid = (
        torch.from_numpy(arrays["valid"][: VALID_ROWS * LENGTH]).view(VALID_ROWS, LENGTH).long().to(device)
    )
    order = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - LENGTH, (steps, BATCH), generator=order).to(device)
    lane = torch.arange(LENGTH, device=device)
    autocast = torch.autocast(device, torch.bfloat16, enabled=VARIANTS[variant][1] == "fp32")
    losses, began = [], time.perf_counter()
    with Path(arguments.one).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for step in range(1, steps + 1):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * schedule(step - 1, steps)
            batch = tokens[starts[step - 1][:, None] + lane].long()
            with autocast:
                loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            clip()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            evaluate = step % arguments.every == 0 or step == steps
            if not evaluate and step % READ_EVERY:
                continue
            val_loss = ""
            if evaluate:
                with torch.no_grad(), autocast:
                    parts = [model(input_ids=part, labels=part).loss.float() for part in valid.split(BATCH)]
                val_loss = f"{torch.stack(parts).mean().item():.5f}"
            train_loss = f"{torch.stack(losses).float().mean().item():.5f}"
            losses.clear()
            seconds = f"{time.perf_counter() - began:.2f}"
            writer.writerow((variant, seed, step, train_loss, val_loss, seconds))
            file.flush()


def start(variant: str, seed: int, arguments: argparse.Namespace, stem: Path) -> subprocess.Popen[bytes]:
    """Start the process of one run; its CSV and its errors lie at `stem`."""
    command = [sys.executable, __file__, "--one", f"{stem}.csv", "--data", str(arguments.data)]
    command += ["--variants", variant, "--first-seed", str(seed), "--steps", str(arguments.steps)]
    command += ["--shape", arguments.shape, "--every", str(arguments.every)]
    with Path(f"{stem}.err").open("w") as errors:
        environment = {**os.environ, "OMP_NUM_THREADS": "2"}
        return subprocess.Popen(command, stdout=errors, stderr=errors, env=environment)


def run(arguments: argparse.Namespace) -> None:
    """Start the runs, some at a time, until all are done or the time is up; then CSV and table."""
    ends = time.monotonic() + 60 * arguments.minutes
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    waiting = [(variant, seed) for seed in seeds for variant in arguments.variants]
    folder = arguments.output / "convergence_runs"
    folder.mkdir(parents=True, exist_ok=True)
    stems = {key: folder / f"{key[0]}_{key[1]}" for key in waiting}
    for stem in stems.values():
        Path(f"{stem}.csv").unlink(missing_ok=True)  # of an earlier call
    running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
    lines: list[str] = []
    try:
        while (waiting or running) and time.monotonic() < ends:
            while waiting and len(running) < arguments.parallel:
                key = waiting.pop(0)
                running[key] = start(*key, arguments, stems[key])
            time.sleep(0.2)
            for key in [key for key, process in running.items() if process.poll() is not None]:
                if running.pop(key).returncode:
                    last = Path(f"{stems[key]}.err").read_text().strip().splitlines()[-1:]
                    lines.append(f"{key[0]} seed {key[1]}: failed: {' '.join(last)}")
    finally:
        for key, process in running.items():
            process.kill()
            process.wait()
            lines.append(f"{key[0]} seed {key[1]}: not finished, the time was up")
    lines += [f"{variant} seed {seed}: not started, the time was up" for variant, seed in waiting]
    rows = read([Path(f"{stem}.csv") for stem in stems.values() if Path(f"{stem}.csv").exists()])
    with (arguments.output / "convergence.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    print("\n".join(lines))
    table(rows, arguments.steps, arguments.seeds)
    if any("failed" in line for line in lines):
        raise SystemExit(1)


def read(files: list[Path]) -> list[Row]:
    """Complete rows of the CSV files, in their order; a killed process may leave half a line."""
    rows: list[Row] = []
    for source in files:
        with source.open(newline="") as file:
            for row in csv.DictReader(file):
                row = {"val_loss" if name == "valid_loss" else name: value for name, value in row.items()}
                if all(row.get(name) is not None for name in COLUMNS):
                    rows.append(row)
    return rows


def curves(rows: list[Row]) -> dict[str, dict[int, dict[int, tuple[float, float]]]]:
    """Variant -> seed -> step -> (validation loss, seconds), in the order of VARIANTS."""
    known: dict[str, dict[int, dict[int, tuple[float, float]]]] = {name: {} for name in VARIANTS}
    for row in rows:
        if row["val_loss"]:
            runs = known.setdefault(row["variant"], {}).setdefault(int(row["seed"]), {})
            runs[int(row["step"])] = (float(row["val_loss"]), float(row["seconds"]))
    return {name: runs for name, runs in known.items() if runs}


def table(rows: list[Row], steps: int, seeds: int) -> None:
    """Losses after `steps` by variant, beside the reference; verdicts only where all seeds are done."""
    known = curves(rows)
    finals = {
        name: {seed: run[steps][0] for seed, run in runs.items() if steps in run}
        for name, runs in known.items()
    }
    reference = finals.get(REFERENCE, {})
    spread = max(reference.values()) - min(reference.values()) if len(reference) > 1 else math.nan
    print(f"loss after {steps} steps; seed spread of {REFERENCE}: {spread:.4f} ({len(reference)} runs)")
    print(f"within: |mean - mean of {REFERENCE}| <= its seed spread, largest minus smallest; - if runs lack")
    print("- fp32: difference to the reference's runs of the same seeds; ms: per step, beside the other runs")
    print(
        f"{'variant':17} {'runs':>5} {'mean':>8} {'min':>8} {'max':>8} {'- fp32':>8} {'/spread':>8} within ms"
    )
    for name, by_seed in finals.items():
        if not by_seed:
            print(f"{name:17} {0:>3}/{seeds} not one run to the end")
            continue
        values = list(by_seed.values())
        paired = [loss - reference[seed] for seed, loss in by_seed.items() if seed in reference]
        difference = sum(paired) / len(paired) if paired else math.nan
        complete = len(paired) == len(reference) == seeds > 1
        within = ("yes" if abs(difference) <= spread else "no") if complete else "-"
        figures = f"{sum(values) / len(values):8.4f} {min(values):8.4f} {max(values):8.4f} {difference:+8.4f}"
        ratio, ms = difference / spread if spread else math.nan, step_ms(known[name])
        print(f"{name:17} {len(values):>3}/{seeds} {figures} {ratio:+8.2f} {within:>6} {ms:5.1f}")


def step_ms(runs: dict[int, dict[int, tuple[float, float]]]) -> float:
    """Milliseconds per step between first and last evaluation, so without compilation; mean of the runs."""
    ms = []
    for run in runs.values():
        first, last = min(run), max(run)
        if last > first:
            ms.append(1000 * (run[last][1] - run[first][1]) / (last - first))
    return sum(ms) / len(ms) if ms else math.nan


def plot(source: Path, target: Path) -> None:
    """Validation loss over steps: mean and range over the seeds; the right half again, larger."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (whole, end) = plt.subplots(1, 2, figsize=(12, 5))
    known = curves(read([source]))
    colours = plt.get_cmap("tab10")
    for name, runs in known.items():
        colour = colours(list(VARIANTS).index(name) if name in VARIANTS else 7)
        reached = max(max(run) for run in runs.values())
        runs = {seed: run for seed, run in runs.items() if max(run) == reached}  # others were cut off
        steps = sorted(next(iter(runs.values())))
        values = np.array([[run[step][0] for step in steps] for run in runs.values()])
        for axes in (whole, end):
            axes.plot(steps, values.mean(0), color=colour, label=f"{name} ({len(runs)})")
            axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
    last = max(step for runs in known.values() for run in runs.values() for step in run)
    points = [point for runs in known.values() for run in runs.values() for point in run.items()]
    late = [loss for step, (loss, _) in points if step >= last / 2 and math.isfinite(loss)] or [0.0]
    end.set(xlim=(last / 2, last), ylim=(min(late) - 0.02, max(late) + 0.02), title="second half")
    for axes in (whole, end):
        axes.set(xlabel="step", ylabel="validation loss (nats per token)")
        axes.grid(alpha=0.3)
    whole.legend(title="variant (seeds)")
    figure.tight_layout()
    figure.savefig(target, dpi=130)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prepare", nargs=2, type=Path, metavar=("TEXT_FOLDER", "DATA_FOLDER"))
    parser.add_argument("--table", nargs="+", type=Path, metavar="CSV")
    parser.add_argument("--plot", nargs=2, type=Path, metavar=("CSV", "PNG"))
    parser.add_argument("--data", type=Path, default=Path(".carry_conv"), help="folder that --prepare wrote")
    parser.add_argument("--variants", default=",".join(name for name in VARIANTS if name not in CONTROLS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=200, help="steps between evaluations")
    parser.add_argument("--shape", choices=SHAPES, default="60m")
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=4.0, help="for all runs together")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.variants = arguments.variants.split(",")
    unknown = [name for name in arguments.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown variants {unknown}; there are {', '.join(VARIANTS)}")
    if arguments.prepare:
        prepare(*arguments.prepare)
    elif arguments.table:
        table(read(arguments.table), arguments.steps, arguments.seeds)
    elif arguments.plot:
        plot(*arguments.plot)
    elif arguments.one:
        train(arguments.variants[0], arguments.first_seed, arguments)
    else:
        run(arguments)


if __name__ == "__main__":
    main()
