"""Checkpoints that do not fit raise, and change nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from forge_hf import ForgeAdamW, ForgeConfigError, ForgeLion, ForgeRefusal

from .models import build, loss_of, same_bits, snapshot, train


def bits(optimizer: Any) -> list[Any]:
    """Everything that `load_state_dict` may change, as values."""
    state = optimizer.state_dict()
    tensors = [
        (index, key, value.clone())
        for index, entry in sorted(state["state"].items())
        for key, value in entry.items()
    ]
    return [tensors, copy.deepcopy(state["param_groups"])]


def equal(first: list[Any], second: list[Any]) -> bool:
    same = first[1] == second[1] and len(first[0]) == len(second[0])
    return same and all(
        a[:2] == b[:2] and a[2].dtype == b[2].dtype and torch.equal(a[2], b[2])
        for a, b in zip(first[0], second[0], strict=True)
    )


def _shape(saved: Any) -> None:
    saved["state"][2]["exp_avg"] = torch.zeros(3, 3)


def _moment_missing(saved: Any) -> None:
    del saved["state"][3]["exp_avg_sq"]


def _step_missing(saved: Any) -> None:
    del saved["state"][0]["step"]


def _bad_step(saved: Any) -> None:
    saved["state"][5]["step"] = "seven"


def _negative_step(saved: Any) -> None:
    saved["state"][5]["step"] = torch.tensor(-3.0)


def _codes(saved: Any) -> None:
    saved["state"][0]["exp_avg"] = torch.zeros(24, 12, dtype=torch.uint8)


def _no_tensor(saved: Any) -> None:
    saved["state"][0]["exp_avg"] = 1.5


def _unknown_parameter(saved: Any) -> None:
    saved["state"][99] = saved["state"][0]


def _too_few(saved: Any) -> None:
    saved["param_groups"][0]["params"].pop()


def _one_group_more(saved: Any) -> None:
    saved["param_groups"].append({**saved["param_groups"][0], "params": []})


def _no_groups(saved: Any) -> None:
    del saved["param_groups"]


def _group_truncated(saved: Any) -> None:
    del saved["param_groups"][0]["betas"]


def _state_is_a_list(saved: Any) -> None:
    saved["state"] = [1, 2]


def _entry_is_a_number(saved: Any) -> None:
    saved["state"][4] = 5


def _amsgrad(saved: Any) -> None:
    saved["param_groups"][0]["amsgrad"] = True


def _bad_lr(saved: Any) -> None:
    saved["param_groups"][0]["lr"] = -1.0


BAD = {
    _shape: r"'exp_avg' of parameter 2 has shape \(3, 3\), the weight has \(24, 24\)",
    _moment_missing: r"holds \['exp_avg', 'step'\], but adamw needs \['exp_avg', 'exp_avg_sq', 'step'\]",
    _step_missing: "parameter 0 holds .* but adamw needs .*'step'",
    _bad_step: "step of parameter 5 is 'seven'",
    _negative_step: "step of parameter 5 is tensor",
    _codes: "'exp_avg' of parameter 0 has dtype torch.uint8",
    _no_tensor: "'exp_avg' of parameter 0 has shape float",
    _unknown_parameter: r"state for unknown parameters \['99'\]",
    _too_few: r"its groups hold \[6\] parameters, the model's \[7\]",
    _one_group_more: r"its groups hold \[7, 0\] parameters, the model's \[7\]",
    _no_groups: "it is not an optimizer's state_dict",
    _group_truncated: "its groups lack betas",
    _state_is_a_list: "it is not an optimizer's state_dict",
    _entry_is_a_number: "the state of parameter 4 is no dict",
    _amsgrad: "amsgrad=True is not supported",
    _bad_lr: "lr=-1.0 is out of range",
}


def refused(optimizer: Any, saved: Any, message: str) -> None:
    """Loading raises, and neither weights nor optimizer nor pending gradients change."""
    model = optimizer._model()
    loss_of(model, 5).backward()
    before, weights, pending = bits(optimizer), snapshot(model), optimizer.pending_bytes()
    with pytest.raises((ForgeRefusal, ForgeConfigError), match=message):
        optimizer.load_state_dict(saved)
    assert equal(bits(optimizer), before)
    assert same_bits(model, weights)
    assert optimizer.pending_bytes() == pending > 0


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__.strip("_"))
def test_bad_checkpoints_change_nothing(spoil):
    model = build()
    optimizer = ForgeAdamW(model)
    train(model, optimizer, steps=2)
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    refused(optimizer, saved, BAD[spoil])


@pytest.mark.parametrize("garbage", [None, 3, [], {}, {"state": {}}, {"state": {}, "param_groups": [None]}])
def test_garbage(garbage):
    model = build()
    refused(ForgeAdamW(model), garbage, "it is not an optimizer's state_dict")


@pytest.mark.parametrize(
    "theirs, message",
    [
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), "its groups lack betas, eps"),
        (lambda m: torch.optim.Adam(m.parameters()), "decoupled_weight_decay=False is not supported"),
        (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), "amsgrad=True is not supported"),
        (lambda m: torch.optim.AdamW(m.parameters(), maximize=True), "maximize=True is not supported"),
        (lambda m: torch.optim.RAdam(m.parameters()), "decoupled_weight_decay=False is not supported"),
        (lambda m: ForgeLion(m), "its groups lack eps"),
    ],
)
def test_checkpoints_of_other_optimizers(theirs, message):
    model, other = build(), build()
    optimizer = theirs(other)
    train(other, optimizer, steps=2)
    refused(ForgeAdamW(model), optimizer.state_dict(), message)
