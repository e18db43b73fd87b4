"""ForgeOptimizer: a torch optimizer that consumes factored gradients.

    step mode      backward fills the tape; clip_grad_norm_ measures it; step() runs the fused updates
    backward mode  each weight is updated in backward once its gradient is complete; step() does the rest

Everything else is torch's optimizer contract: param groups that schedulers write to, state under torch's
keys, hooks, closures, state_dict. See `checkpoint.py` for loading and `attach.py` for which parameter takes
which path.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from . import attach as _attach
from . import checkpoint, guards
from .attach import PathEntry
from .config import ForgeConfig, ForgeConfigError, refuse
from .dispatch import reread_environment
from .gradient import FactoredGradient, norms_sq, scale_all_
from .rules import Rule
from .slot import WeightSlot
from .state import state_bytes
from .tape import Tape
from .update import Prepared, apply_, prepare, waits_for_company

__all__ = ["ForgeOptimizer"]

#: Bytes of pairs that may wait in a backward for the updates of others of their kind: one launch for all of
#: them. Some blocks of a model with 8 billion weights at 512 tokens.
WAITING_BYTES = 128 << 20


class ForgeOptimizer(Optimizer):
    """Base of the forge optimizers; use `ForgeAdamW`, `ForgeLion` or `ForgeSGD`.

    Args:
        params: The model, or torch param groups (then `attach_to` gives the model).
        settings: Group defaults of the rule that were given.
        attach_to: The model whose linear layers and embeddings hand over their gradients.
        options: Fields of `ForgeConfig`.

    Raises:
        ForgeConfigError: an option or setting is unknown or out of range.
        ForgeRefusal: a parameter, model or wrapper that cannot be trained exactly.
    """

    rule: Rule
    _model: Callable[[], nn.Module | None]

    def __init__(
        self,
        params: Any,
        settings: dict[str, Any],
        attach_to: nn.Module | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        if isinstance(params, nn.Module):
            attach_to = params if attach_to is None else attach_to
            params = list(params.parameters())
            if not any(parameter.requires_grad for parameter in params):
                raise refuse("no_linear", reason="every parameter is frozen")
        if attach_to is None:
            raise refuse("no_model", name=type(self).__name__)
        self.config, _ = ForgeConfig.from_options(options)
        self._prepare_engine()
        defaults = {**self.rule.defaults, **self.rule.fixed, **settings}
        self.rule.validate(defaults)
        self._model = weakref.ref(attach_to)
        super().__init__(params, defaults)
        self._attach()

    def _prepare_engine(self) -> None:
        """Set what is not part of torch's optimizer state."""
        cls = type(self)
        self.tape = Tape(self, cls._consume, cls._finish_backward, cls._settle)
        self.tape.backward_mode = self.update_mode == "backward"
        self.tape.lagged = self.config.clip == "lagged"
        self._model = lambda: None
        self._slots: dict[int, WeightSlot] = {}
        self._report: list[PathEntry] = []
        self._places: dict[int, tuple[int, int]] = {}
        self._placed: list[list[Tensor]] = []
        self._versions: dict[int, int] = {}
        self._waiting: list[tuple[WeightSlot, FactoredGradient, Prepared]] = []
        self._waiting_bytes = 0
        # weight_bits extends bf16 weights; fp32 ones are what they are
        fp16 = () if self.config.weight_bits != 16 else (torch.float16,)
        self._trainable = (torch.float32, torch.bfloat16, *fp16)
        reread_environment()
        # The model keeps the slots alive; a dropped optimizer must not leave pairs in them.
        weakref.finalize(self, self.tape.discard).atexit = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; linear weights of the attached model in it take the pair path.

        Raises:
            ForgeConfigError: a setting is out of range.
            ForgeRefusal: a parameter that cannot be trained.
        """
        parameters = param_group["params"]
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        elif not isinstance(parameters, set):  # torch refuses sets, which have no order
            parameters = list(parameters)
        names = self._names()
        for entry in parameters:
            name, parameter = (
                entry if isinstance(entry, tuple) else (names.get(id(entry), "parameter"), entry)
            )
            if isinstance(parameter, Tensor) and parameter.requires_grad:
                self._check_parameter(name, parameter)
        self.rule.validate({**self.defaults, **param_group})
        super().add_param_group({**param_group, "params": parameters})
        if self._report and self._model() is not None:
            self._attach()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Apply what is pending: all updates in `step` mode, the remaining ones in `backward` mode.

        Args:
            closure: Recomputes the loss and its backward, as in torch.

        Returns:
            The closure's loss, or None.

        Raises:
            ForgeRefusal: a backward or step was interrupted, another optimizer took weights over, or a
                gradient is not finite (`nonfinite="raise"`).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.tape.require_usable()
        if self.config.nonfinite != "propagate" and not self._gradients_are_finite():
            return loss
        updates: list[Any] = []
        begun = any(slot.updated for slot in self.tape.slots)
        try:
            with torch.no_grad():
                self._require_applicable()
                self._number_parameters()
                for _, parameter in self._walk():
                    updates += self._due(parameter)
                begun = begun or bool(updates)
                self._run(updates)
        except BaseException:
            done = sum(slot.updated for slot in self.tape.slots) + sum(update.done for update in updates)
            self.tape.discard()
            self.tape.partial = True
            if begun:
                total = sum(len(group["params"]) for group in self.param_groups)
                self.tape.interrupted = refuse("interrupted_step", updated=done, total=total)
            raise
        for update in updates:
            slot = self._slots.get(id(update.parameter))
            if slot is not None and slot.active():
                slot.updated = True
        self.tape.end_step()
        reread_environment()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those held as pairs included."""
        super().zero_grad(set_to_none)
        self.tape.zero_grad(self.tape.slots, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors under torch's keys; they load with `weights_only=True`.

        fp32 and bf16 moments load into torch's optimizer too; 8-bit ones have keys that it does not know.
        """
        if self.tape.lagged_coefficient is not None:
            self.param_groups[0]["lagged_clip_coefficient"] = self.tape.lagged_coefficient
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, or of torch's optimizer for the same rule, without casts.

        Raises:
            ForgeRefusal: the checkpoint does not fit; nothing is loaded then.
            ForgeConfigError: one of its settings is not supported; nothing is loaded then.
        """
        checkpoint.load_(self, state_dict)
        self._versions.clear()  # weights and low bits come from one checkpoint, in either order
        self.tape.lagged_coefficient = self.param_groups[0].get("lagged_clip_coefficient")
        if self.tape.interrupted is not None:
            self.accept_partial_step()
        self.tape.forget_settings()
        for slot in self.tape.slots:
            if slot.updated:
                slot.discard()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the optimizer without the model: the copy works on ordinary gradients."""
        return {**super().__getstate__(), "config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle."""
        super().__setstate__(state)
        if "tape" not in self.__dict__:
            self._prepare_engine()

    @property
    def update_mode(self) -> str:
        """When updates run: "backward" or "step", which "auto" means where nothing else is known."""
        return "backward" if self.config.update == "backward" else "step"

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Mark micro-batches that are not the last of their group (only `backward` mode needs it).

        accelerate and the Trainer say so by themselves.
        """
        self.tape.hold_depth += 1
        try:
            yield
        finally:
            self.tape.hold_depth -= 1

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients of all param groups by their joint norm; see `forge_hf.clip_grad_norm_`."""
        parameters = [parameter for _, parameter in self._walk()]
        with torch.no_grad():
            return guards.clip_slots_and_grads_(parameters, max_norm, norm_type, error_if_nonfinite)

    def dense_grad(self, parameter: Tensor) -> Tensor | None:
        """The gradient of one parameter as a tensor; see `forge_hf.dense_grad`."""
        self._number_parameters()
        if id(parameter) not in self._places:
            raise refuse("not_ours")
        slot = self._slots.get(id(parameter))
        if slot is None or not slot.active():
            return parameter.grad
        self.tape.require_usable()
        if slot.stale or slot.updated:
            raise refuse("grad_is_gone", param=slot.name)
        return slot.dense()

    @property
    def skipped_steps(self) -> int:
        """Steps that `nonfinite="skip"` has left out, those before a resumed checkpoint included."""
        return int(self.param_groups[0].get("skipped_steps", 0))

    def _gradients_are_finite(self) -> bool:
        """Look at the norm of all gradients; drop them, and count or raise, if it is not finite."""
        with torch.no_grad():
            self._require_applicable()
            norm = self.clip_grad_norm_(float("inf"))
        if torch.isfinite(norm):
            return True
        names = self._nonfinite_names() if self.config.nonfinite == "raise" else ""
        self.zero_grad()
        if self.config.nonfinite == "raise":
            raise refuse("nonfinite", norm=float(norm), names=names)
        self.param_groups[0]["skipped_steps"] = self.skipped_steps + 1
        return False

    def _nonfinite_names(self, most: int = 3) -> str:
        """Names of the first parameters whose gradient is not finite, as text."""
        names, found = self._names(), []
        for _, parameter in self._walk():
            slot = self._slots.get(id(parameter))
            held = None if slot is None else slot.gradient
            finite = parameter.grad is None or bool(parameter.grad.isfinite().all())
            if not finite or (held is not None and not bool(torch.isfinite(held.norm_sq()))):
                found.append(f"'{names.get(id(parameter), 'parameter')}'")
        more = len(found) - most
        return ", ".join(found[:most]) + (f" and {more} more" if more > 0 else "")

    def unscale_held_(self, inv_scale: Tensor, found: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """Unscale pending gradients for an fp16 GradScaler and report non-finite ones.

        Args:
            inv_scale: 0-d tensor, 1 / loss scale.
            found: The scaler's 0-d (or 1-element) flags by device, for gradients in `.grad`.

        Returns:
            The flags, with those of the pending gradients added.

        Raises:
            ForgeRefusal: the updates already ran (`update="backward"`).
        """
        for slot in self.tape.slots:
            if slot.updated:
                raise refuse("scaler_in_backward")
        held = [slot.gradient for slot in self.tape.slots if slot.gradient is not None]
        for squares in norms_sq(held):
            infinite = (~torch.isfinite(squares).all()).to(torch.float32)
            device = squares.device
            found[device] = torch.maximum(found[device], infinite) if device in found else infinite
        scale_all_(held, inv_scale)
        return found

    def accept_partial_step(self) -> None:
        """Go on with a model that an exception left partly updated, knowingly; all gradients are dropped."""
        self.tape.interrupted = None
        self.tape.discard()
        self.zero_grad()

    def report(self) -> list[PathEntry]:
        """Path of every parameter of the attached model, and why; hooks that came later are seen."""
        model = self._model()
        return list(self._report) if model is None else _attach.revised(model, self._report, self._slots)

    def explain(self) -> str:
        """The report in a few lines, parameters with the same path and reason together."""
        from .report import explain

        return explain(self)

    def pending_bytes(self) -> int:
        """Bytes of pairs and dense buffers held now, ordinary `.grad` tensors not included."""
        return self.tape.held_bytes()

    def state_bytes(self) -> int:
        """Bytes of the moments and step counters."""
        return state_bytes(self.state)

    def detach(self) -> None:
        """Restore the model's stock layers; this optimizer then works on ordinary gradients."""
        model = self._model()
        if model is not None:
            _attach.detach(model)
        self._slots = {}

    def _attach(self) -> None:
        guards.install()
        model = self._model()
        assert model is not None
        self._slots, self._report = _attach.attach(
            model, [parameter for _, parameter in self._walk()], self.tape
        )

    def _names(self) -> dict[int, str]:
        model = self._model()
        return {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}

    def _walk(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter

    def _number_parameters(self) -> None:
        """Bring `_places` up to date: index of the group and number of each parameter, by its id."""
        lists = [group["params"] for group in self.param_groups]
        # By each member, as they can be exchanged in place.
        if len(lists) == len(self._placed) and all(
            len(members) == len(known) and all(map(operator.is_, members, known))
            for members, known in zip(lists, self._placed, strict=True)
        ):
            return
        places = [(index, member) for index, members in enumerate(lists) for member in members]
        self._places = {id(member): (index, number) for number, (index, member) in enumerate(places)}
        self._placed = [list(members) for members in lists]

    def _consume(self, slot: WeightSlot) -> None:
        """Update a weight inside backward."""
        if not self.tape.settings:  # the first one of this step
            self._number_parameters()
        place = self._places.get(id(slot.parameter))
        if place is None:  # it was taken out of the groups
            return
        if place[0] not in self.tape.settings:
            self.tape.settings[place[0]] = self.rule.scalars(self.param_groups[place[0]], 1)
        if slot.parameter.dtype not in self._trainable:
            self._refuse_cast(slot.parameter)
        # Without grad already: a backward that builds a graph keeps its pairs from the slots.
        gradient = slot.take()
        assert gradient is not None
        if self.tape.lagged_coefficient is not None and self.tape.lagged:
            gradient.scale_(self.tape.lagged_coefficient)
        slot.updated = True
        update = self._prepare(slot.parameter, gradient)
        if not (isinstance(update, Prepared) and waits_for_company(update)):
            (slot.norm_sq,) = self._run([update], want_norm_sq=True)
            return
        ((dy_TN, x_TK, *_),) = gradient.segments
        self.tape.note_held(dy_TN)
        self._waiting.append((slot, gradient, update))
        # Of their storages, which they may be views of.
        self._waiting_bytes += dy_TN.untyped_storage().nbytes() + x_TK.untyped_storage().nbytes()
        if self._waiting_bytes >= WAITING_BYTES:
            self._run_waiting()

    def _settle(self, slot: WeightSlot) -> None:
        """Hold a gradient that stays in a smaller form; there is none here."""

    def _run(self, updates: list[Any], want_norm_sq: bool = False) -> list[Tensor | None]:
        """Run what `_prepare` returned; see `apply_`."""
        return apply_(updates, self._versions, want_norm_sq)

    def _run_waiting(self) -> None:
        """Run the updates that were put off in this backward."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for _, gradient, _ in waiting:
            gradient.pairs()  # refuses what was written to in the meantime
        norms = apply_([update for _, _, update in waiting], self._versions, want_norm_sq=True)
        for (slot, _, _), norm_sq in zip(waiting, norms, strict=True):
            slot.norm_sq = norm_sq

    def _finish_backward(self, completed: bool) -> None:
        if completed and self._waiting:
            with torch.no_grad():
                self._run_waiting()
        for slot, _, _ in self._waiting:
            slot.updated = False
        self._waiting, self._waiting_bytes = [], 0

    def _require_applicable(self) -> None:
        for slot in self.tape.slots:
            slot.require_applicable()
            if slot.gradient is not None and slot.parameter.dtype not in self._trainable:
                self._refuse_cast(slot.parameter)
        for index, used in self.tape.settings.items():
            if self.rule.scalars(self.param_groups[index], 1) != used:
                raise refuse("settings_changed", index=index)
        for _, parameter in self._walk():
            if parameter.grad is not None:
                if parameter.dtype not in self._trainable:
                    self._refuse_cast(parameter)
                if parameter.grad.is_sparse:
                    raise refuse("sparse_grad", param=self._names().get(id(parameter), "parameter"))

    def _refuse_cast(self, parameter: Tensor) -> None:
        """Say of a weight what would have been said if it had had this dtype when it was added."""
        self._check_parameter(self._names().get(id(parameter), "parameter"), parameter)

    def _check_parameter(self, name: str, parameter: Tensor) -> None:
        _attach.check_parameter(name, parameter)
        if parameter.dtype not in self._trainable:
            raise ForgeConfigError(
                f"weight_bits={self.config.weight_bits} extends bf16 weights, but '{name}' is fp16. "
                "Fix: load the model in bfloat16, or leave weight_bits out."
            )

    def _due(self, parameter: Tensor) -> list[Any]:
        """What step() has to run for one parameter."""
        slot = self._slots.get(id(parameter))
        gradient: FactoredGradient | Tensor | None = parameter.grad
        if slot is not None and slot.active() and (slot.gradient is not None or slot.updated):
            gradient = slot.take()
        return [] if gradient is None else [self._prepare(parameter, gradient)]

    def _prepare(self, parameter: Tensor, gradient: FactoredGradient | Tensor) -> Any:
        """What `_run` takes: a `Prepared` here."""
        index, number = self._places[id(parameter)]
        group, state, known = self.param_groups[index], self.state[parameter], self.tape.scalars[index]
        return prepare(
            self.rule, self.config, group, state, parameter, number, gradient, known, self._versions
        )
