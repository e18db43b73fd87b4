"""GLUE data from the Hub or from local files, for `run_glue.py`.

Either way the rows end with the columns `sentence1`[, `sentence2`][, `label`].

Local files are `.tsv` (tab-separated, no quoting, as GLUE ships them), `.csv` (comma, standard quoting),
`.json` and `.jsonl`, each also as `.gz`. GLUE's own column names and the Hub's are both recognised; CoLA's
files have no header. Without a task name any file will do that has `label` and `sentence`, `text`, or
`sentence1` and `sentence2`. Labels are class numbers or class names; the scores of a regression are numbers.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value, load_dataset
from glue_tasks import DataError, Task

__all__ = ["load_files", "load_hub", "pick"]

# The training and development files of CoLA; its test file has a header.
_COLA_COLUMNS = ("source", "label", "star", "sentence")


def load_hub(task: Task, **load_options: Any) -> DatasetDict:
    """All splits of a GLUE task from the Hub.

    Raises:
        DataError: the Hub cannot be reached.
    """
    try:
        raw = load_dataset("nyu-mll/glue", task.name, **load_options)
    except (ConnectionError, FileNotFoundError) as error:
        advice = "Give --train_file and --validation_file to use local files."
        raise DataError(f"GLUE could not be loaded from the Hub: {error}. {advice}") from error
    return DatasetDict(
        {
            # The Hub's test labels are all -1.
            split: _rename(rows.remove_columns("label") if split.startswith("test") else rows, task, split)
            for split, rows in raw.items()
        }
    )


def load_files(files: dict[str, str], task: Task | None, **load_options: Any) -> tuple[DatasetDict, Task]:
    """Read one file per split.

    Args:
        files: Path per split name, "train" first if there is one. Labels in a test file are ignored.
        task: The GLUE task; None lets the columns and labels of the first file define one.
        load_options: Passed to `load_dataset`.

    Returns:
        The splits (the test split without labels), and the task with its labels, if a file tells them.

    Raises:
        DataError: a file is missing, empty, of an unknown kind, or lacks a column; a label is unknown.
    """
    splits = DatasetDict()
    for split, path in files.items():
        rows = _read(Path(path), task, load_options)
        task, columns = task or _task_of(rows, path), rows.column_names
        rows = _rename(rows, task, path)
        if split == "test":
            splits[split] = rows.select_columns([name for name in rows.column_names if name != "label"])
            continue
        if "label" not in rows.column_names:
            raise DataError(_missing("label", task.label_columns, columns, path))
        task = _with_labels(task, rows)
        splits[split] = _number_labels(rows, task, path)
    assert task is not None
    return splits, task


def pick(data: DatasetDict, split: str, limit: int | None) -> dict[str, Dataset]:
    """The first `limit` rows of each split whose name begins with `split` (MNLI has two development sets).

    Raises:
        DataError: there is no such split.
    """
    found = {name: rows for name, rows in data.items() if name.startswith(split)}
    if not found:
        raise DataError(f"There is no {split} data; give --{split}_file. Splits at hand: {', '.join(data)}.")
    return {name: rows.select(range(min(limit or len(rows), len(rows)))) for name, rows in found.items()}


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    kind = suffixes[-1].lstrip(".") if suffixes else ""
    if kind not in ("tsv", "csv", "json", "jsonl"):
        raise DataError(
            f"{path}: unknown kind of file; .tsv, .csv, .json, .jsonl are read, each also as .gz."
        )
    return kind


def _open_text(path: Path) -> Any:
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    return opener(path, "rt", encoding="utf-8-sig", newline="")


def _read(path: Path, task: Task | None, load_options: dict[str, Any]) -> Dataset:
    """Rows of one file; the cells of a TSV or CSV stay text, so that "null" or "007" is not reinterpreted."""
    if not path.is_file():
        raise DataError(f"{path}: no such file.")
    kind = _kind(path)
    try:
        with _open_text(path) as stream:
            first = stream.readline().rstrip("\r\n")
            has_rows = bool(stream.readline())
    except (OSError, UnicodeDecodeError) as error:
        encoding = "gzipped UTF-8" if path.suffix.lower() == ".gz" else "UTF-8"
        raise DataError(f"{path}: cannot be read as {encoding}: {error}") from error
    if not first.strip():
        raise DataError(f"{path}: the file is empty.")
    options: dict[str, Any] = {}
    if kind in ("tsv", "csv"):
        columns, has_header = _columns(first, kind, task)
        if has_header and not has_rows:
            raise DataError(f"{path}: the file has a header and no rows.")
        options = {
            "column_names": columns,
            "skiprows": 1 if has_header else 0,
            "keep_default_na": False,
            "features": Features({name: Value("string") for name in columns}),
        }
        if kind == "tsv":
            # Without the terminator a lone carriage return inside a sentence would end the row.
            options |= {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "lineterminator": "\n"}
    loader = "csv" if options else "json"
    try:
        rows = load_dataset(loader, data_files=str(path), split="train", **options, **load_options)
    except Exception as error:
        cause = str(error.__cause__ or error).strip()
        raise DataError(f"{path}: cannot be read as {kind.upper()}: {cause}") from error
    if not len(rows):
        raise DataError(f"{path}: the file has no rows.")
    return rows


def _columns(first: str, kind: str, task: Task | None) -> tuple[list[str], bool]:
    cells = first.split("\t") if kind == "tsv" else next(csv.reader([first]))
    cells = [cell.strip() for cell in cells]
    is_cola = task is not None and task.name == "cola"
    if is_cola and "sentence" not in cells and len(cells) == len(_COLA_COLUMNS):
        return list(_COLA_COLUMNS), False
    return cells, True


def _missing(what: str, names: Sequence[str], found: Sequence[str], path: str) -> str:
    wanted = " or ".join(f"'{name}'" for name in names)
    return f"{path}: no column {wanted} for the {what}; the file has {', '.join(map(repr, found))}."


def _task_of(rows: Dataset, path: str) -> Task:
    names = rows.column_names
    if {"sentence1", "sentence2"} <= set(names):
        return Task("", (("sentence1",), ("sentence2",)), None)
    for name in ("sentence", "text", "sentence1"):
        if name in names:
            return Task("", ((name,),), None)
    raise DataError(_missing("text (give --task_name for a GLUE file)", ("sentence", "text"), names, path))


def _rename(rows: Dataset, task: Task, path: str) -> Dataset:
    """Keep the task's columns only, as `sentence1`[, `sentence2`][, `label`]."""
    renames: dict[str, str] = {}
    for index, names in enumerate(task.texts, start=1):
        found = next((name for name in names if name in rows.column_names), None)
        if found is None:
            what = "text" if len(task.texts) == 1 else f"text {index}"
            raise DataError(_missing(what, names, rows.column_names, path))
        renames[found] = f"sentence{index}"
    label = next((name for name in task.label_columns if name in rows.column_names), None)
    if label:
        renames[label] = "label"
    # Names first taken out of the way: QNLI's `sentence` is its second text, MNLI's `sentence1` its first.
    return rows.select_columns(list(renames)).rename_columns(renames)


