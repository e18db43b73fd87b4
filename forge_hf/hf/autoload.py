"""Hooks that register the optimizers when transformers is imported, at next to no cost for programs that never do.

    import torch -> entry point -> install() -> a watcher on sys.meta_path     (no wrapt, transformers, accelerate, triton)
    first import of transformers or of forge_hf.optim -> watcher -> wrapt's post-import hooks -> registration, accelerate

torch is usually imported in the middle of `import transformers` or `import accelerate`. The hooked transformers modules
start after that. `accelerate.accelerator` does not, so its hook waits for the engine (`forge_hf.optim`): accelerate needs
to know about us only when one of our optimizers can exist.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["deferred_hook", "install"]

_TRIGGERS = ("transformers", "forge_hf.optim")

#: Module whose import is awaited -> our module and function, which gets the module.
_HOOKS = {
    "transformers.training_args": ("forge_hf.hf.registration", "extend_training_args"),
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
        # Removing an entry shifts the list that the import system is iterating over, so the search starts anew here.
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
        from importlib.util import find_spec

        return find_spec(name)


def install() -> None:
    """Install the hooks; with a trigger already imported they apply at once. Calling it again changes nothing."""
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
            # A module that is just being executed has no classes yet, and wrapt would call the hook at once. This does
            # not happen with the releases we test; should it, extend_trainer comes back to training_args.
            if not getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
                register_post_import_hook(deferred_hook(home, function), name)
    except Exception as error:
        _warn(error)


def deferred_hook(home: str, function: str) -> Any:
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
