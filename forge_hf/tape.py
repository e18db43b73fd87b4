"""The tape: what every weight still owes between forward and step, and when its update may run.

A `WeightSlot` receives the pairs of one weight and counts its uses; the `Tape` holds what the slots of one optimizer
share: the mode, the interrupted-backward marks and the flags of the running step.

Counting: a use seen in forward is expected back in backward. In `backward` mode the update runs when the last expected
use has come back. Too high a count only delays the update to `step()`. An unexpected arrival is held until `step()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .config import refuse
from .gradient import FactoredGradient

__all__ = ["Tape", "WeightSlot", "live_slots", "set_last_micro_batch_probe", "slot_of"]


def _always_last() -> bool:
    return True


_last_micro_batch: Callable[[], bool] = _always_last

# id(parameter) -> slot; a slot lives as long as its module or its optimizer.
_SLOTS: weakref.WeakValueDictionary[int, WeightSlot] = weakref.WeakValueDictionary()


def set_last_micro_batch_probe(probe: Callable[[], bool]) -> None:
    """Set the function that says whether the running micro-batch is the last of its accumulation group."""
    global _last_micro_batch
    _last_micro_batch = probe


def slot_of(parameter: Tensor) -> WeightSlot | None:
    """The slot that receives `parameter`'s pairs, or None."""
    slot = _SLOTS.get(id(parameter))
    return slot if slot is not None and slot.parameter is parameter and slot.active() else None


def live_slots(parameters: Iterable[Tensor]) -> list[WeightSlot]:
    """The slots among `parameters`; fast when no model is attached."""
    if not _SLOTS:
        return []
    return [slot for slot in map(slot_of, parameters) if slot is not None]


class Tape:
    """State that all weights of one optimizer share.

    Args:
        consume: Called as `consume(slot)` when a slot's gradient is complete in `backward` mode. Held weakly when it is
            a bound method, so that a model does not keep a dropped optimizer alive.

    Attributes:
        backward_mode: Whether gradients are consumed in backward (else in `step()`).
        lagged: Whether clipping uses the coefficient of the previous step.
        lagged_coefficient: That coefficient (0-d fp32), or None before the first clipping, which is exact.
        partial: A backward or step was interrupted and its gradients were dropped.
        begun: An update of this step was started.
        interrupted: Sentence of an update that was interrupted halfway, or None.
        hold_depth: Above 0 inside `no_sync()`.
        lost: Names of weights that another optimizer took over.
    """

    def __init__(self, consume: Callable[[WeightSlot], None]) -> None:
        self._consume = weakref.WeakMethod(consume) if hasattr(consume, "__self__") else (lambda: consume)
        self.slots: list[WeightSlot] = []
        self.backward_mode = False
        self.lagged = False
        self.lagged_coefficient: Tensor | None = None
        self.partial = False
        self.begun = False
        self.interrupted: Exception | None = None
        self.hold_depth = 0
        self.lost: list[str] = []
        self._open_tasks: set[int] = set()

    def alive(self) -> bool:
        """Whether the optimizer still exists."""
        return self._consume() is not None

    def consumes_now(self) -> bool:
        """Whether a complete gradient is to be consumed at this point of backward."""
        if not self.backward_mode or (self.lagged and self.lagged_coefficient is None):
            return False
        return self.hold_depth == 0 and _last_micro_batch()

    def exchange_lagged(self, coefficient: Tensor) -> Tensor:
        """Keep this step's clip coefficient for the next one; returns the one that this step uses."""
        current = coefficient if self.lagged_coefficient is None else self.lagged_coefficient
        self.lagged_coefficient = coefficient
        return current

    def consume(self, slot: WeightSlot) -> None:
        """Update `slot`'s weight."""
        consume = self._consume()
        if consume is not None:
            consume(slot)

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
        if completed:
            return
        updated = sum(slot.updated for slot in self.slots)
        if updated:
            self.interrupted = refuse("interrupted_backward", updated=updated, total=len(self.slots))
        self.discard()
        self.partial = True

    def discard(self) -> None:
        """Drop all pending gradients; nothing is owed any more."""
        for slot in self.slots:
            slot.discard()
        self.partial = self.begun = False

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
        self.begun = False
        for slot in self.slots:
            slot.end_step()

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
        """Bytes of pairs and dense buffers that are pending now; storages shared between weights count once."""
        storages: dict[int, int] = {}
        for slot in self.slots:
            if slot.gradient is not None:
                storages.update(slot.gradient.storages())
        return sum(storages.values())


