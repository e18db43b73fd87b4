"""Which parameter takes which path: eligibility in order, class swap, detach, and the report.

    pair     weight of plain linear layers and embeddings: its gradient is consumed from (dY, X), (ids, dY)
    dense    any other trainable parameter: ordinary `.grad`
    frozen   not trained by this optimizer: untouched

Attaching keeps every Parameter object and state_dict key. Attaching again, or for another optimizer, replaces
the owner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .config import refuse
from .embedding import reads_through_super, why_not_plain
from .layers import plain_kinds, receiver_of, restore_class_, stock_class, swap_class_
from .slot import WeightSlot, live_slots, slot_of
from .tape import Tape

__all__ = [
    "PathEntry",
    "attach",
    "check_parameter",
    "detach",
    "plain_layers",
    "preview",
    "release",
    "revised",
]

_DDP_IGNORE = "_ddp_params_and_buffers_to_ignore"


@dataclass(frozen=True)
class PathEntry:
    """One line of the report.

    Attributes:
        name: Parameter name in the model.
        shape: Its shape.
        path: "pair", "dense" or "frozen".
        reason: Why, in plain words.
    """

    name: str
    shape: tuple[int, ...]
    path: str
    reason: str


def check_parameter(name: str, parameter: Tensor) -> None:
    """Refuse weights that cannot be trained here.

    Raises:
        ForgeRefusal: meta device, sparse, complex or unsupported dtype, not a leaf, sharded by FSDP, on XLA.
    """
    if type(parameter).__name__ in ("DTensor", "FlatParameter"):
        raise refuse("fsdp")
    if parameter.device.type == "xla":
        raise refuse("xla")
    if parameter.is_meta:
        raise refuse("meta", param=name)
    if parameter.layout is not torch.strided:
        raise refuse("sparse", param=name, layout=parameter.layout)
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise refuse("dtype", param=name, dtype=parameter.dtype)
    if not parameter.is_leaf:
        raise refuse("not_leaf", param=name)


def _owners(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """id(parameter) -> every (name, module) that holds it."""
    owners: dict[int, list[tuple[str, nn.Module]]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners[id(parameter)].append((f"{prefix}.{key}" if prefix else key, module))
    return owners


def _why_not_pair(parameter: nn.Parameter, holders: list[tuple[str, nn.Module]]) -> str | None:
    """Reason for the dense path, or None when the pair path is exact."""
    for name, module in holders:
        cls = stock_class(type(module))
        kind = next((stock for stock in plain_kinds() if issubclass(cls, stock)), None)
        if kind is None:
            if len(holders) > 1:
                return f"shared with {cls.__name__} '{name}'"
            return f"parameter of {cls.__name__}"
        key = name.rpartition(".")[2]
        if key != "weight":
            return "bias" if key == "bias" else f"not the weight that {cls.__name__} reads"
        if hasattr(module, "parametrizations"):
            return "parametrized"
        if "forward" in module.__dict__ or not _forward_is_known(cls, kind):
            return f"{cls.__name__} has a forward of its own"
        option = why_not_plain(module) if isinstance(module, nn.Embedding) else None
        if option is not None:
            return option
    if parameter.numel() == 0:
        return "empty"
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return "has gradient hooks"
    return None


def _forward_is_known(cls: type[nn.Module], kind: type[nn.Module]) -> bool:
    return cls.forward is kind.forward or (issubclass(cls, nn.Embedding) and reads_through_super(cls))


def _users(modules: list[nn.Module]) -> str:
    """Who reads a pair weight, for the report."""
    embeddings = sum(isinstance(module, nn.Embedding) for module in modules)
    counts = [(embeddings, "embedding"), (len(modules) - embeddings, "linear layer")]
    words = [f"{n} {what}s" if n > 1 else f"{n} {what}" for n, what in counts if n]
    if len(modules) == 1:
        return words[0].removeprefix("1 ")
    return words[0] if len(words) == 1 else f"tied: {' and '.join(words)}"


def plain_layers(model: nn.Module) -> list[tuple[nn.Parameter, list[nn.Module]]]:
    """Trained weights that the pair path would take, each with the layers that read it; changes nothing."""
    owners = _owners(model)
    return [
        (parameter, [module for _, module in owners[id(parameter)]])
        for parameter in model.parameters()
        if parameter.requires_grad and _why_not_pair(parameter, owners[id(parameter)]) is None
    ]


def preview(model: nn.Module) -> list[PathEntry]:
    """The report of attaching a model whose trainable parameters are all trained; nothing is changed.

    The model may be on the meta device.
    """
    owners = _owners(model)
    report = []
    for name, parameter in model.named_parameters():
        path, reason = "frozen", "requires_grad is False"
        if parameter.requires_grad:
            why = _why_not_pair(parameter, owners[id(parameter)])
            path = "pair" if why is None else "dense"
            reason = why or _users([module for _, module in owners[id(parameter)]])
        report.append(PathEntry(name, tuple(parameter.shape), path, reason))
    return report


def attach(
    model: nn.Module, parameters: Iterable[Tensor], tape: Tape
) -> tuple[dict[int, WeightSlot], list[PathEntry]]:
    """Swap the linear layers and embeddings of `model` whose weights are among `parameters`.

    Args:
        model: The model that will be trained.
        parameters: What the optimizer trains.
        tape: The tape of that optimizer.

    Returns:
        Slots by id(parameter), and the report for every parameter of the model.

    Raises:
        ForgeRefusal: nothing to swap, or a wrapper that cannot be entered.
    """
    _refuse_wrappers(model)
    trained = {id(parameter) for parameter in parameters}
    owners = _owners(model)
    slots: dict[int, WeightSlot] = {}
    report: list[PathEntry] = []
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if id(parameter) not in trained or not parameter.requires_grad:
            frozen = "not in the optimizer's groups" if parameter.requires_grad else "requires_grad is False"
            report.append(PathEntry(name, shape, "frozen", frozen))
            continue
        reason = _why_not_pair(parameter, owners[id(parameter)])
        if reason is not None:
            _release_slot(parameter, tape)
            report.append(PathEntry(name, shape, "dense", reason))
            continue
        modules = [module for _, module in owners[id(parameter)]]
        slots[id(parameter)] = _own(parameter, name, tape, modules)
        report.append(PathEntry(name, shape, "pair", _users(modules)))
    if not slots:
        raise refuse("no_linear", reason=_why_nothing(report))
    _hide_from_ddp(model, slots, report)
    return slots, report


def _own(parameter: nn.Parameter, name: str, tape: Tape, modules: list[nn.Module]) -> WeightSlot:
    slot = slot_of(parameter)
    if slot is None or slot.tape is not tape:
        _release_slot(parameter, tape)
        slot = WeightSlot(parameter, name, tape)
    for module in modules:
        swap_class_(module, slot)
    return slot


def _release_slot(parameter: Tensor, tape: Tape) -> None:
    slot = slot_of(parameter)
    if slot is None:
        return
    if slot.tape is tape:  # a hook or a parametrization came after the first time
        slot.hand_over()
    slot.revoke(taken_over=slot.tape is not tape)


def revised(model: nn.Module, report: list[PathEntry], slots: dict[int, WeightSlot]) -> list[PathEntry]:
    """A report of `attach`, with the weights that have moved to ordinary gradients since."""
    owners = _owners(model)
    parameters = {slot.name: slot.parameter for slot in slots.values()}
    entries = []
    for entry in report:
        parameter = parameters.get(entry.name) if entry.path == "pair" else None
        if parameter is not None:
            holders = owners.get(id(parameter))
            reason = _why_not_pair(parameter, holders) if holders else "no longer in the model"
            if reason is not None:
                entry = replace(entry, path="dense", reason=f"{reason}, before: {entry.reason}")
        entries.append(entry)
    return entries


def _why_nothing(report: list[PathEntry]) -> str:
    trained = [entry for entry in report if entry.path == "dense"]
    if not trained:
        return "every parameter is frozen or left out of the optimizer's groups"
    return f"{len(trained)} trained parameters, none of them the weight of a plain nn.Linear or nn.Embedding"


def _refuse_wrappers(model: nn.Module) -> None:
    if isinstance(model, nn.DataParallel):
        raise refuse("data_parallel")
    names = {type(module).__name__ for module in model.modules()}
    if "FullyShardedDataParallel" in names or any(name.startswith("FSDP") for name in names):
        raise refuse("fsdp")
    if "DeepSpeedEngine" in names:
        raise refuse("deepspeed")
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise refuse("ddp", world_size=distributed.get_world_size())


def _hide_from_ddp(model: nn.Module, slots: dict[int, WeightSlot], report: list[PathEntry]) -> None:
    """Hide pair weights from DistributedDataParallel's reducer, which would wait for their gradients.

    DDP reads the list when it wraps the model. It wants at least one parameter of its own, so the smallest
    weight of a model without dense parameters moves to the dense path.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if not any(entry.path == "dense" for entry in report):
        smallest = min(slots.values(), key=lambda slot: slot.parameter.numel())
        if len(slots) == 1:
            raise refuse("no_linear", reason="the only trained weight is left to DistributedDataParallel")
        index = next(i for i, entry in enumerate(report) if entry.name == smallest.name)
        report[index] = PathEntry(
            smallest.name,
            report[index].shape,
            "dense",
            "left to DistributedDataParallel, which needs a parameter",
        )
        del slots[id(smallest.parameter)]
        smallest.revoke(taken_over=False)
    hidden = [
        name for owned in _owners(model).values() for name, module in owned if _is_owned(name, module, slots)
    ]
    model.__dict__[_DDP_IGNORE] = hidden


def _is_owned(name: str, module: nn.Module, slots: dict[int, WeightSlot]) -> bool:
    return name.endswith("weight") and id(module._parameters.get("weight")) in slots


def release(parameters: Iterable[Tensor], taken_over: bool = True) -> None:
    """Take weights away from the forge_hf optimizer that owns them: their gradients go to `.grad` again.

    Args:
        parameters: Any parameters; those without an owner are skipped.
        taken_over: Another optimizer will train them, so the old one must refuse to step.
    """
    for slot in live_slots(list(parameters)):
        slot.revoke(taken_over)


def detach(model: nn.Module) -> None:
    """Restore the stock layers of `model`; its optimizer, if still used, then works on ordinary gradients."""
    for module in model.modules():
        receiver = receiver_of(module)
        if isinstance(receiver, WeightSlot):
            receiver.revoke(taken_over=False)
        restore_class_(module)
    model.__dict__.pop(_DDP_IGNORE, None)