def _with_labels(task: Task, rows: Dataset) -> Task:
    """Fill in the labels of a task that its file defines: scores if a value has a fraction, else classes."""
    if task.labels is not None:
        return task
    values = {str(value).strip() for value in rows["label"]}
    if all(_number(value) is not None for value in values):
        if any(not float(value).is_integer() for value in values):
            return replace(task, labels=(), metrics=("pearson", "spearmanr"))
        ordered = sorted({str(int(float(value))) for value in values}, key=int)
    else:
        ordered = sorted(values)
    return replace(task, labels=tuple(ordered))


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _number_labels(rows: Dataset, task: Task, path: str) -> Dataset:
    convert = _score if task.is_regression else _class_of(task)
    labels = []
    for index, value in enumerate(rows["label"], start=1):
        label = convert(value)
        if label is None:
            raise DataError(
                f"{path}: row {index} has the label {value!r}; it must be {_wanted(task, value)}."
            )
        labels.append(label)
    feature = Value("float32") if task.is_regression else ClassLabel(names=list(task.labels or ()))
    return rows.remove_columns("label").add_column("label", labels).cast_column("label", feature)


_score: Callable[[Any], float | None] = _number


def _class_of(task: Task) -> Callable[[Any], int | None]:
    names = list(task.labels or ())

    def convert(value: Any) -> int | None:
        text = str(value).strip()
        if text in names:
            return names.index(text)
        number = _number(value)
        if number is None or not number.is_integer():
            return None
        # A task that its files define has the numbers themselves as names.
        if not task.name:
            return names.index(str(int(number))) if str(int(number)) in names else None
        return int(number) if 0 <= number < len(names) else None

    return convert


def _wanted(task: Task, value: Any) -> str:
    if task.is_regression:
        return "a number"
    names = list(task.labels or ())
    near = difflib.get_close_matches(str(value), names, n=1)
    numbers = f", nor a number from 0 to {len(names) - 1}" if task.name else " (the labels of the first file)"
    return f"one of {', '.join(names)}{numbers}" + (f"; did you mean '{near[0]}'?" if near else "")
