"""Whole runs of models with embeddings, tied and not, against torch's optimizers, weight for weight."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge_hf import ForgeAdamW, ForgeLion, ForgeRefusal, ForgeSGD, reference
from forge_hf.slot import slot_of

from .embedding_models import (
    EVERY_MODEL,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Checkpointed,
    Outside,
    Padded,
    Scaled,
    Table,
    Three,
    Tied,
    TiedPadded,
    Twice,
    Untied,
    build,
    loss_of,
    train,
)
from .models import same_bits, way_off
from .test_memory import BigTensors
from .tolerances import NORM_FP32, THREE_WAY, THREE_WAY_STOCHASTIC, WAY_FP32_SMALL

LR = 1e-2
MODES = ["step", "backward"]


def compare(kind: Any, ours: Any, theirs: Any, device: str = "cpu", **loop: Any) -> tuple[Any, Any]:
    """Train two copies, hold their end points together, and return the norms of both."""
    start, model, reference_model = (build(kind).to(device) for _ in range(3))
    norms = train(model, ours(model), **loop), train(reference_model, theirs(reference_model), **loop)
    assert way_off(model, reference_model, start) < WAY_FP32_SMALL
    for (name, ours_end), theirs_end in zip(
        model.named_parameters(), reference_model.parameters(), strict=True
    ):
        assert (ours_end - theirs_end).abs().max() < LR, name  # rows of a table that few tokens reach
    return norms


def adamw(mode: str, **settings: Any) -> tuple[Any, Any]:
    return (
        lambda model: ForgeAdamW(model, lr=LR, update=mode, **settings),
        lambda model: torch.optim.AdamW(model.parameters(), lr=LR, **settings),
    )


@pytest.mark.parametrize("micro_batches", [(1,), (3, 3, 1)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", EVERY_MODEL)
def test_every_use_of_a_table(kind, mode, micro_batches):
    if mode == "backward" and kind is Outside:
        pytest.skip("refused: see below")
    compare(kind, *adamw(mode, weight_decay=0.3), micro_batches=micro_batches)


@pytest.mark.parametrize("max_norm", [1e-3, 0.3, float("inf")])
@pytest.mark.parametrize("kind", EVERY_MODEL)
def test_clipping_with_a_rule_that_feels_the_scale(kind, max_norm):
    ours, theirs = compare(
        kind,
        lambda model: ForgeSGD(model, lr=0.3, momentum=0.9),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        max_norm=max_norm,
        micro_batches=(2,),
    )
    assert ours == pytest.approx(theirs, rel=NORM_FP32)


@pytest.mark.parametrize("kind", [Table, Tied, Three, Twice])
def test_norm_of_backward_mode(kind):
    ours, theirs = compare(kind, *adamw("backward"), max_norm=float("inf"))
    assert ours == pytest.approx(theirs, rel=NORM_FP32)


@pytest.mark.parametrize("kind", [Table, Untied, TiedPadded, Twice, Three])
@pytest.mark.parametrize("mode", MODES)
def test_the_kernels_train_alike(kind, mode, monkeypatch):
    monkeypatch.setenv("FORGE_HF_BACKEND", "triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    compare(kind, *adamw(mode), device=device, steps=2, micro_batches=(1, 2))


def test_rows_without_tokens_decay_and_move_by_their_momentum():
    model, theirs = build(Untied), build(Untied)
    optimizers = (
        ForgeAdamW(model, lr=LR, weight_decay=0.5),
        torch.optim.AdamW(theirs.parameters(), lr=LR, weight_decay=0.5),
    )
    for net, optimizer in zip((model, theirs), optimizers, strict=True):
        for ids in ([[1, 2]], [[5, 5]], [[5, 6]]):
            net(torch.tensor(ids)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for row, moved_by in ((1, "momentum"), (30, "decay")):
        assert not torch.equal(model.words.weight[row], build(Untied).words.weight[row]), moved_by
        torch.testing.assert_close(model.words.weight[row], theirs.words.weight[row], rtol=1e-5, atol=1e-6)
    moments = [optimizer.state[net.words.weight]["exp_avg_sq"] for net, optimizer in
               zip((model, theirs), optimizers, strict=True)]  # fmt: skip
    torch.testing.assert_close(*moments, rtol=1e-5, atol=1e-12)


def distances_to_fp32(kind: Any, steps: int, **low: Any) -> tuple[float, float]:
    ours, theirs = 0.0, 0.0
    dtype = torch.float32 if low.get("autocast") else torch.bfloat16
    for seed in range(2):
        start, exact = (build(kind, seed, dtype).float() for _ in range(2))
        train(exact, torch.optim.AdamW(exact.parameters(), lr=1e-3), steps)
        model, other = (build(kind, seed, dtype) for _ in range(2))
        train(model, ForgeAdamW(model, lr=1e-3), steps, **low)
        train(other, torch.optim.AdamW(other.parameters(), lr=1e-3), steps, **low)
        ours += way_off(model, exact, start)
        theirs += way_off(other, exact, start)
    return ours, theirs


@pytest.mark.parametrize("kind", [Table, Tied, Three])
def test_pure_bf16_is_closer_to_fp32_than_torch(kind):
    ours, theirs = distances_to_fp32(kind, 20)
    assert ours < theirs * THREE_WAY_STOCHASTIC


@pytest.mark.parametrize("kind", [Tied, Three])
def test_bf16_autocast_is_as_close_to_fp32_as_torch(kind):
    ours, theirs = distances_to_fp32(kind, 10, autocast=True)
    assert ours < theirs * THREE_WAY


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Table, Tied, Three])
def test_resumed_run_has_the_bits_of_the_whole_one(kind, mode):
    whole, first = build(kind), build(kind)
    train(whole, ForgeAdamW(whole, lr=LR, update=mode), 6)
    optimizer = ForgeAdamW(first, lr=LR, update=mode)
    train(first, optimizer, 3)
    second = build(kind, seed=5)
    second.load_state_dict(first.state_dict())
    resumed = ForgeAdamW(second, lr=LR, update=mode)
    resumed.load_state_dict(optimizer.state_dict())
    train(second, resumed, 3, first_step=3)
    assert same_bits(second, whole)


def test_loads_a_checkpoint_of_torch_and_gives_one_back():
    model, theirs = build(Tied), build(Tied)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR)
    train(theirs, optimizer, 3)
    model.load_state_dict(theirs.state_dict())
    ours = ForgeAdamW(model, lr=LR)
    ours.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(ours.state_dict()))
    start = build(Tied)
    start.load_state_dict(theirs.state_dict())
    train(model, ours, 3, first_step=3)
    train(theirs, optimizer, 3, first_step=3)
    assert way_off(model, theirs, start) < WAY_FP32_SMALL


@pytest.mark.parametrize("kind", [Tied, Twice, Scaled])
def test_a_tied_weight_is_updated_when_all_its_uses_have_come_back(kind):
    model = build(kind)
    optimizer = ForgeAdamW(model, update="backward")
    seen = []
    # The block's input gradient arrives after the head's use and before the table's.
    model.block.register_full_backward_hook(lambda *_: seen.append(slot_of(model.words.weight).updated))
    loss_of(model, 0).backward()
    assert seen == [False]
    assert slot_of(model.words.weight).updated
    assert optimizer.pending_bytes() == 0


def test_a_late_use_of_the_table_is_refused_in_backward_mode():
    model = build(Untied)
    optimizer = ForgeAdamW(model, update="backward")
    ids = torch.tensor([[1, 2]])
    late = model.words(ids).sum()
    assert optimizer.update_mode == "backward"
    model(ids).sum().backward()
    assert not slot_of(model.words.weight).updated  # the other graph's use is still awaited
    late.backward()
    assert slot_of(model.words.weight).updated
    with pytest.raises(ForgeRefusal, match=r"'words.weight' was already updated .* another forward"):
        model.words(ids)


def test_a_retained_graph_is_refused_the_second_time_in_backward_mode():
    model = build(Untied)
    optimizer = ForgeAdamW(model, update="backward")
    loss = model.words(torch.tensor([1])).sum()
    loss.backward(retain_graph=True)
    assert optimizer.pending_bytes() == 0
    with pytest.raises(ForgeRefusal, match=r"A gradient for 'words.weight' arrived after"):
        loss.backward()


def test_a_table_read_outside_its_module_is_refused_in_backward_mode():
    model = build(Outside)
    optimizer = ForgeAdamW(model, update="backward")
    loss_of(model, 0).backward()
    with pytest.raises(ForgeRefusal, match="'words.weight' arrived after its weight was already updated"):
        optimizer.step()


def test_lion_too():
    """Against torch's SGD there is no Lion to compare with: the same table as a dense gradient."""
    model, dense = build(Tied), build(Tied)
    train(model, ForgeLion(model, lr=1e-3))
    dense.words.weight.register_hook(lambda grad: grad)  # moves it to ordinary gradients
    optimizer = ForgeLion(dense, lr=1e-3)
    assert {entry.name: entry.path for entry in optimizer.report()}["words.weight"] == "dense"
    train(dense, optimizer)
    assert (model.words.weight - dense.words.weight).abs().max() < 1e-5


