"""Which weights of a model are projected: names as `optim_target_modules` has them, or a default.

    None, "all-linear"    every linear layer, but those that share an embedding or write to a vocabulary
    "regex"               modules whose whole name matches
    ["q_proj", "mlp"]     modules whose name contains one of the strings, or matches it as a regex

as in transformers. Named modules that hold no trainable matrix are reported; if none of them holds one, that
is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

from .config import refuse
from .layers import stock_class

__all__ = ["Targets", "find_targets"]

_LINEAR = ("all-linear", "all_linear")


class Targets(NamedTuple):
    """What was found.

    Attributes:
        weights: Names of the weights to project, by id(parameter).
        ignored: Why other parameters of named modules are not projected, by their name.
    """

    weights: dict[int, str]
    ignored: dict[str, str]


def find_targets(model: nn.Module, names: str | Iterable[str] | None) -> Targets:
    """Find the weights that `names` asks for.

    Raises:
        ForgeRefusal: nothing matches, or nothing that matches can be projected.
    """
    if names is None or (isinstance(names, str) and names in _LINEAR):
        found = Targets(_default(model), {})
        if not found.weights:
            raise refuse("no_targets", names="all-linear", why="no linear layer of the model is trained")
        return found
    wanted = names if isinstance(names, str) else [str(name) for name in names]
    found = Targets({}, {})
    matched = False
    for name, module in model.named_modules():
        if not _matches(name, wanted):
            continue
        matched = True
        _sort(name, module, found)
    if not found.weights:
        why = "no module has such a name"
        if matched:
            reasons = sorted(set(found.ignored.values())) or ["the modules hold no parameters themselves"]
            why = "; ".join(reasons)
        raise refuse("no_targets", names=wanted, why=why)
    return found


def _matches(name: str, wanted: str | list[str]) -> bool:
    if isinstance(wanted, str):
        return bool(name) and _fully_matches(wanted, name)
    return bool(name) and any(part in name or _fully_matches(part, name) for part in wanted)


def _fully_matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise refuse("no_targets", names=pattern, why=f"it is no regular expression: {error}") from error


def _sort(name: str, module: nn.Module, found: Targets) -> None:
    """Sort the parameters that `module` itself holds."""
    for key, parameter in module._parameters.items():
        if parameter is None or key == "bias":
            continue
        full = f"{name}.{key}"
        if not parameter.requires_grad:
            found.ignored[full] = "frozen"
        elif parameter.dim() != 2:
            found.ignored[full] = f"a {parameter.dim()}-d parameter of {stock_class(type(module)).__name__}"
        else:
            found.weights.setdefault(id(parameter), full)


def _default(model: nn.Module) -> dict[int, str]:
    """Weights of linear layers, without embeddings and what shares or feeds a vocabulary."""
    vocabulary = _of_vocabulary(model)
    weights: dict[int, str] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or not weight.requires_grad:
            continue
        cls = stock_class(type(module))
        if issubclass(cls, nn.Linear) or cls.__name__ == "Conv1D":
            if id(weight) not in vocabulary:
                weights.setdefault(id(weight), f"{name}.weight" if name else "weight")
    return weights


def _of_vocabulary(model: nn.Module) -> set[int]:
    """Ids of embeddings' weights, and of output layers with as many rows as an embedding."""
    tables: list[Tensor] = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    heads: list[Tensor] = []
    output = getattr(model, "get_output_embeddings", lambda: None)()
    written = output._parameters.get("weight") if isinstance(output, nn.Module) else None
    if written is not None:
        heads.append(written)
    sizes = {table.shape[0] for table in tables if table.shape[0] > max(table.shape[1], 1024)}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if isinstance(weight, nn.Parameter) and weight.dim() == 2 and weight.shape[0] in sizes:
            heads.append(weight)
    return {id(tensor) for tensor in [*tables, *heads]}
