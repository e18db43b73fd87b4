"""The nine GLUE tasks: column names, labels and metrics, for `run_glue.py`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

__all__ = ["TASKS", "DataError", "Task", "compute_metrics_for", "order_labels", "task_by_name"]


class DataError(ValueError):
    """A file, column or label is not what the task needs; the message says which and what would do."""


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: Configuration name in `nyu-mll/glue`; "" for a task that is defined by its files.
        texts: For each text, the column names under which it is known, the Hub's first.
        labels: Class names in the order of their numbers; empty for a regression, None if the files decide.
        metrics: Names from `METRICS`.
        label_columns: The column names under which the label is known.
    """

    name: str
    texts: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...] | None
    metrics: tuple[str, ...] = ("accuracy",)
    label_columns: tuple[str, ...] = ("label",)

    @property
    def is_regression(self) -> bool:
        """Whether the label is a score."""
        return self.labels == ()


_PAIR = (("sentence1", "#1 String"), ("sentence2", "#2 String"))
_ENTAILMENT = ("entailment", "not_entailment")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("cola", (("sentence",),), ("unacceptable", "acceptable"), ("matthews_correlation",)),
        Task(
            "mnli",
            (("premise", "sentence1"), ("hypothesis", "sentence2")),
            ("entailment", "neutral", "contradiction"),
            label_columns=("label", "gold_label"),
        ),
        Task(
            "mrpc",
            _PAIR,
            ("not_equivalent", "equivalent"),
            ("accuracy", "f1"),
            label_columns=("label", "Quality"),
        ),
        Task("qnli", (("question",), ("sentence",)), _ENTAILMENT),
        Task(
            "qqp",
            (("question1",), ("question2",)),
            ("not_duplicate", "duplicate"),
            ("accuracy", "f1"),
            label_columns=("label", "is_duplicate"),
        ),
        Task("rte", _PAIR, _ENTAILMENT),
        Task("sst2", (("sentence",),), ("negative", "positive")),
        Task("stsb", _PAIR, (), ("pearson", "spearmanr"), label_columns=("label", "score")),
        Task("wnli", _PAIR, ("not_entailment", "entailment")),
    )
}


def task_by_name(name: str) -> Task:
    """The task called `name`; case and hyphens do not matter ("SST-2" is "sst2").

    Raises:
        DataError: no such task; the message gives the nearest one.
    """
    key = name.lower().replace("-", "").replace("_", "")
    if key in TASKS:
        return TASKS[key]
    near = difflib.get_close_matches(key, TASKS, n=1, cutoff=0.4)
    hint = f"the nearest is '{near[0]}'; " if near else ""
    raise DataError(f"Unknown task '{name}'; {hint}the tasks are {', '.join(TASKS)}.")


def order_labels(task: Task, model_labels: Sequence[str]) -> tuple[Task, list[str]]:
    """The class names in the order of the outputs: the checkpoint's, if it was trained on these classes.

    Args:
        task: The task; if its files told no labels, the checkpoint's are taken.
        model_labels: The checkpoint's class names.

    Returns:
        The task with its labels, and the names in order (none for a regression).
    """
    known = {str(label).lower(): str(label) for label in model_labels}
    if task.labels is None:
        task = replace(task, labels=tuple(known.values()) if len(known) > 1 else ())
    labels = list(task.labels or ())
    if not labels or not {label.lower() for label in labels} <= set(known):
        return task, labels
    if not task.name:
        # Files need not show every class that the checkpoint knows.
        return replace(task, labels=tuple(known.values())), list(known.values())
    spelling = {label.lower(): label for label in labels}
    return task, [spelling.get(label, label) for label in known]


def _pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    from scipy.stats import pearsonr

    return _correlation(pearsonr, predictions, labels)


def _spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    from scipy.stats import spearmanr

    return _correlation(spearmanr, predictions, labels)


def _correlation(function: Callable[..., Any], predictions: np.ndarray, labels: np.ndarray) -> float:
    # A constant correlates with nothing; scipy's NaN would make the saved metrics invalid JSON.
    if len(labels) < 2 or np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    return float(function(predictions, labels)[0])


def _accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float((predictions == labels).mean())


def _f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, zero_division=0))


def _matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews_correlation": _matthews,
    "pearson": _pearson,
    "spearmanr": _spearman,
}


def compute_metrics_for(task: Task, model_labels: Sequence[str] = ()) -> Callable[[Any], dict[str, float]]:
    """The Trainer's `compute_metrics` for a task: its metrics, and their mean as `combined_score` if several.

    The function takes `(logits, labels)`: logits (rows, classes), or (rows, 1) for a regression.

    Args:
        task: The task.
        model_labels: The class names in the model's order, if that is not the task's. F1 counts the task's
            class 1 as the positive one, whatever number the model gives it.
    """
    order = np.array([(task.labels or ()).index(name) for name in model_labels], dtype=np.int64)

    def compute(output: Any) -> dict[str, float]:
        logits, labels = output
        logits = np.asarray(logits[0] if isinstance(logits, tuple) else logits)
        predictions = logits.squeeze(-1) if task.is_regression else logits.argmax(-1)
        labels = np.asarray(labels)
        if len(order):
            predictions, labels = order[predictions], order[labels]
        result = {name: METRICS[name](predictions, labels) for name in task.metrics}
        if len(result) > 1:
            result["combined_score"] = sum(result.values()) / len(result)
        return result

    return compute
