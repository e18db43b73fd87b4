"""Docstrings of what users call: arguments, results, errors, and attributes of what they read."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest

import forge_hf


def sections(text: str) -> set[str]:
    return {line.strip().rstrip(":") for line in text.splitlines() if line.strip().endswith(":")}


def callables() -> list[tuple[str, object]]:
    """Public functions, classes, and the public methods that they define."""
    found: list[tuple[str, object]] = []
    for name in forge_hf.__all__:
        value = getattr(forge_hf, name)
        found.append((name, value))
        if inspect.isclass(value):
            own = [item for item in vars(value).items() if not item[0].startswith("_")]
            found += [(f"{name}.{key}", method) for key, method in own if inspect.isfunction(method)]
    return found


@pytest.mark.parametrize("name, value", callables(), ids=[name for name, _ in callables()])
def test_public_docstrings(name, value):
    text = inspect.getdoc(value) or ""
    first = text.splitlines()[0] if text else ""
    assert first.endswith("."), f"{name}: the first line is no sentence"
    if inspect.isclass(value) and issubclass(value, Exception):
        return
    # the Trainer calls the methods of a callback; their arguments are its
    hook = name.startswith("ForgeMemoryCallback.")
    target = value.__init__ if inspect.isclass(value) else value
    try:
        parameters = [
            p for p in inspect.signature(target).parameters if p not in ("self", "args", "kwargs", "rest")
        ]
    except (TypeError, ValueError):
        parameters = []
    see = "see `" in text.lower()
    if len(parameters) > 2 and not hook and not see and name not in ("ForgeTrainer", "ForgeConfig"):
        assert "Args" in sections(text), f"{name} has {parameters} and no Args"
    if raises(value) and not see and not hook:
        assert "Raises" in sections(text), f"{name} raises and does not say so"


def raises(value: object) -> bool:
    """Whether the function itself, or a class's __init__, has a raise statement."""
    target = vars(value).get("__init__") if inspect.isclass(value) else value
    if not inspect.isfunction(target):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(target)))
    except OSError:  # made by dataclass
        return False
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree))
