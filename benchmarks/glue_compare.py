"""Dev metrics of examples/run_glue.py with two optimizers, same seed, data and steps, side by side.

    python benchmarks/glue_compare.py --model DIR --data DIR       # DIR/sst2/train.tsv.gz and so on

`--model` is a checkpoint for a RoBERTa class (see `minilm_roberta.py`). Every run is a process of its own.
Prints a table and compares the first logged gradient norm. The CSV goes to --output (default: $OUT, or here).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = {"sst2": 250, "mrpc": 200, "cola": 250, "stsb": 200}
SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "run_glue.py"


def run(task: str, optim: str, arguments: argparse.Namespace, seed: int) -> dict:
    """Train once; returns the dev metrics, the seconds and the logged norms."""
    folder = arguments.data / task
    with tempfile.TemporaryDirectory() as output:
        command = [
            *(sys.executable, str(SCRIPT), "--model_name_or_path", str(arguments.model), "--task_name", task),
            *("--train_file", str(folder / "train.tsv.gz"), "--validation_file", str(folder / "dev.tsv.gz")),
            *("--do_train", "--do_eval", "--max_seq_length", "128", "--per_device_train_batch_size", "32"),
            *("--max_steps", str(STEPS[task]), "--learning_rate", "1e-4", "--warmup_steps", "0.1"),
            *("--max_grad_norm", "1.0", "--seed", str(seed), "--optim", optim, "--output_dir", output),
            *("--logging_steps", "10", "--save_strategy", "no", "--report_to", "none"),
            *arguments.extra,
        ]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"{task} with {optim} failed:\n{result.stderr[-2000:]}")
        metrics = json.loads((Path(output) / "all_results.json").read_text())
        state = json.loads((Path(output) / "trainer_state.json").read_text())
    norms = [entry["grad_norm"] for entry in state["log_history"] if "grad_norm" in entry]
    return {"task": task, "optim": optim, "seed": seed, "norms": norms, **metrics}


def main() -> None:
    """Run all pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["sst2", "mrpc"], choices=STEPS)
    parser.add_argument("--optims", nargs="+", default=["adamw_torch", "forge_adamw"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", ".")))
    arguments, arguments.extra = parser.parse_known_args()
    rows = []
    for task in arguments.tasks:
        for seed in arguments.seeds:
            first: list[float] = []
            for optim in arguments.optims:
                row = run(task, optim, arguments, seed)
                norms = row.pop("norms")
                first = first or norms
                row["first_norm_ratio"] = norms[0] / first[0]
                figures = {key: value for key, value in row.items() if key.startswith("eval_")}
                shown = {
                    key[5:]: round(value, 4)
                    for key, value in figures.items()
                    if key.split("_")[-1] not in ("second", "runtime", "samples")
                }
                print(f"{task:6} seed {seed} {optim:14} {row['train_runtime']:7.1f} s  {shown}", flush=True)
                rows.append(row)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    with (arguments.output / "glue_compare.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
