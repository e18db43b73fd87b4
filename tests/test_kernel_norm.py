"""The norm's kernels: hard inputs, ragged shapes, strides, determinism, the choice of form, launches."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_hf.kernels import launch, norm_plan, replay, tiles, wgrad_gram, wgrad_norm
from tests.kernel_cases import (
    BF16,
    DEVICE,
    F16,
    F32,
    NORM_RTOL,
    poison,  # noqa: F401 - a fixture
    randn,
    same_bits,
)
from tests.tolerances import GRAD_NORM

# numpy, under the interpreter, warns where a GPU silently gives inf or NaN; tests below do that on purpose.
pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered"),
]

FORMS = {
    "gram": wgrad_gram.centred_gram_norm_sq,
    "gemm": wgrad_norm.gemm_norm_sq,
    "chosen": lambda dy, x: launch.wgrad_norm_sq([(dy, x)]),
}


def exact_norm_sq(dy: torch.Tensor, x: torch.Tensor) -> float:
    return (dy.double().T @ x.double()).square().sum().item()


# (T, N, K): one token, one feature on either side, more than one tile of tokens, ragged and whole, more
# tokens than the kernel that centres holds at once
@pytest.mark.parametrize(
    "shape", [(1, 3, 5), (2, 1, 70), (17, 70, 1), (130, 65, 33), (128, 64, 128), (256, 64, 64), (530, 9, 20)]
)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("form", FORMS)
def test_norm_of_ragged_shapes(form, dtype, shape):
    T, N, K = shape
    dy, x = randn(T, N, dtype=dtype), randn(T, K, dtype=dtype, seed=1)
    got = FORMS[form](dy, x)
    assert got.dtype == F32 and got.ndim == 0
    # Means of two tokens exceed the deviation by chance, and x - m is rounded to bf16 there.
    rtol = GRAD_NORM if T == 2 and dtype == BF16 else NORM_RTOL
    assert got.item() == pytest.approx(exact_norm_sq(dy, x), rel=rtol)
    assert same_bits([got], [FORMS[form](dy, x)])


@pytest.mark.parametrize("shape", [(0, 3, 5), (4, 0, 5), (4, 3, 0)])
@pytest.mark.parametrize("form", FORMS)
def test_norm_of_nothing_is_zero(form, shape):
    T, N, K = shape
    assert FORMS[form](randn(T, N), randn(T, K)).item() == 0.0


def hard_pairs(T: int = 150, N: int = 48, K: int = 80):
    """Name -> fp32 pair whose plain Gram form cancels, or whose means are large, zero or mixed."""
    noise, dy = randn(T, K, seed=2), randn(T, N, seed=3)
    zero_sum = dy - dy.mean(0)
    row = 30.0 * randn(1, K, seed=4)
    probabilities = randn(T, N, seed=5).softmax(1)
    probabilities[torch.arange(T), torch.arange(T) % N] -= 1.0
    normed = torch.nn.functional.layer_norm(noise, [K])
    yield "nearly constant rows", zero_sum, row + 0.3 * noise
    yield "the same row", dy, row.expand(T, K)
    yield "layer norm with offset", zero_sum, normed * 0.02 + 5.0
    yield "after relu", zero_sum, noise.relu()
    yield "after relu, few active", probabilities, (noise - 2.0).relu()
    yield "softmax gradient, constant rows", probabilities - probabilities.mean(0), row + noise
    yield "one large feature", zero_sum, noise + 500.0 * (torch.arange(K, device=DEVICE) == 7)
    yield "mixed means", zero_sum, noise + torch.linspace(-3, 3, K, device=DEVICE)
    yield "constant dy", dy[:1].expand(T, N), noise + 1.0
    yield "tiny gradients", 1e-8 * zero_sum, row + noise
    yield "large gradients", 1e7 * dy, row + noise


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("dy", "x"), [pytest.param(dy, x, id=name) for name, dy, x in hard_pairs()])
def test_gram_of_hard_inputs(dtype, dy, x):
    dy, x = dy.to(dtype), x.to(dtype)
    exact = exact_norm_sq(dy, x)
    assert exact > 0
    assert wgrad_gram.centred_gram_norm_sq(dy, x).item() == pytest.approx(exact, rel=GRAD_NORM)


def test_gram_is_never_negative():
    dy, x = randn(40, 64), randn(40, 64, seed=1)
    cancelled = wgrad_gram.centred_gram_norm_sq(torch.cat([dy, -dy]), torch.cat([x, x]))
    assert 0.0 <= cancelled.item() <= 1e-4 * exact_norm_sq(dy, x)
    same = torch.full((40, 64), 3.0, device=DEVICE)
    assert 0.0 <= wgrad_gram.centred_gram_norm_sq(dy - dy.mean(0), same).item() <= 1e-6


STRIDED = {
    "transposed": lambda t, n, dtype: randn(n, t, dtype=dtype).T,
    "expanded": lambda t, n, dtype: randn(1, n, dtype=dtype).expand(t, n),
    "scalar": lambda t, n, dtype: randn(1, 1, dtype=dtype).expand(t, n),
    "every second": lambda t, n, dtype: randn(t, 2 * n, dtype=dtype)[:, ::2],
    "offset": lambda t, n, dtype: randn(t + 1, n + 3, dtype=dtype)[1:, 3:],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", STRIDED)
def test_strides_change_no_bit(kind, dtype, form):
    dy, x = STRIDED[kind](24, 40, dtype), STRIDED[kind](24, 72, dtype)
    assert same_bits([FORMS[form](dy, x)], [FORMS[form](dy.contiguous(), x.contiguous())])


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("side", ["dy", "x"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_non_finite_inputs_reach_the_norm(dtype, form, side, bad):
    dy, x = randn(140, 20, dtype=dtype), randn(140, 30, dtype=dtype, seed=1)
    (dy if side == "dy" else x)[133, 11] = bad
    assert not FORMS[form](dy, x).isfinite()


def test_fp16_goes_to_the_gemm(monkeypatch):
    """The sums of loss-scaled fp16 gradients may pass the fp32 range where the norm does not."""
    monkeypatch.setattr(norm_plan, "gram_is_cheaper", lambda *_: True)
    monkeypatch.setattr(launch, "centred_gram_norm_sq", lambda *_: pytest.fail("Gram form of fp16"))
    dy, x = randn(20, 30, dtype=F16), randn(20, 50, dtype=F16, seed=1)
    assert launch.wgrad_norm_sq([(dy, x)]).item() == pytest.approx(exact_norm_sq(dy, x), rel=NORM_RTOL)


@pytest.mark.parametrize("shape", [(300, 530, 70), (130, 1, 129)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gram_in_many_parts_of_the_features(dtype, shape, monkeypatch):
    """One part per block of features, the last of them ragged, add up to the same norm."""
    N, K, T = shape
    monkeypatch.setattr(norm_plan, "_gram_features", lambda pairs, N, K, block_f: block_f)
    wgrad_gram._gram_launches.cache_clear()
    dy, x = randn(T, N, dtype=dtype), randn(T, K, dtype=dtype, seed=1)
    got = wgrad_gram.centred_gram_norm_sq(dy, x)
    assert norm_plan.gram_plan(T, N, K, dtype).parts_n == -(-N // (32 if dtype == F32 else 64))
    wgrad_gram._gram_launches.cache_clear()
    assert got.item() == pytest.approx(exact_norm_sq(dy, x), rel=NORM_RTOL)


@pytest.mark.parametrize("T", [1, 16, 33, 128, 512, 1024, 2048, 3900])
@pytest.mark.parametrize(("N", "K"), [(14336, 4096), (4096, 14336), (128256, 4096), (8192, 8192)])
def test_gram_scratch_is_laid_out_apart_and_smaller_than_the_gradient(T, N, K):
    plan = norm_plan.gram_plan(T, N, K, BF16)
    pairs = plan.side * (plan.side + 1) // 2
    blocks, parts = plan.blocks_n + plan.blocks_k, plan.parts_n + plan.parts_k
    assert plan.partials == (pairs + plan.side) * plan.block_t // norm_plan.SLICE_ROWS <= plan.columns_at
    assert plan.columns_at + blocks * (T + 1) <= plan.tiles_at
    assert plan.tiles_at + parts * pairs * plan.block_t**2 == plan.centred_at
    assert plan.centred_at + T * K // 2 <= plan.scratch
    assert plan.columns_at % 32 == plan.tiles_at % 32 == plan.centred_at % 32 == plan.features % 32 == 0
    assert plan.parts_n * plan.features >= N and plan.parts_k * plan.features >= K
    if norm_plan.gram_is_cheaper(T, N, K):
        assert 4 * plan.scratch <= 2 * N * K


def test_the_choice_fits_the_measurements():
    """Who was faster on an H200, unless by less than the host's further launches."""
    gram = {(T, N, 4096) for T in (128, 512, 1024, 2048) for N in (14336, 128256)} | {(512, 8192, 8192)}
    gemm = {(T, N, 4096) for T in (128, 512, 1024, 2048, 8192) for N in (1024, 4096)} | {(8192, 14336, 4096)}
    assert {case for case in gram | gemm if norm_plan.gram_is_cheaper(*case)} == gram


