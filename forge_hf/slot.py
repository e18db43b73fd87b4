"""WeightSlot: what one weight still owes between forward and step, and how to find it from the parameter.

Counting: a use seen in forward is expected back in backward. In `backward` mode the update runs when the last
expected use has come back. Too high a count only delays the update to `step()`. An unexpected arrival is held
until `step()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .config import refuse
from .gradient import FactoredGradient

if TYPE_CHECKING:
    from .tape import Tape

__all__ = ["WeightSlot", "live_slots", "slot_of"]

# id(parameter) -> slot; a slot lives as long as its module or its optimizer.
_SLOTS: weakref.WeakValueDictionary[int, WeightSlot] = weakref.WeakValueDictionary()


def slot_of(parameter: Tensor) -> WeightSlot | None:
    """The slot that receives `parameter`'s pairs, or None."""
    slot = _SLOTS.get(id(parameter))
    return slot if slot is not None and slot.parameter is parameter and slot.active() else None


def live_slots(parameters: Iterable[Tensor]) -> list[WeightSlot]:
    """The slots among `parameters`; fast when no model is attached."""
    if not _SLOTS:
        return []
    return [slot for slot in map(slot_of, parameters) if slot is not None]


class WeightSlot:
    """Receiver of one weight's pairs (see `layers.Receiver`).

    Args:
        parameter: The weight (N, K).
        name: Its name in the model.
        tape: The tape of its optimizer.

    Attributes:
        gradient: What is pending, or None.
        updated: Whether the weight was already updated in this step.
        norm_sq: What adds up to the squared norm of the consumed gradient of this step (fp32), or None.
        stale: The gradient was consumed and `zero_grad()` has not been called since.
        spoiled: A gradient came after that, so that the sum torch would hold is lost.
        gradient_type: What holds the gradient.
    """

    gradient_type: type[FactoredGradient] = FactoredGradient

    def __init__(self, parameter: nn.Parameter, name: str, tape: Tape) -> None:
        self.parameter = parameter
        self.name = name
        self.tape = tape
        self.gradient: FactoredGradient | None = None
        self.updated = False
        self.norm_sq: Tensor | None = None
        self.stale = self.spoiled = False
        self._expected = 0
        self._revoked = False
        tape.slots.append(self)
        _SLOTS[id(parameter)] = self

    def active(self) -> bool:
        """Whether an optimizer still wants this weight's pairs."""
        return not self._revoked and self.tape.owner() is not None

    def involved(self) -> bool:
        """Whether a gradient is held here, or was since `zero_grad()`."""
        return self.gradient is not None or self.updated or self.stale

    def unmeasured(self) -> bool:
        """Whether the norm of this step's gradient was given up on purpose."""
        if self.gradient is not None:
            return not self.gradient.measurable
        return self.updated and self.norm_sq is None

    def expect(self) -> None:
        """Count a use seen in forward."""
        self._expected += 1

    def open_forward(self) -> None:
        """Refuse a forward with a weight that is a step ahead of those that wait for `step()`.

        Raises:
            ForgeRefusal: the weight was already updated in this step.
        """
        if self.updated:
            raise refuse("forward_after_update", param=self.name)

    def open_backward(self) -> None:
        """Refuse, before the weight is read, a gradient that comes too late.

        Raises:
            ForgeRefusal: the weight was already updated in this step, or the last gradient was never zeroed.
        """
        if self.active():
            self.tape.enter_backward()
            if self.updated:
                raise refuse("late_gradient", param=self.name)

    def receive(self, dy_TN: Tensor, x_TK: Tensor, borrowed: bool = False, exchanged: bool = False) -> None:
        """Add a pair; in `backward` mode consume the gradient when it is complete.

        After a step the pair is dropped: its sum with the gradient that the step used up is lost, and only
        matters if somebody asks for it before `zero_grad()` (a GAN's other network does not).
        """
        left, right = (x_TK, dy_TN) if exchanged else (dy_TN, x_TK)
        keep = {"keep_input": self.tape.own_copy} if borrowed else {}

        def add(gradient: FactoredGradient, last: bool) -> None:
            gradient.add_pair(left, right, bounded=not last, exchanged=exchanged, **keep)

        self._receive(dy_TN, add)

    def receive_lookup(self, ids_T: Tensor, dy_TK: Tensor) -> None:
        """Add an embedding's (ids, dY); the rest as in `receive`."""
        self._receive(dy_TK, lambda gradient, last: gradient.add_lookup(ids_T, dy_TK))

    def _receive(self, dy: Tensor, add: Callable[[FactoredGradient, bool], None]) -> None:
        self._expected -= 1
        if self.stale:
            self.spoiled = True
            return
        complete = self._expected == 0 and self.tape.consumes_now()
        if self.gradient is None:
            self.gradient = self.gradient_type(self.parameter, self.name)
        add(self.gradient, complete)
        if complete:
            self.tape.consume(self)
            return
        if self._expected == 0:
            self.tape.settle(self)
        if self.gradient.holds_factors:
            self.tape.note_held(dy)

    def receive_elsewhere(self) -> None:
        """An expected use delivered its gradient through autograd, or had none."""
        self._expected -= 1

    def require_applicable(self) -> None:
        """Check, before the first update of a step, that this weight's pending gradient can be applied.

        Raises:
            ForgeRefusal: it is gone or was written to, or autograd delivered one after the weight was
                updated.
        """
        if self.stale:
            raise refuse("not_zeroed" if self.spoiled else "stepped_twice", param=self.name)
        if self.updated and self.parameter.grad is not None:
            raise refuse("late_gradient", param=self.name)
        if self.gradient is not None:
            self.gradient.pairs()
            self.gradient.lookups()

    def take(self) -> FactoredGradient | None:
        """Hand out what is pending, including a gradient that autograd put into `.grad`, and forget it."""
        gradient, self.gradient = self.gradient, None
        dense = self.parameter.grad
        if dense is not None:
            if gradient is None:
                gradient = self.gradient_type(self.parameter, self.name)
            self.parameter.grad = None
            gradient.add_dense(dense)
        return gradient

    def dense(self) -> Tensor | None:
        """The gradient as `.grad` would hold it, in a new tensor where something is held; nothing is used up.

        Raises:
            ForgeRefusal: a held tensor was written to, or only a projection is left.
        """
        if self.gradient is None:
            return self.parameter.grad
        with torch.no_grad():
            grad = self.gradient.dense()
            return grad if self.parameter.grad is None else grad.add_(self.parameter.grad)

    def hand_over(self) -> None:
        """Put what is held into `.grad`, for hooks that look there; raises as `dense`."""
        self.parameter.grad = self.dense()
        self.gradient = None

    def merge_dense(self) -> None:
        """Move a gradient that autograd put into `.grad` beside held pairs into them."""
        if self.gradient is not None and self.parameter.grad is not None:
            self.gradient = self.take()

    def discard(self, set_to_none: bool = True) -> None:
        """Forget what is pending; unless `set_to_none`, leave a gradient of zeros where there was one."""
        had_gradient = self.involved()
        self.gradient = None
        if had_gradient and not set_to_none:
            self.gradient = self.gradient_type(self.parameter, self.name)
            rows, columns = self.parameter.shape
            self.gradient.add_pair(self.parameter.new_empty(0, rows), self.parameter.new_empty(0, columns))
        self.norm_sq = None
        self.updated = False
        self.stale = self.spoiled = False

    def end_step(self) -> None:
        """Forget the counts and marks of the step that ends."""
        self.stale = self.stale or self.updated
        self.gradient = None
        self.norm_sq = None
        self.updated = False
        self._expected = 0

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a layer has no optimizer, on every way to make one (torch's parametrized classes')."""

    def revoke(self, taken_over: bool) -> None:
        """Stop receiving; `taken_over` means that another optimizer owns the weight now."""
        self._revoked = True
        self.gradient = None
        if self in self.tape.slots:
            self.tape.slots.remove(self)
        if taken_over:
            self.tape.lost.append(self.name)
