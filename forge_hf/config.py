"""Options of the optimizers, read strictly, and the sentence of every refusal.

Everything a user can set reaches the engine as one frozen `ForgeConfig`. Unknown names, wrong types and
values out of range are errors that name the nearest valid spelling, because an option that is silently
ignored trains a different model than the one asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .refusals import REFUSALS, ForgeRefusal, refuse

__all__ = ["REFUSALS", "ForgeConfig", "ForgeConfigError", "ForgeRefusal", "parse_optim_args", "refuse"]


class ForgeConfigError(ValueError):
    """An option is unknown, has the wrong type, or is out of range."""


#: Settings that have their own arguments, and where.
_ELSEWHERE = {
    "lr": "learning_rate",
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "betas": "adam_beta1 and adam_beta2",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_epsilon",
    "max_grad_norm": "max_grad_norm",
}


def _nearest(name: str, valid: list[str]) -> str:
    if name in _ELSEWHERE:
        return f"it is an argument of its own (in TrainingArguments: {_ELSEWHERE[name]})."
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}Valid: {', '.join(valid)}."


def _to_bool(value: Any) -> bool:
    """Read a boolean as people write it; unlike `bool`, "False" is false."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in {"true", "1", "yes", "on"}:
        return True
    if text in {"false", "0", "no", "off"}:
        return False
    raise ValueError("expected true or false")


_READERS: dict[str, Callable[[Any], Any]] = {"bool": _to_bool, "int": int, "float": float, "str": str}


def _read(name: str, value: Any, kind: str) -> Any:
    if kind != "bool" and isinstance(value, bool):
        raise ForgeConfigError(f"Option {name}={value!r} is not a valid {kind}.")
    if kind == "int" and isinstance(value, float):
        raise ForgeConfigError(f"Option {name}={value!r} is not a valid int.")
    try:
        return _READERS[kind](value)
    except (TypeError, ValueError) as error:
        raise ForgeConfigError(f"Option {name}={value!r} is not a valid {kind}: {error}.") from None


def parse_optim_args(optim_args: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Split `"update=step, state=bf16"` into a dict; values stay text.

    Raises:
        ForgeConfigError: an entry is not `name=value`, or a name is given twice.
    """
    if optim_args is None:
        return {}
    if isinstance(optim_args, Mapping):
        return dict(optim_args)
    result: dict[str, Any] = {}
    for entry in filter(None, (part.strip() for part in optim_args.split(","))):
        name, equals, value = (piece.strip() for piece in entry.partition("="))
        if not (name and equals and value):
            raise ForgeConfigError(
                f"optim_args entry '{entry}' is not of the form name=value. "
                "Fix: separate options by commas, as in 'update=step,state=bf16'."
            )
        if name in result:
            raise ForgeConfigError(f"optim_args gives '{name}' twice.")
        result[name] = value
    return result


_CHOICES: dict[str, tuple[Any, ...]] = {
    "update": ("auto", "backward", "step"),
    "clip": ("exact", "lagged"),
    "state": ("auto", "fp32", "bf16", "8bit"),
    "weight_bits": (16, 24, 32),
    "rounding": ("stochastic", "nearest"),
    "nonfinite": ("propagate", "skip", "raise"),
}


@dataclass(frozen=True)
class ForgeConfig:
    """How an optimizer stores, rounds and times its updates.

    Attributes:
        update: When a weight is updated: "backward" (as soon as its gradient is complete), "step" (in
            `optimizer.step()`), or "auto": in the Trainer "backward" when nothing has to see all gradients
            first, else "step"; "step" in loops of your own.
        clip: "exact", or "lagged" (only with `update="backward"`): the clip coefficient of the previous step.
        state: Storage of the moments: "fp32", "bf16", "8bit" (one byte and a 64th per element; tensors under
            4,096 elements stay fp32), or "auto": fp32 for fp32 weights, bf16 for 16-bit weights.
        rounding: How 8- and 16-bit moments and 16-bit weights are stored: "stochastic" or "nearest".
        seed: Seed of stochastic rounding, an integer in [0, 2**32).
        weight_bits: Bits kept of a bf16 weight: 16, or 24 or 32, which the optimizer's state then holds one
            or two more bytes per element for; 32 trains as fp32 weights do. fp32 weights are what they are.
        nonfinite: What `step()` does when the norm of all gradients is not finite: "propagate" (as torch),
            "skip" the update and count it, or "raise". The last two read the norm on the host.
        log_memory: Whether the Trainer's logs get the memory keys of `ForgeMemoryCallback`.

    Raises:
        ForgeConfigError: a value has the wrong type or is out of range, or two values contradict each other.
    """

    update: str = "auto"
    clip: str = "exact"
    state: str = "auto"
    rounding: str = "stochastic"
    seed: int = 0
    weight_bits: int = 16
    nonfinite: str = "propagate"
    log_memory: bool = True

    def __post_init__(self) -> None:
        """Read and check every field."""
        for field in fields(self):
            value = _read(field.name, getattr(self, field.name), str(field.type))
            object.__setattr__(self, field.name, value)
            choices = _CHOICES.get(field.name)
            if choices and value not in choices:
                hint = _nearest(str(value), list(map(str, choices)))
                raise ForgeConfigError(f"Option {field.name}='{value}' is unknown; {hint}")
        if not 0 <= self.seed < 2**32:
            raise ForgeConfigError(f"Option seed={self.seed} is outside [0, 2**32).")
        if self.state == "8bit" and self.rounding == "nearest":
            raise ForgeConfigError(
                "Option state='8bit' needs rounding='stochastic': most steps move a moment by less than half "
                "of the distance between two codes, so rounding to the nearest would freeze it."
            )
        if self.nonfinite != "propagate" and self.update == "backward":
            raise ForgeConfigError(
                f"Option nonfinite='{self.nonfinite}' needs update='step': in backward the first weights are "
                "updated before the last gradients are known."
            )
        if self.clip == "lagged" and self.update != "backward":
            raise ForgeConfigError(
                "Option clip='lagged' belongs to update='backward'; with update='step' clipping is exact."
            )

    @classmethod
    def from_options(
        cls, options: str | Mapping[str, Any] | None, extra: Mapping[str, str] | None = None
    ) -> tuple[ForgeConfig, dict[str, Any]]:
        """Read options (text as in `optim_args`, or a mapping) strictly.

        Args:
            options: The options.
            extra: Names that the update rule takes besides, with their kind ("int", "float", "bool", "str"),
                such as `{"momentum": "float"}`.

        Returns:
            The config, and the values of the `extra` names that were given.

        Raises:
            ForgeConfigError: unknown name (the message gives the nearest valid one), wrong type or value.
        """
        extra = dict(extra or {})
        given = parse_optim_args(options)
        own = {field.name: str(field.type) for field in fields(cls)}
        config: dict[str, Any] = {}
        rule_options: dict[str, Any] = {}
        for name, value in given.items():
            if name in own:
                config[name] = _read(name, value, own[name])
            elif name in extra:
                rule_options[name] = _read(name, value, extra[name])
            else:
                raise ForgeConfigError(f"Unknown option '{name}'; {_nearest(name, [*own, *extra])}")
        return cls(**config), rule_options
