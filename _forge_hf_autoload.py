"""Entry point of the group `torch.backends`: called by torch at the end of `import torch`.

It lies outside the package because importing anything from `forge_hf` installs the hooks, and
FORGE_HF_AUTOLOAD=0 must leave that to an explicit `import forge_hf`.
"""

import os

__all__ = ["autoload"]


def autoload() -> None:
    """Make the forge optimizers known to transformers as soon as it is imported; never raises."""
    if os.environ.get("FORGE_HF_AUTOLOAD", "1").strip().lower() in {"0", "false", "no", "off"}:
        return
    try:
        from forge_hf.hf.autoload import install

        install()
    except Exception as error:
        import logging

        logging.getLogger("forge_hf").warning("forge_hf could not hook into transformers: %s", error)
