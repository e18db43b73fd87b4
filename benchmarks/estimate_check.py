"""Predicted and measured peak memory of training steps, each measurement in a process of its own.

    python benchmarks/estimate_check.py            # every pair; minutes on an 80 GB card or larger
    python benchmarks/estimate_check.py --smoke    # any machine: one tiny pair, prediction only without a GPU

The models are Llamas with random weights. A pair that does not fit the card is a result and says so. The
CSV goes to --output (default: $OUT, else the current folder). The exit status is 1 if a measured peak is more
than 8 % off.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

LIMIT = 0.08
#: Name -> hidden, layers, heads, key-value heads, MLP, vocabulary.
LLAMAS = {
    "tiny": (64, 2, 4, 2, 160, 512),
    "0.1B": (768, 12, 12, 12, 2048, 32000),
    "0.6B": (1024, 28, 16, 8, 3072, 151936),
    "1B": (2048, 16, 32, 8, 8192, 128256),
    "3B": (3072, 28, 24, 8, 8192, 128256),
    "8B": (4096, 32, 32, 8, 14336, 128256),
}


class Pair(NamedTuple):
    """A model, an optimizer of `forge_hf.hf.estimate.METHODS`, and fields of its `Setting`."""

    model: str
    method: str
    setting: dict[str, Any]


LONG = {"length": 2048, "checkpointing": True}
PAIRS = [
    Pair("0.1B", "adamw_torch (fused)", {"batch": 8, "length": 512}),
    Pair("0.1B", "forge_adamw_8bit", {"batch": 8, "length": 512}),
    Pair("0.6B", "forge_adamw", {"batch": 2, "length": 1024}),
    Pair("0.6B", "LoRA, adamw_torch (fused)", {"batch": 2, "length": 1024, "checkpointing": True}),
    Pair("1B", "forge_adamw_8bit", {"batch": 4, **LONG}),
    Pair("1B", "galore_adamw_8bit", {"batch": 4, **LONG}),
    Pair("3B", "forge_adamw_8bit", {"batch": 1, **LONG, "clip": False}),
    Pair("3B", "galore_adamw_8bit", {"batch": 1, "length": 256, "clip": False, "rank": 512}),
    Pair("8B", "forge_adamw_8bit", {"batch": 1, **LONG}),
    Pair("8B", "galore_adamw_8bit", {"batch": 1, **LONG, "rank": 256}),
]
COLUMNS = (
    "model",
    "method",
    "setting",
    "predicted_gib",
    "measured_gib",
    "off",
    "card",
    "torch",
    "transformers",
)


def config_of(model: str) -> Any:
    """The config of one of `LLAMAS`."""
    from forge_hf.hf.estimate import llama_config

    return llama_config(*LLAMAS[model])


def predict(pair: Pair) -> float:
    """Predicted peak in GiB."""
    from forge_hf.hf.estimate import Setting, estimate

    return estimate(config_of(pair.model), Setting(**pair.setting), [pair.method])[0].peak_bytes / 2**30


def optimizer_for(pair: Pair, model: Any) -> Any:
    """The optimizer as the estimate means it."""
    import torch

    import forge_hf

    update = "step" if pair.setting.get("clip", True) else "backward"
    if pair.method.startswith("forge"):
        state = "8bit" if pair.method.endswith("8bit") else "auto"
        return forge_hf.ForgeAdamW(model, lr=1e-5, update=update, state=state)
    if pair.method.startswith("galore"):
        rank = pair.setting.get("rank", 128)
        return forge_hf.ForgeGaLoreAdamW(
            model, lr=1e-5, update=update, state="8bit", rank=rank, measure_norm=update == "step"
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, fused=True)


def measure(pair: Pair) -> float:
    """Peak in GiB of the third and fourth of four steps on the current GPU."""
    import torch

    from forge_hf.hf.estimate import LORA_RANK, Setting, build

    setting = Setting(**pair.setting)
    model: Any = build(config_of(pair.model), setting).to_empty(device="cuda")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if pair.method.startswith("LoRA"):
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=LORA_RANK, target_modules="all-linear"))
    optimizer = optimizer_for(pair, model)
    vocabulary = LLAMAS[pair.model][5]
    for step in range(4):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        ids = torch.randint(0, vocabulary, (setting.batch, setting.length), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        if setting.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return float(torch.cuda.max_memory_allocated() / 2**30)


def measured_apart(index: int) -> tuple[float | None, str]:
    """`measure` in a new process: GiB and "", or None and why not."""
    done = subprocess.run([sys.executable, __file__, "--one", str(index)], capture_output=True, text=True)
    if done.returncode == 0:
        return float(done.stdout.strip().splitlines()[-1]), ""
    if "out of memory" in done.stderr:
        return None, "out of memory"
    print(done.stderr[-2000:], file=sys.stderr)
    return None, "failed"


def main() -> int:
    """Predict and measure every pair; 1 if one is off by more than 8 % or failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="one tiny pair")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(measure(PAIRS[arguments.one]))
        return 0
    import torch
    import transformers

    gpu = torch.cuda.is_available()
    card = torch.cuda.get_device_name() if gpu else "none"
    pairs = [Pair("tiny", "forge_adamw", {"batch": 2, "length": 32})] if arguments.smoke else PAIRS
    rows, bad = [], False
    print(f"{'model':6} {'optimizer':28} {'predicted':>9} {'measured':>9} {'off':>7}  setting", flush=True)
    for index, pair in enumerate(pairs):
        predicted = predict(pair)
        measured, why = (None, "no GPU") if not gpu or arguments.smoke else measured_apart(index)
        off = None if measured is None else measured / predicted - 1
        bad = bad or why == "failed" or (off is not None and abs(off) > LIMIT)
        shown = why if measured is None else f"{measured:.2f}"
        percent = "" if off is None else f"{100 * off:+.1f} %"
        setting = json.dumps(pair.setting)
        print(
            f"{pair.model:6} {pair.method:28} {predicted:9.2f} {shown:>9} {percent:>7}  {setting}", flush=True
        )
        values = (pair.model, pair.method, setting, round(predicted, 3), shown, percent)
        versions = (card, torch.__version__, transformers.__version__)
        rows.append(dict(zip(COLUMNS, (*values, *versions), strict=True)))
        with (arguments.output / "estimate_check.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
