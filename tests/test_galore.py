"""ForgeGaLoreAdamW in plain loops against the published rule, written out here on dense float64 gradients."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forge_hf
from forge_hf import ForgeConfigError, ForgeGaLoreAdamW, ForgeRefusal
from forge_hf.subspace import low_rank_shape, sides
from tests.models import Checkpointed, Mlp, ReentrantCheckpointed, Shared, TiedEmbedding, TiedLinears, build
from tests.tolerances import NORM_FP32, WAY_FP32_SMALL, WAY_GALORE, WAY_GALORE_8BIT

SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
PROJECTION: dict[str, Any] = {"rank": 5, "update_proj_gap": 10, "scale": 0.5}


def batch(seed: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Inputs (size, 3, 12) and targets (size, 3, 6) that can be learned."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 12, generator=generator)
    return x, torch.sin(2 * x[..., :6])


def losses(model: nn.Module, seed: int, parts: int = 1) -> Iterable[Tensor]:
    """The mean loss of one batch in `parts`, which add up to it."""
    x, y = batch(seed)
    dtype = next(model.parameters()).dtype
    torch.manual_seed(seed)  # what the model draws
    for a, b in zip(x.to(dtype).chunk(parts), y.to(dtype).chunk(parts), strict=True):
        yield (model(a) - b).square().mean() / parts


def facing(rows: Tensor, old: Tensor) -> Tensor:
    """An SVD leaves the signs of its vectors open; these are turned towards the ones before."""
    if not len(old):
        return rows
    return rows * torch.where((rows * old).sum(1, keepdim=True) < 0, -1.0, 1.0)


class PublishedRule:
    """Algorithm 2 of the paper on dense gradients, in the model's precision, with AdamW's decay."""

    def __init__(self, model: nn.Module, targets: set[str], proj_type: str = "std", gap: int = 10) -> None:
        self.model, self.targets, self.proj_type, self.gap = model, targets, proj_type, gap
        self.state: dict[str, dict[str, Any]] = {}

    def step(self, count: int) -> None:
        for name, parameter in self.model.named_parameters():
            state = self.state.setdefault(name, {})
            grad = parameter.grad
            left = right = None
            if name in self.targets:
                if (count - 1) % self.gap == 0:
                    u, _, vh = torch.linalg.svd(grad, full_matrices=False)
                    state["u"] = facing(u[:, : PROJECTION["rank"]].t(), state.get("u", u[:, :0]).t()).t()
                    state["vh"] = facing(vh[: PROJECTION["rank"]], state.get("vh", vh[:0]))
                has_left, has_right = sides(self.proj_type, grad.shape)
                left, right = state["u"] if has_left else None, state["vh"] if has_right else None
            low = grad if left is None else left.t() @ grad
            low = low if right is None else low @ right.t()
            m = state.setdefault("m", torch.zeros_like(low))
            v = state.setdefault("v", torch.zeros_like(low))
            beta1, beta2 = SETTINGS["betas"]
            m.mul_(beta1).add_(low, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(low, low, value=1 - beta2)
            update = (m / (1 - beta1**count)) / ((v / (1 - beta2**count)).sqrt() + SETTINGS["eps"])
            update = update if left is None else left @ update
            update = update if right is None else update @ right
            scale = PROJECTION["scale"] if name in self.targets else 1.0
            lr = SETTINGS["lr"]
            parameter.data.mul_(1 - lr * SETTINGS["weight_decay"]).sub_(lr * scale * update)


def published(
    start: nn.Module,
    steps: int,
    targets: set[str],
    clip: float = 0.0,
    dtype: torch.dtype = torch.float64,
    **how: Any,
) -> nn.Module:
    """Train a float64 copy of `start`."""
    model = copy.deepcopy(start).to(dtype)
    rule = PublishedRule(model, targets, **how)
    for count in range(1, steps + 1):
        model.zero_grad()
        for loss in losses(model, count):
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        rule.step(count)
    return model


def ours(start: nn.Module, steps: int, parts: int = 1, clip: float = 0.0, **options: Any) -> Any:
    """Train a copy of `start`; returns the model and its optimizer."""
    model = copy.deepcopy(start)
    optimizer = ForgeGaLoreAdamW(model, **{**SETTINGS, **PROJECTION, "subspace": "svd", **options})
    run(model, optimizer, range(1, steps + 1), parts, clip)
    return model, optimizer


def run(model: nn.Module, optimizer: Any, seeds: Iterable[int], parts: int = 1, clip: float = 0.0) -> None:
    """One step per seed, the micro-batches before the last inside `no_sync`."""
    for seed in seeds:
        pieces = list(losses(model, seed, parts)) if parts > 1 else None
        if pieces is None:
            next(iter(losses(model, seed))).backward()
        else:
            with optimizer.no_sync():
                for loss in pieces[:-1]:
                    loss.backward()
            pieces[-1].backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def flat(model: nn.Module) -> Tensor:
    """All parameters as one float64 vector."""
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def off(model: nn.Module, exact: nn.Module, start: nn.Module) -> float:
    """Distance of the end points as a fraction of the way travelled."""
    return float((flat(model) - flat(exact)).norm() / (flat(exact) - flat(start)).norm())


TARGETS = {"first.weight", "middle.weight", "head.weight"}


@pytest.mark.parametrize("mode", ["step", "backward"])
@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "left", "right", "full"])
def test_parity_with_the_published_rule(proj_type, mode):
    start = build()
    exact = published(start, 50, TARGETS, proj_type=proj_type)
    model, _ = ours(start, 50, proj_type=proj_type, update=mode)
    limit = WAY_GALORE
    if proj_type == "full":
        # R is diagonal at a refresh, and Adam turns what rounding leaves beside the diagonal into full steps.
        limit += off(published(start, 50, TARGETS, dtype=torch.float32, proj_type=proj_type), exact, start)
    assert off(model, exact, start) < limit


def test_parity_with_eight_bits():
    """Moments of 4,096 elements and more are 8-bit."""

    class Wide(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle = nn.Linear(12, 640), nn.Linear(640, 24)

    start = build(Wide)
    exact = published(start, 50, TARGETS)
    model, optimizer = ours(start, 50, state="8bit", rank=8)
    assert off(model, published_with_rank(start, 8), start) < WAY_GALORE_8BIT
    assert optimizer.state[model.first.weight]["exp_avg_codes"].dtype == torch.int8
    assert exact is not None


def published_with_rank(start: nn.Module, rank: int) -> nn.Module:
    """The published rule with another rank."""
    before, PROJECTION["rank"] = PROJECTION["rank"], rank
    try:
        return published(start, 50, TARGETS)
    finally:
        PROJECTION["rank"] = before


@pytest.mark.parametrize("kind", [Shared, TiedLinears, TiedEmbedding, Checkpointed, ReentrantCheckpointed])
@pytest.mark.parametrize("mode", ["step", "backward"])
def test_weights_that_are_read_several_times(kind, mode):
    """Reused and tied weights, and both kinds of checkpointing."""
    start = build(kind)
    targets = {name for name, p in start.named_parameters() if p.dim() == 2}
    exact = published(start, 20, targets)
    model, optimizer = ours(start, 20, update=mode, target_modules=["first", "middle", "head"])
    assert {e.name for e in optimizer.report() if "projected" in e.reason} == targets
    assert off(model, exact, start) < WAY_GALORE


@pytest.mark.parametrize("mode, measure", [("step", True), ("backward", True), ("backward", False)])
def test_accumulation(mode, measure):
    """Three micro-batches are one batch, over refreshes of the basis too."""
    start = build()
    whole, _ = ours(start, 25, update=mode, measure_norm=measure)
    model, _ = ours(start, 25, parts=4, update=mode, measure_norm=measure)
    assert off(model, whole, start) < WAY_GALORE


def test_clipping_by_the_whole_gradients_norm():
    start = build()
    clip = 0.05
    exact = published(start, 30, TARGETS, clip=clip)
    model, optimizer = ours(start, 30, clip=clip)
    assert off(model, exact, start) < WAY_GALORE
    assert off(model, published(start, 30, TARGETS), start) > 0.01  # it clips
    next(iter(losses(model, 99))).backward()
    norm = forge_hf.clip_grad_norm_(optimizer, float("inf"))
    plain = copy.deepcopy(model)
    forge_hf.detach(plain)
    next(iter(losses(plain, 99))).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
    assert float(norm) == pytest.approx(float(expected), rel=NORM_FP32)


def test_only_projections_are_held():
    """In step mode a pair goes as soon as its projection is known; fewer tokens than that stay pairs."""
    model = build()
    optimizer = ForgeGaLoreAdamW(model, **SETTINGS, **PROJECTION)
    run(model, optimizer, [1])  # the bases are in the state
    next(iter(losses(model, 2))).backward()
    expected = 0
    for name, parameter in model.named_parameters():
        if name in TARGETS:
            rows, columns = low_rank_shape("std", PROJECTION["rank"], parameter.shape)
            expected += 4 * rows * columns
    assert optimizer.pending_bytes() == expected
    assert all(model.get_parameter(name).grad is None for name in TARGETS)
    optimizer.step()
    optimizer.zero_grad()
    torch.manual_seed(3)
    model(torch.randn(1, 12)).square().sum().backward()
    assert 0 < optimizer.pending_bytes() < expected
    held = {type(slot.gradient).__name__: slot.gradient.low_rank for slot in optimizer.tape.slots}
    assert held == {"ProjectedGradient": None}


def test_modes_agree_to_the_bit(monkeypatch):
    """With three tokens, which stay pairs until they are projected in either mode."""
    few = batch
    monkeypatch.setattr("tests.test_galore.batch", lambda seed: few(seed, size=1))
    start, options = build(), {"subspace": "power", "rank": 1}
    step, optimizer = ours(start, 25, update="step", **options)
    backward, _ = ours(start, 25, update="backward", **options)
    assert torch.equal(flat(step), flat(backward))
    next(iter(losses(step, 26))).backward()
    assert all(slot.gradient.low_rank is not None for slot in optimizer.tape.slots)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype, options", [
    (torch.float32, {}),
    (torch.bfloat16, {}),
    (torch.bfloat16, {"state": "fp32", "weight_bits": 32}),
])  # fmt: skip
def test_formats_and_backends(monkeypatch, backend, dtype, options):
    """The kernels give what plain torch gives; 16-bit weights round, or keep their low bits."""
    if backend == "triton" and dtype != torch.float32 and not torch.cuda.is_available():
        pytest.skip("the interpreter's bf16 products are wrong")
    start = build(dtype=dtype)
    exact, _ = ours(start.float(), 12)
    monkeypatch.setenv("FORGE_HF_BACKEND", backend)
    model, _ = ours(build(dtype=dtype), 12, **options)
    limit = WAY_FP32_SMALL if dtype == torch.float32 else 0.05 if options else 0.2
    assert off(model, exact, start) < limit


@pytest.mark.parametrize("refresh", ["together", "staggered"])
@pytest.mark.parametrize("moments", ["keep", "rotate"])
@pytest.mark.parametrize("subspace", ["power", "svd"])
def test_resume_is_bit_equal(refresh, moments, subspace):
    """From the middle of a refresh cycle, through `weights_only=True`."""
    start, options = build(), {"refresh": refresh, "moments": moments, "subspace": subspace}
    whole, _ = ours(start, 27, **options)
    model, optimizer = ours(start, 13, **options)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model = copy.deepcopy(start)
    optimizer = ForgeGaLoreAdamW(model, **{**SETTINGS, **PROJECTION, **options})
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    run(model, optimizer, range(14, 28))
    assert torch.equal(flat(model), flat(whole))


def test_staggered_refreshes_come_one_after_the_other():
    model = build()
    optimizer = ForgeGaLoreAdamW(
        model, **SETTINGS, **{**PROJECTION, "update_proj_gap": 6}, refresh="staggered"
    )
    bases: dict[str, Any] = {}
    changes = []
    for step in range(1, 14):
        run(model, optimizer, [step])
        for name in sorted(TARGETS):
            state = optimizer.state[model.get_parameter(name)]
            basis = state.get("basis_right", state.get("basis_left"))
            if bases.get(name) is not basis:
                changes.append((step, name))
            bases[name] = basis
    first = [(1, name) for name in sorted(TARGETS)]
    assert changes == [
        *first, (3, "head.weight"), (5, "middle.weight"), (7, "first.weight"),
        (9, "head.weight"), (11, "middle.weight"), (13, "first.weight"),
    ]  # fmt: skip


def test_rotation_changes_the_run_and_keeps_it_right():
    """Rotated moments are those of the gradients so far in the new basis; kept ones are not."""
    start = build()
    kept, _ = ours(start, 25)
    rotated, _ = ours(start, 25, moments="rotate")
    first, _ = ours(start, 10)
    first_rotated, _ = ours(start, 10, moments="rotate")
    assert torch.equal(flat(first), flat(first_rotated))
    assert off(rotated, kept, start) > 1e-3
    final = float(next(iter(losses(rotated, 100))))
    assert final < 1.2 * float(next(iter(losses(kept, 100))))


def test_a_second_backward_loses_the_norm_and_says_so():
    model = build()
    optimizer = ForgeGaLoreAdamW(model, **SETTINGS, **PROJECTION)
    run(model, optimizer, [1])
    for seed in (2, 3):
        next(iter(losses(model, seed))).backward()
    with pytest.raises(ForgeRefusal, match=r"'first.weight' is left, and backward\(\) ran again.*no_sync"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()  # unclipped it is the sum
    optimizer.zero_grad()
    same = build()
    other = ForgeGaLoreAdamW(same, **SETTINGS, **PROJECTION)
    run(same, other, [1])
    sum(next(iter(losses(same, seed))) for seed in (2, 3)).backward()
    other.step()
    assert off(model, same, build()) < WAY_FP32_SMALL


def test_a_norm_that_was_given_up():
    model = build()
    optimizer = ForgeGaLoreAdamW(model, **SETTINGS, **PROJECTION, measure_norm=False)
    next(iter(losses(model, 1))).backward()
    assert torch.isnan(forge_hf.clip_grad_norm_(optimizer, float("inf")))
    with pytest.raises(ForgeRefusal, match="measure_norm=False gave up the norm of the gradient of"):
        forge_hf.clip_grad_norm_(optimizer, 1.0)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_unusable_gradient_at_a_refresh(value):
    """The old basis stays, once said; zero gradients move no direction."""
    model = build()
    optimizer = ForgeGaLoreAdamW(model, **{**SETTINGS, "weight_decay": 0.0}, **PROJECTION)
    run(model, optimizer, range(1, 11))
    state = optimizer.state[model.first.weight]
    before = state["basis_right"].clone()
    x, y = batch(11)
    with pytest.warns(UserWarning, match="'head.weight' was 0 or not finite .* the old one is kept"):
        ((model(x) - y).square().mean() * value).backward()
    optimizer.step()
    assert torch.equal(state["basis_right"], before)


def test_a_rank_that_is_changed_in_the_middle():
    model, optimizer = ours(build(), 2)
    group = next(group for group in optimizer.param_groups if group.get("rank"))
    for key, value in (("rank", 3), ("proj_type", "left")):
        before, group[key] = group[key], value
        with pytest.raises(ForgeRefusal, match="rank or proj_type of '.*.weight' was changed"):
            next(iter(losses(model, 3))).backward()
            optimizer.step()
        group[key] = before
        optimizer.zero_grad()
        assert optimizer.pending_bytes() == 0
    run(model, optimizer, [3])
    optimizer.state.clear()
    group["rank"] = 3
    run(model, optimizer, [4])
    assert optimizer.state[model.first.weight]["exp_avg"].shape == (3, 24)


def test_weights_outside_the_targets_are_adamws():
    model, other = build(), build()
    optimizer = ForgeGaLoreAdamW(model, **SETTINGS, **PROJECTION, target_modules=["middle"])
    plain = torch.optim.AdamW(other.parameters(), **SETTINGS)
    next(iter(losses(model, 1))).backward()
    next(iter(losses(other, 1))).backward()
    optimizer.step()
    plain.step()
    for name, parameter in model.named_parameters():
        apart = float((parameter - other.get_parameter(name)).detach().abs().max())
        assert apart > 1e-4 if name == "middle.weight" else apart < 1e-6


def test_groups_as_in_galore_torch():
    """Groups with a rank are projected with their own settings, and add_param_group takes them too."""
    model = build()
    groups = [
        {"params": [model.first.weight], "rank": 3, "update_proj_gap": 7, "scale": 0.1, "proj_type": "left"},
        {"params": [p for n, p in model.named_parameters() if n not in TARGETS], "weight_decay": 0.0},
    ]
    optimizer = ForgeGaLoreAdamW(groups, attach_to=model, lr=1e-2)
    optimizer.add_param_group({"params": [model.middle.weight], "rank": 4})
    assert [group.get("rank") for group in optimizer.param_groups] == [3, None, 4]
    assert optimizer.param_groups[2]["update_proj_gap"] == 200
    run(model, optimizer, range(1, 4))
    assert optimizer.state[model.first.weight]["exp_avg"].shape == (3, 12)
    assert optimizer.state[model.middle.weight]["exp_avg"].shape == (4, 24)
    reasons = {entry.name: entry.reason for entry in optimizer.report()}
    assert reasons["first.weight"] == "linear layer, projected: rank 3, left"
    with pytest.raises(ForgeRefusal, match="'head.bias' has 1 dimensions, so it cannot be projected"):
        optimizer.add_param_group({"params": [model.head.bias], "rank": 4})


@pytest.mark.parametrize("options, message", [
    ({"rank": 0}, "rank=0 is not a whole number of at least 1"),
    ({"rank": True}, "rank=True is not a whole number"),
    ({"update_proj_gap": 0}, "update_proj_gap=0"),
    ({"scale": 0.0}, "scale=0.0 is not a number above 0"),
    ({"scale": float("inf")}, "scale=inf"),
    ({"proj_type": "rigth"}, "did you mean 'right'"),
    ({"subspace": "qr"}, "Valid: power, svd"),
    ({"refresh": "stagger"}, "did you mean 'staggered'"),
    ({"moments": "rotated"}, "did you mean 'rotate'"),
    ({"statte": "fp32"}, "did you mean 'state'"),
])  # fmt: skip
def test_bad_options(options, message):
    with pytest.raises(ForgeConfigError, match=message):
        ForgeGaLoreAdamW(build(), **options)


@pytest.mark.parametrize("change, message", [
    ({"rank": 4}, "written with rank=5, and this optimizer has rank=4"),
    ({"scale": 0.25}, "scale=0.5"),
    ({"proj_type": "left"}, "proj_type=std"),
    ({"target_modules": ["head"]}, "parameters"),
])  # fmt: skip
def test_checkpoints_that_do_not_fit(change, message):
    model, optimizer = ours(build(), 2)
    saved = optimizer.state_dict()
    other = ForgeGaLoreAdamW(build(), **{**SETTINGS, **PROJECTION, **change})
    with pytest.raises(ForgeRefusal, match=message):
        other.load_state_dict(saved)
    assert not other.state


def test_a_damaged_basis_is_refused():
    _, optimizer = ours(build(), 2)
    for change, message in (
        (torch.zeros(2, 2), r"basis_right.*\(2, 2\)"),
        (torch.zeros(5, 12, dtype=torch.int32), "basis_right.*int32"),
    ):
        saved = copy.deepcopy(optimizer.state_dict())
        index = next(key for key, state in saved["state"].items() if "basis_right" in state)
        shape = saved["state"][index]["basis_right"].shape
        saved["state"][index]["basis_right"] = (
            change if change.dtype != torch.int32 else change.new_zeros(shape)
        )
        other = ForgeGaLoreAdamW(build(), **SETTINGS, **PROJECTION)
        with pytest.raises(ForgeRefusal, match=message):
            other.load_state_dict(saved)
        assert not other.state


def test_adamws_checkpoint_is_refused():
    model = build()
    plain = forge_hf.ForgeAdamW(model, lr=1e-2)
    run(model, plain, [1])
    with pytest.raises(ForgeRefusal):
        ForgeGaLoreAdamW(build(), **SETTINGS, **PROJECTION).load_state_dict(plain.state_dict())


def test_pickle_and_deepcopy():
    model, optimizer = ours(build(), 3)
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.projection == optimizer.projection
    assert [group.get("rank") for group in copied.param_groups] == [
        g.get("rank") for g in optimizer.param_groups
    ]
    average = copy.deepcopy(model)
    assert torch.equal(flat(average), flat(model))


def test_a_weight_with_a_gradient_hook_is_projected_from_its_dense_gradient():
    start = build()
    exact = published(start, 12, TARGETS)
    model = copy.deepcopy(start)
    seen = []
    model.middle.weight.register_hook(lambda grad: seen.append(grad.shape))
    optimizer = ForgeGaLoreAdamW(model, **SETTINGS, **PROJECTION, subspace="svd")
    run(model, optimizer, range(1, 13))
    assert len(seen) == 12
    assert off(model, exact, start) < WAY_GALORE
