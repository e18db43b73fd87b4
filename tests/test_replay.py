"""A replayed launch is the kernel that fits its tensors: what is None and the dtypes are compiled in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from forge_hf.kernels import replay  # noqa: E402


class Kernel:
    """Counts compilations; what it compiles remembers which arguments were None."""

    arg_names = ("a_ptr", "b_ptr", "key", "N", "FLAG")

    def __init__(self) -> None:
        self.compiled: list[tuple[bool, ...]] = []
        self.ran: list[tuple[tuple[bool, ...], tuple[object, ...]]] = []

    def __getitem__(self, grid):
        def launch(*tensors, **constants):
            absent = tuple(tensor is None for tensor in tensors[:2])
            self.compiled.append(absent)
            self.ran.append((absent, tensors))
            return Compiled(self, absent)

        return launch


class Compiled:
    def __init__(self, kernel, absent) -> None:
        self.kernel, self.absent = kernel, absent

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.ran.append((self.absent, arguments))


def test_each_pattern_of_absent_tensors_has_its_own_kernel(monkeypatch):
    """A kernel compiled without the norm leaves the partials unwritten, one with it writes through None."""
    monkeypatch.setattr(replay, "REPLAYS", True)
    kernel = Kernel()
    launch = replay.Launch(kernel, (4,), (7,), {"FLAG": True})
    x, y, z, n, m = torch.zeros(5, 1)
    for a, b in ((x, None), (x, n), (y, None), (z, m), (x, None)):
        launch(a, b, 3)
        absent, arguments = kernel.ran[-1]
        assert absent == (a is None, b is None)
        assert arguments[:4] == (a, b, 3, 7)
    assert kernel.compiled == [(False, True), (False, False)]


def test_each_dtype_has_its_own_kernel(monkeypatch):
    """The norm of fp16 pairs came from the kernel for bf16 where both had met the same shape."""
    monkeypatch.setattr(replay, "REPLAYS", True)
    kernel = Kernel()
    launch = replay.Launch(kernel, (4,), (7,), {"FLAG": True})
    half, brain = torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.bfloat16)
    for a in (half, brain, SimpleNamespace(base=half), half, SimpleNamespace(base=brain)):
        launch(a, None, 3)
    assert len(kernel.compiled) == 2


def test_constants_must_end_the_signature():
    with pytest.raises(ValueError, match="do not end"):
        replay.Launch(Kernel(), (1,), (), {"N": 1})
