"""Update rules by name: which moments they keep, their defaults and the valid range of each.

The arithmetic itself is written once per backend (`reference.py`, `kernels/rules.py`); this file knows only
what a rule needs, so that optimizer, state and checkpoints treat all rules alike.

    adamw  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  w = w (1 - lr wd) - lr (m/c1) / (sqrt(v/c2) + eps)
    lion   u = sign(b1 m + (1-b1) g);  m = b2 m + (1-b2) g;  w = w (1 - lr wd) - lr u
    sgd    d = g + wd w;  b = mu b + d;  w = w - lr (d + mu b if nesterov else b)

Sources: Loshchilov and Hutter 2019 (AdamW, as in torch.optim.AdamW), Chen et al. 2023 (Lion),
torch.optim.SGD.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import ForgeConfigError
from .scalars import StepScalars

__all__ = ["ADAMW", "LION", "RULES", "SGD", "Rule"]


@dataclass(frozen=True)
class Rule:
    """An element-wise update rule.

    Attributes:
        name: "adamw", "lion" or "sgd"; the backends dispatch on it.
        defaults: Group defaults, with torch's names.
        fixed: Group keys of torch's own optimizer that are stored for interchange and must keep this value.
        options: Names that `optim_args` may set for this rule, with their kind.
    """

    name: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    options: Mapping[str, str]

    def moment_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """State keys of the moments, in the order in which the backends take them."""
        if self.name == "adamw":
            return ("exp_avg", "exp_avg_sq")
        if self.name == "lion":
            return ("exp_avg",)
        return ("momentum_buffer",) if group["momentum"] else ()

    def scalars(self, group: Mapping[str, Any], step: int) -> StepScalars:
        """Numbers of update number `step` (1 is the first) under `group`'s settings."""
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        if self.name == "sgd":
            return StepScalars(
                lr=lr,
                weight_decay=weight_decay,
                momentum=float(group["momentum"]),
                nesterov=bool(group["nesterov"]),
            )
        beta1, beta2 = (float(beta) for beta in group["betas"])
        if self.name == "lion":
            return StepScalars(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay)
        return StepScalars(
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            weight_decay=weight_decay,
            bias_correction1=1.0 - beta1**step,
            bias_correction2_sqrt=math.sqrt(1.0 - beta2**step),
        )

    def validate(self, group: Mapping[str, Any]) -> None:
        """Check one param group.

        Raises:
            ForgeConfigError: a value is out of range or an option of torch's optimizer is not supported.
        """
        _in_range("lr", group["lr"], 0.0, math.inf)
        _in_range("weight_decay", group["weight_decay"], 0.0, math.inf)
        betas = group.get("betas", (0.0, 0.0))
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ForgeConfigError(f"betas={betas!r} is not a pair of numbers.")
        for index, beta in enumerate(betas):
            _in_range(f"betas[{index}]", beta, 0.0, 1.0, open_end=True)
        if "eps" in group:
            _in_range("eps", group["eps"], 0.0, math.inf)
        if "momentum" in group:
            _in_range("momentum", group["momentum"], 0.0, math.inf)
            if group["nesterov"] and not group["momentum"]:
                raise ForgeConfigError("nesterov=True needs a momentum above 0.")
        for key, value in self.fixed.items():
            if key in group and bool(group[key]) != bool(value) and key not in _HARMLESS:
                raise ForgeConfigError(f"{key}={group[key]!r} is not supported. Fix: leave it at {value!r}.")


# How torch runs its kernels, not what they compute; a checkpoint may carry any value.
_HARMLESS = {"foreach", "capturable", "fused"}


def _in_range(name: str, value: Any, low: float, high: float, open_end: bool = False) -> None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ForgeConfigError(f"{name}={value!r} is not a number.") from None
    if not (low <= number < high if open_end else low <= number <= high) or math.isinf(number):
        raise ForgeConfigError(f"{name}={value!r} is out of range [{low}, {high}{')' if open_end else ']'}.")


ADAMW = Rule(
    name="adamw",
    defaults={"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    # torch.optim.AdamW takes a missing `decoupled_weight_decay` for Adam's L2 decay, so a checkpoint must
    # carry it.
    fixed={
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    },
    options={},
)
LION = Rule(
    name="lion",
    defaults={"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    fixed={},
    options={},
)
SGD = Rule(
    name="sgd",
    defaults={"lr": 1e-3, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    fixed={"dampening": 0, "maximize": False, "foreach": None, "differentiable": False, "fused": None},
    options={"momentum": "float", "nesterov": "bool"},
)
RULES: dict[str, Rule] = {rule.name: rule for rule in (ADAMW, LION, SGD)}
