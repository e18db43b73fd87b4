"""The only file that touches transformers' privates: makes `optim="forge_adamw"` a name like any other.

    transformers.training_args  OptimizerNames gets our members
    transformers.trainer        Trainer.get_optimizer_cls_and_kwargs (static) answers for our names
                                Trainer.train refuses before DeepSpeed can swap the optimizer silently,
                                resumes from complete checkpoints only, and gets our callback

Checked with transformers 5.0.0, 5.17.0 and 5.24.0. A layout that does not fit is remembered, and raised when
one of our names is asked for, never when transformers is imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

from ..config import refuse

__all__ = [
    "FORGE_OPTIMIZERS",
    "add_enum_member",
    "extend_trainer",
    "extend_training_args",
    "forge_name",
    "require_layout",
]

#: Value of `optim` -> name of the public class, and the options that the name stands for.
FORGE_OPTIMIZERS: dict[str, tuple[str, dict[str, str]]] = {
    "forge_adamw": ("ForgeAdamW", {}),
    "forge_adamw_8bit": ("ForgeAdamW", {"state": "8bit"}),
    "forge_lion": ("ForgeLion", {}),
    "forge_lion_8bit": ("ForgeLion", {"state": "8bit"}),
    "forge_sgd": ("ForgeSGD", {}),
    # transformers' own names; theirs need galore_torch and the dense gradient
    "galore_adamw": ("ForgeGaLoreAdamW", {}),
    "galore_adamw_8bit": ("ForgeGaLoreAdamW", {"state": "8bit"}),
    "galore_adamw_layerwise": ("ForgeGaLoreAdamW", {}),
    "galore_adamw_8bit_layerwise": ("ForgeGaLoreAdamW", {"state": "8bit"}),
}
_SUPPORTED = "5.0.0 to 5.24.0 are tested"

_problems: list[str] = []


def forge_name(optim: Any) -> str | None:
    """`optim`, a string or an OptimizerNames member, as text if it is one of ours, else None."""
    # An Enum member hashes by its name, so it finds no string key although it equals the string.
    name = str(getattr(optim, "value", optim))
    return name if name in FORGE_OPTIMIZERS else None


def require_layout() -> None:
    """Raise the remembered problem, if any.

    Raises:
        ForgeRefusal: this transformers could not be extended.
    """
    if _problems:
        version = getattr(sys.modules.get("transformers"), "__version__", "of unknown version")
        raise refuse("layout", version=version, problem="; ".join(_problems), supported=_SUPPORTED)


def add_enum_member(enum: type[Enum], name: str, value: str) -> Enum:
    """Add a member to a str-valued Enum (Python 3.10 to 3.13); an existing value is returned as it is.

    Raises:
        TypeError: `enum` is not a str-valued Enum.
    """
    if not (isinstance(enum, type) and issubclass(enum, Enum) and issubclass(enum, str)):
        raise TypeError(f"{enum!r} is not a string Enum")
    known = enum._value2member_map_.get(value)
    if known is not None:
        return known
    member: Any = str.__new__(enum, value)
    member._name_, member._value_, member.__objclass__ = name, value, enum
    member._sort_order_ = len(enum._member_names_)
    enum._member_names_.append(name)
    enum._member_map_[name] = member
    enum._value2member_map_[value] = member
    # Python 3.12 and newer answer `value in enum` from this list.
    hashable = getattr(enum, "_hashable_values_", None)
    if hashable is not None:
        hashable.append(value)
    # EnumType.__setattr__ refuses to set members.
    type.__setattr__(enum, name, member)
    if enum(value) is not member or enum[name] is not member:
        raise TypeError(f"{enum!r} did not take the member {name}")
    return member


def extend_training_args(module: Any) -> None:
    """Post-import hook of `transformers.training_args`; never raises."""
    try:
        for value in FORGE_OPTIMIZERS:
            add_enum_member(module.OptimizerNames, value.upper(), value)
    except Exception as error:
        _remember(f"OptimizerNames cannot be extended ({_describe(error)})")


def extend_trainer(module: Any) -> None:
    """Post-import hook of `transformers.trainer`; never raises."""
    trainer: Any = getattr(module, "Trainer", None)
    try:
        original = vars(module.Trainer)["get_optimizer_cls_and_kwargs"]
        if not isinstance(original, staticmethod):
            raise TypeError("it is no static method")
        if not hasattr(original.__func__, "_forge_hf"):
            trainer.get_optimizer_cls_and_kwargs = staticmethod(_answering(original.__func__))
    except Exception as error:
        _remember(f"Trainer.get_optimizer_cls_and_kwargs cannot be extended ({_describe(error)})")
    train = getattr(trainer, "train", None)
    if train is not None and not hasattr(train, "_forge_hf"):
        trainer.train = _checking(train)


def _answering(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        name = forge_name(args.optim)
        if name is None:
            return original(args, model)
        from .settings import optimizer_class_and_kwargs

        return optimizer_class_and_kwargs(name, *FORGE_OPTIMIZERS[name], args, model)

    get_optimizer_cls_and_kwargs._forge_hf = True  # type: ignore[attr-defined]
    return get_optimizer_cls_and_kwargs


def _checking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        if forge_name(self.args.optim):
            from .memory import follow
            from .resume import complete_checkpoint
            from .settings import refuse_environment

            if self.optimizer is None:
                require_layout()
                refuse_environment(self.args)
            follow(self)
            if args:
                args = (complete_checkpoint(args[0], self.args.output_dir), *args[1:])
            elif "resume_from_checkpoint" in kwargs:
                resume = kwargs["resume_from_checkpoint"]
                kwargs["resume_from_checkpoint"] = complete_checkpoint(resume, self.args.output_dir)
        return original(self, *args, **kwargs)

    train._forge_hf = True  # type: ignore[attr-defined]
    return train


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _remember(problem: str) -> None:
    """Keep the problem, and raise it from TrainingArguments when one of our names is asked for."""
    if problem not in _problems:
        _problems.append(problem)
    arguments = getattr(sys.modules.get("transformers.training_args"), "TrainingArguments", None)
    original = getattr(arguments, "__post_init__", None)
    if original is None or hasattr(original, "_forge_hf"):
        return

    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if forge_name(getattr(self, "optim", None)):
            require_layout()
        return original(self, *args, **kwargs)

    __post_init__._forge_hf = True  # type: ignore[attr-defined]
    arguments.__post_init__ = __post_init__  # type: ignore[union-attr]
