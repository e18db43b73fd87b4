"""The order of imports: downwards only, each outside library in its own corner, the package itself lazy."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forge_hf

PACKAGE = Path(forge_hf.__file__).parent

# Imports go from later lines to the same or earlier ones.
LEVELS = [
    ["refusals", "scalars", "row_sums"],
    ["config", "quantized", "rounding"],
    ["updates"],
    ["kernels", "reference"],
    ["state", "rules", "dispatch", "foreign"],
    ["gradient", "layers"],
    ["slot", "embedding", "projection", "targets"],
    ["tape", "subspace"],
    ["projected"],
    ["low_rank"],
    ["attach", "guards", "update", "checkpoint"],
    ["report"],
    ["optimizer", "distributed"],
    ["galore"],
    ["optim"],
    ["hf"],
    ["cli"],
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
CORNERS = {"triton": "kernels", "transformers": "hf", "accelerate": "hf", "peft": "hf"}


def modules() -> dict[str, Path]:
    """Dotted name below the package ("" is the package itself) -> file."""
    result = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        result[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return result


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def import_nodes(node: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every import that can run, and whether it waits in a function."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, lazy
        elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module"):
            yield child, lazy
        inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from import_nodes(child, inside)


def targets(node: ast.AST, name: str, path: Path) -> list[str]:
    """Absolute dotted names that an import node names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Call):
        first = node.args[0] if node.args else None
        return [first.value] if isinstance(first, ast.Constant) and not first.value.startswith(".") else []
    assert isinstance(node, ast.ImportFrom)
    if not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    package = ["forge_hf", *filter(None, name.split("."))]
    if path.name != "__init__.py":
        package.pop()
    package = package[: len(package) - node.level + 1]
    return [".".join([*package, *filter(None, [node.module]), alias.name]) for alias in node.names]


def all_imports() -> Iterator[tuple[str, str, bool]]:
    """(importing module, imported absolute name, lazy)"""
    for name, path in modules().items():
        for node, lazy in import_nodes(ast.parse(path.read_text())):
            for target in targets(node, name, path):
                yield name, target, lazy


def internal(target: str) -> str | None:
    """The module of ours that `target` (a module or a name in one) lies in."""
    parts = target.split(".")
    if parts[0] != "forge_hf":
        return None
    known = modules()
    for end in range(len(parts), 0, -1):
        if ".".join(parts[1:end]) in known:
            return ".".join(parts[1:end])
    return None


def test_every_module_has_a_level():
    unknown = {name.split(".")[0] for name in modules() if name} - LEVEL.keys()
    assert unknown == set(), "give new modules a place in LEVELS"


def test_imports_go_down():
    upward = []
    for name, target, _ in all_imports():
        home = internal(target)
        if name and home and LEVEL[home.split(".")[0]] > LEVEL[name.split(".")[0]]:
            upward.append(f"{name} imports {target}")
    assert upward == []


def test_no_cycles_at_import_time():
    edges: dict[str, set[str]] = {name: set() for name in modules()}
    for name, target, lazy in all_imports():
        home = internal(target)
        # Importing a submodule of one's own package never waits for that package's __init__ to end.
        if not lazy and home and home != name:
            edges[name].add(home)

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join([*trail[trail.index(name) :], name])}"
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*trail, name))
            done.add(name)

    done: set[str] = set()
    for name in edges:
        visit(name, ())


@pytest.mark.parametrize("library", CORNERS)
def test_outside_libraries_stay_in_their_corner(library):
    users = {name for name, target, _ in all_imports() if target.split(".")[0] == library}
    outside = {name for name in users if name.split(".")[0] != CORNERS[library]}
    assert outside == set()


def test_the_package_and_its_hooks_import_nothing_heavy_at_first():
    eager = {
        (name, target.split(".")[0])
        for name, target, lazy in all_imports()
        if not lazy and name in ("", "hf", "hf.autoload")
    }
    assert {library for _, library in eager} <= {
        "__future__",
        "collections",
        "forge_hf",
        "importlib",
        "sys",
        "typing",
    }
    ours = {
        internal(target)
        for name, target, lazy in all_imports()
        if not lazy and name in ("", "hf", "hf.autoload")
    }
    assert ours - {None} == {"hf.autoload"}


def test_forge_hf_works_without_transformers():
    code = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "accelerate", "triton"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
sys.meta_path.insert(0, Blocked())
import forge_hf
first = sorted({"torch", "transformers", "accelerate", "triton", "wrapt", "numpy"} & set(sys.modules))
import torch
model = torch.nn.Linear(3, 2)
optimizer = forge_hf.ForgeAdamW(model, lr=0.1)
before = model.weight.detach().clone()
model(torch.ones(4, 3)).sum().backward()
optimizer.step()
moved = (model.weight - before).abs().max().item()
print(json.dumps([first, moved, sorted({"transformers", "accelerate", "triton"} & set(sys.modules))]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, moved, later = json.loads(done.stdout)
    assert first == [] and later == []
    assert moved == pytest.approx(
        0.1, rel=1e-2
    )  # Adam's first step has the size of lr, but for the weight decay


def test_every_public_name_resolves():
    for name in forge_hf.__all__:
        assert getattr(forge_hf, name).__name__ == name
    assert set(forge_hf.__all__) <= set(dir(forge_hf))
    with pytest.raises(AttributeError, match="no attribute 'ForgeAdam'"):
        _ = forge_hf.ForgeAdam


def test_every_module_declares_its_public_names():
    for name in modules():
        if name.split(".")[0] in ("kernels", "distributed", "cli"):
            continue
        module = importlib.import_module(f"forge_hf.{name}" if name else "forge_hf")
        missing = [public for public in getattr(module, "__all__", ()) if not hasattr(module, public)]
        assert missing == [], name
