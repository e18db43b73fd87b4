"""The tape: what the weights of one optimizer share between forward and step.

It says when a complete gradient may be consumed (mode, accumulation, lagged clipping), watches every backward
for an exception, and keeps the marks of a step that was interrupted. Each weight's own part is in `slot.py`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .config import refuse
from .scalars import StepScalars
from .slot import WeightSlot

__all__ = ["Tape", "set_last_micro_batch_probe"]


def _always_last() -> bool:
    return True


_last_micro_batch: Callable[[], bool] = _always_last


def set_last_micro_batch_probe(probe: Callable[[], bool]) -> None:
    """Set the function that says whether the running micro-batch is the last of its accumulation group."""
    global _last_micro_batch
    _last_micro_batch = probe


class Tape:
    """State that all weights of one optimizer share.

    Args:
        owner: The optimizer. Held weakly, so that a model does not keep a dropped optimizer alive.
        consume: Called as `consume(owner, slot)` when a slot's gradient is complete in `backward` mode.
        finish: Called as `finish(owner, completed)` when the last running backward has ended or one has
            failed: to run or to forget the updates that `consume` has put off.
        settle: Called as `settle(owner, slot)` when the uses of one forward have all come back and the
            gradient stays: to hold it in a smaller form.

    Attributes:
        owner: Returns the optimizer, or None when it is gone.
        backward_mode: Whether gradients are consumed in backward (else in `step()`).
        lagged: Whether clipping uses the coefficient of the previous step.
        lagged_coefficient: That coefficient (0-d fp32), or None before the first clipping, which is exact.
        partial: A backward or step was interrupted and its gradients were dropped.
        interrupted: Sentence of an update that was interrupted halfway, or None.
        hold_depth: Above 0 inside `no_sync()`.
        lost: Names of weights that another optimizer took over.
        settings: Numbers of each param group that updates in this step's backward used, by its index.
        scalars: Numbers of this step's updates: by index of the group, by count of the update.
    """

    def __init__(
        self,
        owner: Any,
        consume: Callable[[Any, WeightSlot], None],
        finish: Callable[[Any, bool], None],
        settle: Callable[[Any, WeightSlot], None],
    ) -> None:
        self.owner: Callable[[], Any] = weakref.ref(owner)
        self._consume = consume
        self._finish = finish
        self._settle = settle
        self.slots: list[WeightSlot] = []
        self.backward_mode = False
        self.lagged = False
        self.lagged_coefficient: Tensor | None = None
        self.partial = False
        self.interrupted: Exception | None = None
        self.hold_depth = 0
        self.lost: list[str] = []
        self.settings: dict[int, StepScalars] = {}
        self.scalars: defaultdict[int, dict[int, StepScalars]] = defaultdict(dict)
        self._held_outputs: set[int] = set()
        self._copies: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self._open_tasks: set[int] = set()

    def consumes_now(self) -> bool:
        """Whether a complete gradient is to be consumed at this point of backward."""
        if not self.backward_mode or (self.lagged and self.lagged_coefficient is None):
            return False
        return self.in_last_micro_batch()

    def in_last_micro_batch(self) -> bool:
        """Whether this backward is the last of its step, as far as accelerate and `no_sync` say."""
        return self.hold_depth == 0 and _last_micro_batch()

    def exchange_lagged(self, coefficient: Tensor) -> Tensor:
        """Keep this step's clip coefficient for the next one; returns the one that this step uses."""
        current = coefficient if self.lagged_coefficient is None else self.lagged_coefficient
        self.lagged_coefficient = coefficient
        return current

    def consume(self, slot: WeightSlot) -> None:
        """Update `slot`'s weight."""
        owner = self.owner()
        if owner is not None:
            self._consume(owner, slot)

    def settle(self, slot: WeightSlot) -> None:
        """Let the optimizer hold `slot`'s gradient in a smaller form."""
        owner = self.owner()
        if owner is not None:
            self._settle(owner, slot)

    def enter_backward(self) -> None:
        """Watch the running backward: if it ends by an exception, its partial gradients are dropped.

        Raises:
            ForgeRefusal: an earlier update was interrupted halfway.
        """
        if self.interrupted is not None:
            raise self.interrupted
        task = torch._C._current_graph_task_id()
        if task not in self._open_tasks:
            self._open_tasks.add(task)
            guard = _BackwardGuard(self, task)
            torch.autograd.Variable._execution_engine.queue_callback(guard)

    def leave_backward(self, task: int, completed: bool) -> None:
        """The backward `task` has ended."""
        self._open_tasks.discard(task)
        self._copies.clear()
        owner = self.owner()
        if completed:
            try:
                if owner is not None and not self._open_tasks:
                    self._finish(owner, True)
            except BaseException:
                self._fail()
                raise
            self._unshare()
            return
        if owner is not None:
            self._finish(owner, False)
        self._fail()

    def _fail(self) -> None:
        """Drop the gradients of a backward that failed, and remember whether it had begun to update."""
        self._held_outputs.clear()
        updated = sum(slot.updated for slot in self.slots)
        if updated:
            self.interrupted = refuse("interrupted_backward", updated=updated, total=len(self.slots))
        self.discard()
        self.partial = True

    def note_held(self, dy_TN: Tensor) -> None:
        """Remember, until this backward ends, the memory of an output gradient that a slot keeps."""
        self._held_outputs.add(dy_TN.untyped_storage().data_ptr())

    def own_copy(self, x_TK: Tensor) -> Tensor:
        """Copy an input that its owner may overwrite; layers that read it in one backward share the copy."""
        key = (x_TK.data_ptr(), x_TK.shape, x_TK.stride(), x_TK.dtype, x_TK.device)
        if key not in self._copies:
            # The original stays referenced, so that nothing else can come to its address.
            self._copies[key] = (x_TK, x_TK.clone())
        return self._copies[key][1]

    def _unshare(self) -> None:
        """Copy each `.grad` that autograd made of memory that a pair keeps (y = linear(x) + view of b).

        Autograd takes a gradient over without a copy when nobody else has the tensor; it does not ask who has
        the memory. Clipping and the next micro-batch write into `.grad`.
        """
        held, self._held_outputs = self._held_outputs, set()
        for group in getattr(self.owner(), "param_groups", ()) if held else ():
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None or grad.layout is not torch.strided:
                    continue
                if grad.untyped_storage().data_ptr() in held:
                    parameter.grad = grad.clone()

    def discard(self) -> None:
        """Drop all pending gradients; nothing is owed any more."""
        for slot in self.slots:
            slot.discard()
        self.partial = False
        self.forget_settings()

    def zero_grad(self, slots: list[WeightSlot], set_to_none: bool) -> None:
        """Drop or zero the gradients of `slots`, as `zero_grad()` of a module or of the optimizer asks.

        Raises:
            ForgeRefusal: a gradient that is to be dropped was already applied in backward.
        """
        applied = sum(slot.updated for slot in slots)
        for slot in slots:
            slot.discard(set_to_none)
        self.partial = False
        if applied:
            self.interrupted = refuse("update_discarded", updated=applied, total=len(self.slots))
            raise self.interrupted

    def end_step(self) -> None:
        """Close the step: gradients are gone, and adding to them without `zero_grad()` is an error."""
        self.forget_settings()
        for slot in self.slots:
            slot.end_step()

    def forget_settings(self) -> None:
        """The next update is one of another step."""
        self.settings.clear()
        self.scalars.clear()

    def require_usable(self) -> None:
        """Check that what is pending may be used.

        Raises:
            ForgeRefusal: a backward or step was interrupted, or another optimizer took weights over.
        """
        if self.interrupted is not None:
            raise self.interrupted
        if self.partial:
            raise refuse("partial_gradient")
        if self.lost:
            raise refuse("duplicate_owner", param=self.lost[0])

    def held_bytes(self) -> int:
        """Bytes of pairs and dense buffers pending now; a storage that weights share counts once."""
        storages: dict[int, int] = {}
        for slot in self.slots:
            if slot.gradient is not None:
                storages.update(slot.gradient.storages())
        return sum(storages.values())


class _BackwardGuard:
    """Callback at the end of a backward; destroyed without a call when the backward fails."""

    def __init__(self, tape: Tape, task: int) -> None:
        self._tape = tape
        self._task = task
        self._completed = False

    def __call__(self) -> None:
        self._completed = True
        self._tape.leave_backward(self._task, completed=True)

    def __del__(self) -> None:
        if not self._completed:
            self._tape.leave_backward(self._task, completed=False)
