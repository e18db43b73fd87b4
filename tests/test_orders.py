"""Random legal orders of everything a loop may call, against plain torch AdamW."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_hf import ForgeAdamW, ForgeSGD

from .models import EVERY_MODEL, build, loss_of, way_off
from .tolerances import NORM_FP32, WAY_FP32_SMALL

CALLS = [
    "backward",
    "backward",
    "backward",
    "clip",
    "step",
    "zero_grad",
    "zeros",
    "state_dict",
    "evaluate",
    "forward",
    "group",
]


class Loop:
    """One side of the comparison."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.norms: list[float] = []

    def call(self, name: str, seed: int) -> None:
        """Do one thing; `seed` makes both sides draw the same data."""
        if name == "backward":
            loss_of(self.model, seed).backward()
        elif name == "forward":
            loss_of(self.model, seed)
        elif name == "evaluate":
            self.model.eval()
            with torch.no_grad():
                loss_of(self.model, seed)
            self.model.train()
        elif name == "clip":
            self.norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1).item())
        elif name == "step":
            self.optimizer.step()
        elif name == "zero_grad":
            (self.model if seed % 2 else self.optimizer).zero_grad()
        elif name == "zeros":
            self.optimizer.zero_grad(set_to_none=False)
        elif name == "state_dict":
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        elif name == "group":
            self.optimizer.param_groups[0]["lr"] *= 0.7


def legal(calls: list[str]) -> list[tuple[str, int]]:
    """Leave out what is refused on purpose: a step or backward after a step that no zero_grad separates."""
    result, stepped = [], False
    for seed, name in enumerate(calls):
        if stepped and name in ("backward", "step", "clip"):
            result.append(("zero_grad", seed))
            stepped = False
        if name == "step":
            stepped = True
        elif name in ("zero_grad", "zeros"):
            stepped = False
        result.append((name, seed))
    return [("backward", 999), *result, ("zero_grad", 1), ("backward", 998), ("step", 0)]


def compare(kind: Any, calls: list[tuple[str, int]], sgd: bool, **options: Any) -> None:
    model, reference = build(kind), build(kind)
    if sgd:
        loops = (
            Loop(model, ForgeSGD(model, lr=0.1, momentum=0.9, **options)),
            Loop(reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)),
        )
    else:
        loops = (
            Loop(model, ForgeAdamW(model, lr=1e-2, **options)),
            Loop(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2)),
        )
    for name, seed in calls:
        for loop in loops:
            loop.call(name, seed)
    ours, theirs = loops
    assert ours.norms == pytest.approx(theirs.norms, rel=10 * NORM_FP32)
    assert way_off(model, reference, build(kind)) < WAY_FP32_SMALL


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(EVERY_MODEL), st.lists(st.sampled_from(CALLS), min_size=3, max_size=14), st.booleans())
def test_any_order_in_step_mode(kind, calls, sgd):
    compare(kind, legal(calls), sgd)


def one_backward_per_step(calls: list[str]) -> list[tuple[str, int]]:
    """In backward mode a gradient is applied at once: forward, backward, step and zero_grad stay together."""
    result: list[tuple[str, int]] = []
    for seed, name in enumerate(calls):
        if name == "backward":
            result += [(name, seed), ("step", seed), ("zero_grad", seed)]
        elif name in ("state_dict", "evaluate", "forward", "group"):
            result.append((name, seed))
    return [("backward", 999), ("step", 0), ("zero_grad", 1), *result]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([kind for kind in EVERY_MODEL if kind.__name__ != "Outside"]),
    st.lists(st.sampled_from(CALLS), min_size=3, max_size=14),
    st.booleans(),
)
def test_any_order_in_backward_mode(kind, calls, sgd):
    compare(kind, one_backward_per_step(calls), sgd, update="backward")
