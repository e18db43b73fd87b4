"""TrainingArguments -> optimizer class and its arguments, or the refusal of what cannot be done exactly."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from ..config import ForgeConfig, ForgeConfigError, parse_optim_args, refuse
from ..rules import Rule

__all__ = ["optimizer_class_and_kwargs", "refuse_environment", "resolve_update"]

_TRAINING_ARGUMENTS_BETAS = (0.9, 0.999)


def optimizer_class_and_kwargs(
    name: str, class_name: str, implied: dict[str, str], args: Any, model: Any
) -> tuple[type, dict[str, Any]]:
    """What `Trainer.get_optimizer_cls_and_kwargs` returns for `name`.

    Args:
        name: Value of `optim`.
        class_name: Public class that it means.
        implied: Options that the name stands for.
        args: The TrainingArguments.
        model: The model; it travels as `attach_to`, since the Trainer pops "model" and "params".

    Returns:
        The class, which takes the Trainer's param groups, and its keywords.

    Raises:
        ForgeConfigError: `optim_args` holds an unknown option or a value out of range, or contradicts `name`.
        ForgeRefusal: no model, or a setting that cannot be honoured exactly.
    """
    from .. import optim

    refuse_environment(args)
    cls = getattr(optim, class_name)
    if model is None:
        raise refuse("no_model", name=class_name)
    given = parse_optim_args(args.optim_args)
    for option, value in implied.items():
        if given.setdefault(option, value) != value:
            raise ForgeConfigError(
                f"optim='{name}' means {option}={value}, but optim_args says {option}={given[option]}. "
                f"Fix: optim='{name.removesuffix('_' + value)}' with that option, or leave the option out."
            )
    config, rule_options = ForgeConfig.from_options(given, cls.rule.options)
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    options["update"] = resolve_update(args, config)
    if _clips(args) and not rule_options.get("measure_norm", True):
        raise ForgeConfigError(
            f"optim_args has measure_norm=False, and max_grad_norm={args.max_grad_norm} clips by that norm. "
            "Fix: max_grad_norm=0, or leave measure_norm out."
        )
    return cls, {
        "lr": args.learning_rate,
        **_rule_arguments(cls.rule, args),
        **rule_options,
        **options,
        **_target_arguments(cls, name, args),
        "attach_to": model,
    }


def _rule_arguments(rule: Rule, args: Any) -> dict[str, Any]:
    """Betas and eps as far as the rule has them.

    Lion's own betas are (0.9, 0.99). TrainingArguments cannot tell "not given" from AdamW's defaults, so a
    beta that equals AdamW's default (0.9, 0.999) counts as not given and stays Lion's.
    """
    given = (args.adam_beta1, args.adam_beta2)
    if rule.name == "adamw":
        return {"betas": given, "eps": args.adam_epsilon}
    if rule.name == "lion":
        choices = zip(given, _TRAINING_ARGUMENTS_BETAS, rule.defaults["betas"], strict=True)
        return {"betas": tuple(own if beta == unset else beta for beta, unset, own in choices)}
    return {}


def _target_arguments(cls: type, name: str, args: Any) -> dict[str, Any]:
    """`optim_target_modules`, which only projecting optimizers have a use for.

    Raises:
        ForgeConfigError: another optimizer was given target modules.
    """
    targets = args.optim_target_modules
    if "rank" in cls.rule.options:  # type: ignore[attr-defined]
        return {"target_modules": targets}
    if targets is not None:
        raise ForgeConfigError(
            f"optim_target_modules={targets!r} has no meaning for optim='{name}', which trains every "
            "parameter that requires a gradient. Fix: leave it out, or use optim='galore_adamw'."
        )
    return {}


def resolve_update(args: Any, config: ForgeConfig) -> str:
    """Turn `update="auto"` into "backward" or "step", and refuse a "backward" that the arguments contradict.

    Raises:
        ForgeRefusal: `update="backward"` with exact clipping, an fp16 scaler, or auto_find_batch_size.
    """
    clips = _clips(args)
    scales = _mixed_precision(args) == "fp16"
    if config.update == "auto":
        looks = config.nonfinite != "propagate"
        return "step" if clips or scales or looks or args.auto_find_batch_size else "backward"
    if config.update == "backward":
        if clips and config.clip != "lagged":
            raise refuse("clip_in_backward", max_norm=args.max_grad_norm)
        if scales:
            raise refuse("scaler_in_backward")
        if args.auto_find_batch_size:
            raise refuse("retry_in_backward")
    return config.update


def _clips(args: Any) -> bool:
    return args.max_grad_norm is not None and 0 < args.max_grad_norm < math.inf


def _mixed_precision(args: Any) -> str:
    if args.fp16:
        return "fp16"
    if args.bf16:
        return "bf16"
    return getattr(args, "mixed_precision", None) or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def _set(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() in {"1", "true", "yes", "on", "y", "t"}


def refuse_environment(args: Any) -> None:
    """Refuse what owns the gradients or the step itself, by the arguments and by `accelerate launch`.

    Raises:
        ForgeRefusal: DeepSpeed, FSDP, SageMaker, XLA, torch_compile, DataParallel, or several processes.
    """
    if args.deepspeed or _set("ACCELERATE_USE_DEEPSPEED"):
        raise refuse("deepspeed")
    if args.fsdp or _set("ACCELERATE_USE_FSDP"):
        raise refuse("fsdp")
    mode = getattr(args.parallel_mode, "value", args.parallel_mode)
    if mode.startswith("sagemaker"):
        raise refuse("sagemaker")
    if mode == "tpu" or args.device.type == "xla":
        raise refuse("xla")
    if args.torch_compile or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise refuse("torch_compile")
    if args.n_gpu > 1:
        raise refuse("data_parallel")
    if args.world_size > 1:
        raise refuse("ddp", world_size=args.world_size)