class _BackwardGuard:
    """Callback of autograd's engine at the end of a backward; destroyed without a call when the backward fails."""

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


class WeightSlot:
    """Receiver of one weight's pairs (see `layers.Receiver`).

    Args:
        parameter: The weight (N, K).
        name: Its name in the model.
        tape: The tape of its optimizer.

    Attributes:
        gradient: What is pending, or None.
        updated: Whether the weight was already updated in this step.
        norm_sq: Squared norm of the consumed gradient of this step (0-d fp32), or None.
        stale: The gradient was consumed and `zero_grad()` has not been called since.
    """

    def __init__(self, parameter: nn.Parameter, name: str, tape: Tape) -> None:
        self.parameter = parameter
        self.name = name
        self.tape = tape
        self.gradient: FactoredGradient | None = None
        self.updated = False
        self.norm_sq: Tensor | None = None
        self.stale = False
        self._expected = 0
        self._revoked = False
        tape.slots.append(self)
        _SLOTS[id(parameter)] = self

    def active(self) -> bool:
        """Whether an optimizer still wants this weight's pairs."""
        return not self._revoked and self.tape.alive()

    def expect(self) -> None:
        """Count a use seen in forward."""
        self._expected += 1

    def open_backward(self) -> None:
        """Refuse, before the weight is read, a gradient that comes too late.

        Raises:
            ForgeRefusal: the weight was already updated in this step, or the last gradient was never zeroed.
        """
        if self.active():
            self.tape.enter_backward()
            if self.updated:
                raise refuse("late_gradient", param=self.name)

    def receive(self, dy_TN: Tensor, x_TK: Tensor) -> None:
        """Add a pair; in `backward` mode consume the gradient when it is complete."""
        if self.stale:
            raise refuse("not_zeroed", param=self.name)
        self._expected -= 1
        complete = self._expected == 0 and self.tape.consumes_now()
        if self.gradient is None:
            self.gradient = FactoredGradient(self.parameter, self.name)
        self.gradient.add_pair(dy_TN, x_TK, bounded=not complete)
        if complete:
            self.tape.consume(self)

    def receive_elsewhere(self) -> None:
        """An expected use delivered its gradient through autograd."""
        self._expected -= 1

    def require_applicable(self) -> None:
        """Check, before the first update of a step, that this weight's pending gradient can be applied.

        Raises:
            ForgeRefusal: it is gone or was written to, or autograd delivered one after the weight was updated.
        """
        if self.stale:
            raise refuse("stepped_twice", param=self.name)
        if self.updated and self.parameter.grad is not None:
            raise refuse("late_gradient", param=self.name)
        if self.gradient is not None:
            self.gradient.pairs()

    def take(self) -> FactoredGradient | None:
        """Hand out what is pending, including a gradient that autograd put into `.grad`, and forget it."""
        gradient, self.gradient = self.gradient, None
        dense = self.parameter.grad
        if dense is not None:
            if gradient is None:
                gradient = FactoredGradient(self.parameter, self.name)
            self.parameter.grad = None
            gradient.add_dense(dense)
        return gradient

    def merge_dense(self) -> None:
        """Move a gradient that autograd put into `.grad` beside held pairs into them."""
        if self.gradient is not None and self.parameter.grad is not None:
            self.gradient = self.take()

    def discard(self, set_to_none: bool = True) -> None:
        """Forget what is pending, as `zero_grad()` does; else leave a gradient of zeros where there was one."""
        had_gradient = self.gradient is not None or self.updated or self.stale
        self.gradient = None
        if had_gradient and not set_to_none:
            self.gradient = FactoredGradient(self.parameter, self.name)
            rows, columns = self.parameter.shape
            self.gradient.add_pair(self.parameter.new_empty(0, rows), self.parameter.new_empty(0, columns))
        self.norm_sq = None
        self.updated = False
        self.stale = False

    def end_step(self) -> None:
        """Forget the counts and marks of the step that ends."""
        self.stale = self.stale or self.updated
        self.gradient = None
        self.norm_sq = None
        self.updated = False
        self._expected = 0

    def revoke(self, taken_over: bool) -> None:
        """Stop receiving; with `taken_over` its optimizer must not step any more, since another one owns the weight."""
        self._revoked = True
        self.gradient = None
        if self in self.tape.slots:
            self.tape.slots.remove(self)
        if taken_over:
            self.tape.lost.append(self.name)
