"""Run as a script: trains in forked processes that are killed at random moments, and resumes until done.

    python tests/kill_driver.py FOLDER OPTIM DTYPE KILLS SEED

Moments: before and after every part of a step, inside optimizer.step() after some of its updates, and while a
checkpoint is written: before, halfway and after each of its files. Some kills come from outside, by a timer.
Prints "kills resumes" and leaves end.pt (weights and optimizer state) in FOLDER/whole and FOLDER/killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState

import forge_hf  # noqa: F401
from forge_hf import reference, state
from tests.trainer_runs import train

STEPS, SAVE_STEPS = 24, 3


def die() -> None:
    """As the out-of-memory killer does it: no clean-up runs."""
    os.kill(os.getpid(), signal.SIGKILL)


class Clock:
    """Counts moments; at the chosen one the process dies."""

    def __init__(self, last: int) -> None:
        self.left = last

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            die()


class Moments(TrainerCallback):
    """Moments between the parts of a step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.clock.tick()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.clock.tick()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.clock.tick()


def ticking(function: Callable[..., Any], clock: Clock) -> Callable[..., Any]:
    """The function with a moment after it."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        clock.tick()
        return result

    return wrapper


def halving(function: Callable[..., Any], clock: Clock, where: int, key: str = "") -> Callable[..., Any]:
    """A function that writes a file, with moments before it, when half of the file is there, and after it."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        clock.tick()
        result = function(*args, **kwargs)
        path = kwargs[key] if key in kwargs else args[where]
        if clock.left == 1 and isinstance(path, (str, os.PathLike)) and Path(path).is_file():
            data = Path(path).read_bytes()
            Path(path).write_bytes(data[: len(data) // 2])
        clock.tick()
        clock.tick()
        return result

    return wrapper


def life(folder: Path, optim: str, dtype: torch.dtype, last: int) -> None:
    """One process: train, from the last checkpoint if there is one, until moment `last` or the end."""
    import safetensors.torch
    import transformers.modeling_utils

    clock = Clock(last)
    torch.save = halving(torch.save, clock, 1, "f")
    transformers.modeling_utils.safe_save_file = halving(safetensors.torch.save_file, clock, 1, "filename")
    TrainerState.save_to_json = halving(TrainerState.save_to_json, clock, 1, "json_path")
    reference.wgrad_update_ = ticking(reference.wgrad_update_, clock)
    reference.dense_update_ = ticking(reference.dense_update_, clock)
    state.SMALLEST_QUANTIZED = 256
    started = folder.is_dir() and any(folder.glob("checkpoint-*/trainer_state.json"))
    run = train(
        folder, "llama", optim, dtype=dtype, dropout=0.1, max_steps=STEPS, save_strategy="steps",
        save_steps=SAVE_STEPS, save_total_limit=2, trainer_options={"callbacks": [Moments(clock)]},
        resume=True if started else None,
    )  # fmt: skip
    clock.left = 0
    torch.save({"weights": run.trainer.model.state_dict(), "optimizer": run.trainer.optimizer.state_dict()},
               folder / "end.pt")  # fmt: skip


def fork(work: Callable[[], None], patience: float | None = None) -> int:
    """Run `work` in a forked process, killed after `patience` seconds; returns its exit status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    if patience is not None:
        time.sleep(patience)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def main() -> None:
    folder, optim, dtype, kills, seed = sys.argv[1:6]
    torch.set_num_threads(1)
    chance = random.Random(int(seed))
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    whole, killed = Path(folder) / "whole", Path(folder) / "killed"
    assert fork(lambda: life(whole, optim, types[dtype], 0)) == 0
    done = lives = 0
    while True:
        patience = None
        last = 0
        if done < int(kills):
            if chance.random() < 0.25:
                patience = chance.uniform(0.05, 0.6)
            else:
                last = chance.randint(1, 220)
        lives += 1
        status = fork(lambda last=last: life(killed, optim, types[dtype], last), patience)
        if os.WIFSIGNALED(status):
            done += 1
        elif status != 0:
            raise SystemExit(f"life {lives} failed with status {status}")
        elif done >= int(kills):
            break
        else:
            (killed / "end.pt").unlink(missing_ok=True)
            for checkpoint in sorted(killed.glob("checkpoint-*"))[1:]:  # go back, and die again
                for file in checkpoint.iterdir():
                    file.unlink()
                checkpoint.rmdir()
    print(done, lives)


if __name__ == "__main__":
    main()
