"""Fresh interpreters for what depends on import order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

#: A stock training script: it never mentions this package.
STOCK_SCRIPT = """
import json
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers import RobertaConfig, RobertaForSequenceClassification

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, row):
        ids = torch.randint(4, 50, (8,), generator=torch.Generator().manual_seed(row))
        mask = torch.ones(8, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(row % 2)}

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
config = RobertaConfig(vocab_size=50, max_position_embeddings=20, **sizes, **dropout)
model = RobertaForSequenceClassification(config)
trainer = Trainer(model=model, args=args, train_dataset=Rows())
trainer.train()
weights = torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])
optimizer = trainer.optimizer.optimizer
print("RESULT", json.dumps({
    "optimizer": type(optimizer).__name__,
    "wrapper": type(trainer.model_wrapped).__name__,
    "pairs": sum(entry.path == "pair" for entry in optimizer.report()) if hasattr(optimizer, "report") else 0,
    "grads": sum(parameter.grad is not None for parameter in model.parameters()),
    "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
    "weights": weights.tolist(),
}))
"""

STOCK_ARGUMENTS = (
    "--max_steps 2 --logging_steps 1 --report_to none --use_cpu --per_device_train_batch_size 4 "
    "--save_strategy no --learning_rate 1e-3 --disable_tqdm true"
).split()


def environment(**changes: str) -> dict[str, str]:
    """The environment of a fresh program, without what a launcher or a test runner has set."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("ACCELERATE_", "FORGE_HF_", "PYTEST_"))
    }
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **changes}


def python(code: str, *arguments: str, **changes: str) -> Any:
    """Run `code` in a fresh interpreter and return what its last line of output holds as JSON."""
    return run([sys.executable, "-c", code, *arguments], **changes)[0]


def run(command: list[str], **changes: str) -> tuple[Any, str]:
    """Run a command whose last line of output is JSON; returns that and stderr."""
    # Away from the checkout, whose folder would come first on sys.path.
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(**changes), timeout=300, cwd=os.sep
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1].removeprefix("RESULT ")), done.stderr


def stock_script(folder: Path) -> str:
    """Write the stock script into `folder`."""
    path = folder / "train.py"
    path.write_text(STOCK_SCRIPT)
    return str(path)
