"""Inputs, the plain-torch rule and tolerances that the kernel tests share.

Importing this skips the module where kernels run neither on a GPU nor in Triton's interpreter (on the CPU,
with TRITON_INTERPRET=1 set before triton is imported).
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)
triton = pytest.importorskip("triton")

from forge_hf.kernels import launch, tiles  # noqa: E402
from forge_hf.scalars import StepScalars  # noqa: E402

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DEVICE = "cpu" if tiles.INTERPRET else "cuda"
KEY = 3_000_000_019  # above 2**31, where a signed key would differ

# A tie in rounding may fall either way after fp32 arithmetic: a few fp32 units of the largest value.
ULPS = 8 * 2.0**-24
# Adam's first step is sign-like, so a gradient near 0 turns its fp32 error into this part of lr.
LR_SHARE = 1e-3
# fp32 accumulation of up to a few hundred thousand squares, tile by tile.
NORM_RTOL = 2e-5

RULES = {
    "adamw": ("adamw", 2, {}),
    "lion": ("lion", 1, {}),
    "sgd": ("sgd", 0, {}),
    "momentum": ("sgd", 1, {"momentum": 0.9}),
    "nesterov": ("sgd", 1, {"momentum": 0.9, "nesterov": True}),
}
# (N, K, T): one row, one element, ragged everywhere, no tokens, whole tiles
SHAPES = [(1, 3, 33), (1, 1, 1), (65, 130, 33), (5, 70, 0), (64, 128, 64)]


@pytest.fixture
def poison(monkeypatch):
    """Temporaries start as NaN, so that an element that no program wrote shows; plans are made anew."""
    monkeypatch.setattr(launch, "_KNOWN", {})
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(float("nan")))


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def scalars_of(name: str, step: int = 10, lr: float = 1e-2) -> StepScalars:
    _, _, extra = RULES[name]
    if name == "adamw":
        extra = {
            "eps": 1e-8,
            "bias_correction1": 1 - 0.9**step,
            "bias_correction2_sqrt": (1 - 0.999**step) ** 0.5,
        }
    return StepScalars(lr=lr, beta1=0.9, beta2=0.999, weight_decay=0.1, **extra)


def setup(name: str, N: int, K: int, weight: torch.dtype, moment: torch.dtype, fresh: bool = False):
    """Weight and moments; fresh moments are 0 as before the first step."""
    _, count, _ = RULES[name]
    moments = [0.1 * randn(N, K, seed=1), randn(N, K, seed=2).square()][:count]
    return randn(N, K, dtype=weight), tuple((m * 0 if fresh else m).to(moment) for m in moments)


def plain_rule(name: str, w: torch.Tensor, g: torch.Tensor, moments, s: StepScalars):
    """The rule op by op, in whatever dtypes the arguments have."""
    if name == "adamw":
        m, v = s.beta1 * moments[0] + (1 - s.beta1) * g, s.beta2 * moments[1] + (1 - s.beta2) * g * g
        denominator = v.sqrt() / s.bias_correction2_sqrt + s.eps
        return w * (1 - s.lr * s.weight_decay) - s.lr / s.bias_correction1 * m / denominator, m, v
    if name == "lion":
        u = (s.beta1 * moments[0] + (1 - s.beta1) * g).sign()
        return w * (1 - s.lr * s.weight_decay) - s.lr * u, s.beta2 * moments[0] + (1 - s.beta2) * g
    d = g + s.weight_decay * w
    if name == "sgd":
        return (w - s.lr * d,)
    m = s.momentum * moments[0] + d
    return w - s.lr * (d + s.momentum * m if s.nesterov else m), m


def update(name: str, w: torch.Tensor, segments, moments, s: StepScalars, **options):
    """Run `wgrad_update_` on copies; returns (weight, *moments) and the norm."""
    w, moments = w.clone(), tuple(m.clone() for m in moments)
    norm_sq = launch.wgrad_update_(w, segments, moments, RULES[name][0], s, **options)
    return (w, *moments), norm_sq


def same_sums(left, right) -> bool:
    """Equal, or on a GPU off by the order of sums: strides decide how operands reach the tensor cores."""
    if DEVICE == "cpu":
        return same_bits(left, right)
    return all(torch.allclose(a, b, rtol=2e-6, atol=2e-6) for a, b in zip(left, right, strict=True))


def same_bits(left, right) -> bool:
    view = {2: torch.int16, 4: torch.int32}
    return all(
        torch.equal(a.view(view[a.itemsize]), b.view(view[b.itemsize]))
        for a, b in zip(left, right, strict=True)
    )