BIG_VOCABULARY, BIG_WIDTH, TOKENS = 512, 32, 4


class Big(nn.Module):
    """A table that is far larger than its tokens."""

    def __init__(self, tied: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(BIG_VOCABULARY, BIG_WIDTH, dtype=dtype)
        self.head = nn.Linear(BIG_WIDTH, BIG_VOCABULARY if tied else 2, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids))


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", [*MODES, "stock"])
def test_nothing_of_the_tables_size_is_made_in_a_whole_step(mode, tied, accumulated, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", BIG_WIDTH * 16)
    model = Big(tied)
    stock = mode == "stock"
    optimizer = torch.optim.AdamW(model.parameters()) if stock else ForgeAdamW(model, update=mode)
    ids = torch.randint(0, BIG_VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(0))
    model(ids).square().mean().backward()
    optimizer.step()  # makes the moments
    optimizer.zero_grad()
    state = [v for values in optimizer.state.values() for v in values.values() if torch.is_tensor(v)]
    with BigTensors(BIG_VOCABULARY * BIG_WIDTH, [*model.parameters(), *state]) as big:
        for _ in range(accumulated - 1):
            with contextlib.nullcontext() if stock else optimizer.no_sync():
                model(ids).square().mean().backward()
        model(ids).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if mode == "backward" else 1.0)
        if not stock:
            optimizer.step()
    assert bool(big.made) is stock


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_held_after_backward_is_ids_and_output_gradients(tied):
    model = Big(tied)
    optimizer = ForgeAdamW(model, update="step")
    with BigTensors(BIG_VOCABULARY * BIG_WIDTH, list(model.parameters())) as big:
        model(torch.arange(TOKENS)).square().mean().backward()
    assert big.made == []
    assert model.words.weight.grad is None
    table = TOKENS * BIG_WIDTH * 4 + TOKENS * 4  # dY and 32-bit ids
    head = TOKENS * (BIG_VOCABULARY + BIG_WIDTH) if tied else TOKENS * (2 + BIG_WIDTH)
    assert optimizer.pending_bytes() == (table + 4 * head if tied or head < 64 else table + 64 * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_held_bytes_never_exceed_the_gradients_that_torch_would_hold(tied, dtype):
    model = Big(tied, dtype)
    optimizer = ForgeAdamW(model)
    dense = sum(parameter.nbytes for parameter in model.parameters())
    seen = []
    for _ in range(40):
        ids = torch.arange(21) if not tied else torch.arange(3)
        model(ids).square().mean().backward()
        seen.append(optimizer.pending_bytes())
    assert all(0 < held <= dense for held in seen)
    assert seen[0] < dense == seen[-1]  # lookups first, then the dense sum


def test_one_output_gradient_of_three_tables_is_held_once():
    model = nn.ModuleList(nn.Embedding(200, 8) for _ in range(3))
    optimizer = ForgeAdamW(model)
    ids = torch.arange(5)
    (sum(table(ids) for table in model) * torch.randn(5, 8)).sum().backward()
    assert optimizer.pending_bytes() == 5 * 8 * 4 + 3 * 5 * 4  # one dY and three ids


def test_a_table_smaller_than_its_tokens_gets_a_dense_sum_in_backward_mode_too(monkeypatch):
    """Its fp32 sums by row would be larger than its gradient."""
    made = []
    original = reference.accumulate_lookups_
    monkeypatch.setattr(reference, "accumulate_lookups_", lambda *args: made.append(1) or original(*args))
    model = build(Three)
    optimizer = ForgeAdamW(model, update="backward")
    loss_of(model, 0).backward()
    assert optimizer.pending_bytes() == 0
    assert len(made) == 2  # positions and types; the words are looked up


@pytest.mark.parametrize("mode", MODES)
def test_ids_may_be_overwritten_and_output_gradients_be_shared(mode):
    """The caller's ids are copied; `.grad` of an added parameter does not share a held dY's memory."""

    class Added(Untied):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(2 * LENGTH, WIDTH))

        def embed(self, ids: torch.Tensor) -> torch.Tensor:
            return self.words(ids) + self.bias.view(2, LENGTH, WIDTH)  # whose gradient is a view of dY

    model, theirs = build(Added), build(Added)
    optimizers = ForgeSGD(model, lr=0.5, update=mode), torch.optim.SGD(theirs.parameters(), lr=0.5)
    for net, optimizer in zip((model, theirs), optimizers, strict=True):
        ids = torch.arange(2 * LENGTH).view(2, LENGTH)
        net(ids).square().sum().backward()
        ids.fill_(VOCABULARY - 1)
        norm = float("inf") if mode == "backward" else 0.1
        torch.nn.utils.clip_grad_norm_(net.parameters(), norm)
        optimizer.step()
    for ours, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_table_of_padding_only_gets_a_gradient_of_zeros():
    model, theirs = build(Padded), build(Padded)
    optimizers = ForgeAdamW(model, lr=LR), torch.optim.AdamW(theirs.parameters(), lr=LR)
    for net, optimizer in zip((model, theirs), optimizers, strict=True):
        for ids in ([[3, 3]], [[]]):
            net(torch.tensor(ids, dtype=torch.long)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.words.weight, theirs.words.weight, rtol=1e-6, atol=1e-7)
    assert optimizers[0].state[model.words.weight]["step"] == 2


