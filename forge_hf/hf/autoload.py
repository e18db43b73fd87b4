"""Hooks that register the optimizers when transformers is imported, at next to no cost otherwise.

    import torch -> entry point -> install() -> a watcher on sys.meta_path; imports no wrapt, no transformers
    first import of transformers or forge_hf.optim -> watcher -> wrapt's post-import hooks -> registration

torch is usually imported in the middle of `import transformers`: the module that we wait for may already be
running (`from transformers import Trainer` without an earlier `import torch`). Post-import hooks come too
late for it, so its spec tells when it is done. `accelerate.accelerator` can wait for the engine
(`forge_hf.optim`), because accelerate needs to know about us only when one of our optimizers can exist.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["deferred_hook", "install"]

_TRIGGERS = ("transformers", "forge_hf.optim")

#: Module whose import is awaited -> our module and function, which gets the module.
_HOOKS = {
    "transformers.training_args": ("forge_hf.hf.registration", "extend_training_args"),
    "transformers.pytorch_utils": ("forge_hf.hf.conv1d", "connect_conv1d"),
    "transformers.trainer": ("forge_hf.hf.registration", "extend_trainer"),
    "forge_hf.optim": ("forge_hf.hf.accelerate", "connect_engine"),
}

_hooked = False


class _Watcher:
    """Waits on `sys.meta_path` for the first trigger, then makes way for wrapt's import hooks."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _TRIGGERS:
            return None
        _register_hooks()
        # Removing an entry shifts the list that the import system iterates over, so the search starts anew
        # here.
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
        from importlib.util import find_spec

        return find_spec(name)


def install() -> None:
    """Install the hooks; with a trigger already imported they apply at once. Again: nothing changes."""
    if _hooked or any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        return
    if any(name in sys.modules for name in _TRIGGERS):
        _register_hooks()
    else:
        sys.meta_path.insert(0, _Watcher())  # type: ignore[arg-type]


def _register_hooks() -> None:
    global _hooked
    if _hooked:
        return
    _hooked = True
    try:
        from wrapt import register_post_import_hook

        for name, (home, function) in _HOOKS.items():
            hook = deferred_hook(home, function)
            if not _called_at_end_of_import(hook, name):
                register_post_import_hook(hook, name)
    except Exception as error:
        _warn(error)


def _called_at_end_of_import(hook: Callable[[Any], None], name: str) -> bool:
    """If module `name` is just being executed, arrange that `hook(module)` is called when it is done.

    The import system marks that moment by `spec._initializing = False`, whether or not the module raised.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if spec is None or not getattr(spec, "_initializing", False):
        return False
    stock = type(spec)

    class _NotifyingSpec(stock):  # type: ignore[misc, valid-type]
        def __setattr__(self, key: str, value: Any) -> None:
            super().__setattr__(key, value)
            if key == "_initializing" and not value:
                self.__class__ = stock
                if sys.modules.get(name) is module:
                    hook(module)

    spec.__class__ = _NotifyingSpec
    return True


def deferred_hook(home: str, function: str) -> Callable[[Any], None]:
    """A hook that loads its code when it fires, and whose faults never break the import that fired it."""

    def hook(module: Any) -> None:
        try:
            getattr(importlib.import_module(home), function)(module)
        except Exception as error:
            _warn(error)

    return hook


def _warn(error: Exception) -> None:
    import logging

    logging.getLogger("forge_hf").warning("forge_hf could not hook into transformers: %s", error)