@pytest.mark.parametrize("shape", [(33, 64, 136), (64, 128, 256), (1, 200, 520)])
def test_descriptors_give_the_same_norm(shape, monkeypatch):
    pytest.importorskip("triton.tools.tensor_descriptor")
    if not tiles.INTERPRET and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no copy engine for tensors")
    T, N, K = shape
    dy, x = randn(T, N, dtype=BF16), randn(T, K, dtype=BF16, seed=1)
    monkeypatch.setattr(wgrad_norm, "processors", lambda device: 3)  # fewer programs than tiles
    wgrad_norm._descriptor_launches.cache_clear()
    got = wgrad_norm.descriptor_norm_sq(dy, x)
    assert same_bits([got], [wgrad_norm.descriptor_norm_sq(dy, x)])
    wgrad_norm._descriptor_launches.cache_clear()
    assert got.item() == pytest.approx(exact_norm_sq(dy, x), rel=NORM_RTOL)


def test_norm_tile_of_every_card(monkeypatch):
    device = torch.device(DEVICE)
    for hopper, tile in ((False, norm_plan.GENERIC), (True, norm_plan.HOPPER_NORM)):
        monkeypatch.setattr(norm_plan, "is_hopper", lambda _, hopper=hopper: hopper)
        assert norm_plan.norm_tile(4096, 4096, BF16, device) == tile
        assert norm_plan.norm_tile(384, 384, BF16, device) == norm_plan.GENERIC
        assert norm_plan.norm_tile(4096, 4096, F32, device) == norm_plan.FP32


