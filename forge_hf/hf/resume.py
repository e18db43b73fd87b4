"""Which checkpoint a run resumes from: one that was written to its end, or a refusal that names one.

The Trainer writes into `checkpoint-N` itself, its `trainer_state.json` last, and takes the highest N for the
last checkpoint. A process that dies while saving leaves a folder that is newer than the last good one and
half empty; without an `optimizer.pt` the Trainer would start from empty moments and say nothing.
"""

from __future__ import annotations

import json
import os
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

from ..config import refuse

__all__ = ["complete_checkpoint", "why_incomplete"]

_STATE = "trainer_state.json"
_ARCHIVES = ("optimizer.pt", "scheduler.pt")


def why_incomplete(folder: str | os.PathLike[str]) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    path = Path(folder)
    if not path.is_dir():
        return "it is no folder"
    try:
        json.loads((path / _STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {_STATE}, which is written last"
    except ValueError:
        return f"its {_STATE} is cut off"
    for name in _ARCHIVES:
        file = path / name
        if not file.exists():
            return f"it has no {name}"
        # torch writes a zip archive, whose directory comes last
        if not zipfile.is_zipfile(file):
            return f"its {name} is cut off or no file of torch.save"
    return None


def complete_checkpoint(resume: Any, output_dir: str | None) -> Any:
    """What `Trainer.train` is to resume from, for what it was asked to.

    Args:
        resume: Its `resume_from_checkpoint`: a path, True for the last one in `output_dir`, or None or False.
        output_dir: Of the TrainingArguments.

    Returns:
        `resume`; for True the path of the last checkpoint that is complete, if there is one.

    Raises:
        ForgeRefusal: the given checkpoint is not complete.
    """
    if resume is True:
        for folder in _checkpoints(output_dir):
            reason = why_incomplete(folder)
            if reason is None:
                return str(folder)
            warnings.warn(f"Checkpoint '{folder}' is left out of the resume: {reason}.", stacklevel=3)
        return resume
    if not resume:
        return resume
    reason = why_incomplete(resume)
    if reason is not None:
        good = (str(f) for f in _checkpoints(Path(resume).parent) if why_incomplete(f) is None)
        other = next(good, None)
        way = f"resume from '{other}'" if other else "start anew"
        raise refuse("incomplete_checkpoint", path=resume, problem=reason, way=way)
    return resume


def _checkpoints(folder: str | os.PathLike[str] | None) -> list[Path]:
    """The `checkpoint-N` folders, highest N first."""
    if folder is None or not Path(folder).is_dir():
        return []
    found = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in Path(folder).iterdir()]
    numbered = [(int(match[1]), path) for match, path in found if match and path.is_dir()]
    return [path for _, path in sorted(numbered, reverse=True)]