def test_checkpointed_models_use_their_table_more_than_once():
    """Guards the runs above: recomputed uses are counted once each."""
    model = build(Checkpointed)
    optimizer = ForgeAdamW(model, update="backward")
    loss_of(model, 0).backward()
    assert slot_of(model.words.weight).updated
    assert optimizer.pending_bytes() == 0


def test_fp16_loss_scale_finds_infinite_gradients_of_a_table():
    model = build(Table)
    optimizer = ForgeAdamW(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = model.words.weight.detach().clone()
    scaler.scale(F.relu(model(torch.tensor([[1]]))).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.words.weight, before)
    assert scaler.get_scale() == 1.0


class NoGradient(torch.autograd.Function):
    """Passes no gradient on."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


def test_an_output_without_a_gradient_gives_the_table_none():
    model = build(Tied)
    optimizer = ForgeAdamW(model, update="backward")
    ids = torch.tensor([[1, 2]])
    (NoGradient.apply(model.words(ids)).sum() + model.block(torch.ones(1, WIDTH)).sum()).backward()
    optimizer.step()
    assert "step" in optimizer.state[model.block.weight]
    assert "step" not in optimizer.state[model.words.weight]
    assert same_bits(model.words, build(Tied).words)


def test_a_changed_output_gradient_is_refused_before_anything_moves():
    model = build(Untied)
    optimizer = ForgeAdamW([model.head.weight, model.words.weight], attach_to=model)
    loss_of(model, 0).backward()
    before = copy.deepcopy(model)
    slot_of(model.words.weight).gradient.looked_up[0].dy_TK.add_(1.0)
    with pytest.raises(ForgeRefusal, match="The output gradient of 'words.weight' was changed in place"):
        optimizer.step()
    assert same_bits(model, before)