def test_descriptors_only_where_they_can_and_pay(monkeypatch):
    monkeypatch.setattr(norm_plan, "is_hopper", lambda device: device.type == "cuda")
    monkeypatch.setattr(norm_plan, "processors", lambda device: 132)
    monkeypatch.setattr(norm_plan, "HAS_DESCRIPTORS", True)
    good = {
        "T": 2048,
        "N": 4096,
        "K": 4096,
        "strides": (4096, 1, 4096, 1),
        "aligned": (True, True),
        "operand": BF16,
        "device": torch.device("cuda:0"),
    }
    assert norm_plan.uses_descriptors(**good)
    for change in (
        {"T": 512},
        {"N": 1024, "T": 8192},  # a single round of tiles
        {"strides": (1, 2048, 4096, 1)},
        {"strides": (4096, 1, 4100, 1)},
        {"aligned": (True, False)},
        {"operand": F32},
        {"device": torch.device("cpu")},
    ):
        assert not norm_plan.uses_descriptors(**good | change), change
    monkeypatch.setattr(norm_plan, "HAS_DESCRIPTORS", False)
    assert not norm_plan.uses_descriptors(**good)


class OpLog(TorchDispatchMode):
    """Names of the torch operations under it."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("form", "launches"), [("gram", 4), ("gemm", 2)])
def test_number_of_launches_and_no_torch_operation_but_allocation(form, launches, monkeypatch):
    monkeypatch.undo()  # the poison writes
    dy, x = randn(40, 64, dtype=BF16), randn(40, 72, dtype=BF16, seed=1)
    calls = []
    monkeypatch.setattr(replay.Launch, "__call__", lambda self, *tensors: calls.append(self))
    with OpLog() as log:
        FORMS[form](dy, x)
    assert len(calls) == launches
    assert log.names == ["aten.empty.memory_format"] * 2


class FakeKernel:
    """Stands for a compiled kernel: remembers how it was launched."""

    arg_names = ("a_ptr", "n", "BLOCK", "EVEN")

    def __init__(self):
        self.log = []

    def __getitem__(self, grid):
        def run(*args, **options):
            self.log.append((grid, args, options))
            return self

        return run


def test_a_launch_is_looked_up_once(monkeypatch):
    kernel = FakeKernel()
    call = replay.Launch(kernel, (7,), (5,), {"BLOCK": 16, "EVEN": True}, num_warps=8)
    monkeypatch.setattr(replay, "REPLAYS", True)
    first, second, third, fourth = torch.zeros(4, 1)
    call(first)
    call(second)
    options = {"BLOCK": 16, "EVEN": True, "num_warps": 8, **tiles.LAUNCH_OPTIONS}
    assert kernel.log == [
        ((7, 1, 1), (first, 5), options),
        ((7, 1, 1), (second, 5, 16, True), {}),  # what Triton compiled takes every argument in order
    ]
    monkeypatch.setattr(replay, "REPLAYS", False)
    again = replay.Launch(kernel, (7,), (5,), {"BLOCK": 16, "EVEN": True})
    again(third)
    again(fourth)
    assert [args for _, args, _ in kernel.log[2:]] == [(third, 5), (fourth, 5)]


def test_a_launch_wants_its_constants_in_order():
    with pytest.raises(ValueError, match="do not end"):
        replay.Launch(FakeKernel(), (1,), (5,), {"EVEN": True, "BLOCK": 16})


def test_alignment_tells_shifted_tensors_apart():
    values = torch.zeros(64, dtype=BF16, device=DEVICE)
    assert replay.alignment(values, values[1:], values[8:]) == (True, False, True)
