"""What `forge-hf doctor` looks at: versions, the GPU, the path that would run, autoload, and a self-test."""

from __future__ import annotations

import copy
import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass

import torch
from torch import nn

from ..dispatch import backend_name
from ..optim import ForgeAdamW

__all__ = ["Finding", "examine"]

_PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "forge-hf")
#: Distance of the end points after the self-test, as a fraction of the way travelled.
TOLERANCE = 2e-3


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        what: What was looked at.
        value: What was found.
        ok: False for what keeps forge_hf from working, None for what is only told.
    """

    what: str
    value: str
    ok: bool | None = None


def examine() -> list[Finding]:
    """Look at everything; ten seconds, most of them in a fresh Python that imports transformers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [
        Finding("python", sys.version.split()[0], sys.version_info >= (3, 10)),
        *(Finding(name, _version(name)) for name in _PACKAGES),
        _gpu(),
        Finding("backend", _backend(device)),
        _autoload(),
        _self_test(device),
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", "none; the reference path in plain torch runs on the CPU")
    name = torch.cuda.get_device_name()
    major, minor = torch.cuda.get_device_capability()
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return Finding("GPU", f"{name}, compute capability {major}.{minor}, {memory:.1f} GiB", major >= 7)


def _backend(device: str) -> str:
    weight = torch.empty(128, 128, device=device)
    name = backend_name(weight)
    if name == "reference":
        asked = os.environ.get("FORGE_HF_BACKEND", "auto")
        return f"reference (plain torch; FORGE_HF_BACKEND={asked})"
    from ..kernels.plan import is_hopper

    hopper = is_hopper(weight.device) and os.environ.get("FORGE_HF_HOPPER", "1") != "0"
    return "triton, with the Hopper kernel" if hopper else "triton"


def _autoload() -> Finding:
    """Whether a script that never imports forge_hf finds the names."""
    code = (
        "import transformers.training_args as t; "
        "print('forge_adamw' in {member.value for member in t.OptimizerNames})"
    )
    try:
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return Finding("autoload", "unknown: importing transformers took over two minutes", False)
    if result.stdout.strip() == "True":
        return Finding("autoload", "active: optim='forge_adamw' is known without an import", True)
    if os.environ.get("FORGE_HF_AUTOLOAD") == "0":
        return Finding("autoload", "off (FORGE_HF_AUTOLOAD=0); `import forge_hf` registers the names")
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("autoload", f"unknown: transformers cannot be imported ({last})", False)
    installed = importlib.metadata.entry_points(group="torch.backends")
    why = "its entry point is not installed" if "forge_hf" not in installed.names else "torch did not call it"
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        why = "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from calling it"
    return Finding("autoload", f"not active: {why}. Fix: pip install forge-hf, or `import forge_hf`", False)


class _Model(nn.Module):
    """Every kind of path: an embedding tied to the head, a linear layer, biases, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(96, 64)
        self.inner = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 96)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids)
        scores: torch.Tensor = self.head(self.norm(hidden + torch.tanh(self.inner(hidden))))
        return scores


def _self_test(device: str) -> Finding:
    """Ten steps with clipping, against torch.optim.AdamW."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        start = _Model().to(device)
    batches = torch.randint(0, 96, (10, 4, 16), generator=generator).to(device)
    ends = []
    for ours in (False, True):
        model = copy.deepcopy(start)
        optimizer: torch.optim.Optimizer
        optimizer = ForgeAdamW(model, lr=1e-3) if ours else torch.optim.AdamW(model.parameters(), lr=1e-3)
        for ids in batches:
            scores = model(ids)[:, :-1].flatten(0, 1)
            nn.functional.cross_entropy(scores, ids[:, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()]))
    begin = torch.cat([parameter.detach().double().flatten() for parameter in start.parameters()])
    off = float((ends[1] - ends[0]).norm() / (ends[0] - begin).norm())
    verdict = "agrees with" if off < TOLERANCE else "DISAGREES WITH"
    text = f"ten steps on {device}: {verdict} torch.optim.AdamW ({off:.1e} of the way apart)"
    return Finding("self-test", text, off < TOLERANCE)
