"""No gradient of a linear weight is ever stored: counted from the tensors that operations create."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forge_hf import ForgeAdamW, ForgeLion, reference
from forge_hf.layers import ForgeLinear

from .models import EVERY_MODEL, Shared, build, loss_of

WIDTH, TOKENS = 64, 4
MODES = ["step", "backward"]


class BigTensors(TorchDispatchMode):
    """Storages of `elements` fp32 or more that any operation creates."""

    def __init__(self, elements: int, known: list[Tensor]) -> None:
        super().__init__()
        self.elements = elements
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.nbytes() >= 4 * self.elements and storage.data_ptr() not in self.known:
                    self.made.append(f"{func} {tuple(tensor.shape)}")
        return result


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH, bias=False),
        nn.Linear(WIDTH, WIDTH),
    ]
    return nn.Sequential(*layers)


def warmed(mode: str, kind: Any = ForgeAdamW) -> tuple[nn.Sequential, Any]:
    """A model and optimizer whose moments exist already."""
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters()) if mode == "stock" else kind(model, update=mode)
    model(torch.randn(TOKENS, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def counted(model: nn.Module, optimizer: Any) -> BigTensors:
    state = [
        value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    ]
    return BigTensors(WIDTH * WIDTH, [*model.parameters(), *state])


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", [ForgeAdamW, ForgeLion])
@pytest.mark.parametrize("mode", [*MODES, "stock"])
def test_nothing_of_the_weights_size_is_made_in_a_whole_step(mode, kind, checkpointed, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", WIDTH * 4)
    model, optimizer = warmed(mode, kind)
    x = torch.randn(TOKENS, WIDTH)
    with counted(model, optimizer) as big:
        if checkpointed:
            hidden = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        else:
            hidden = model(x)
        hidden.square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 if mode != "backward" else float("inf"))
        if mode != "stock":
            optimizer.step()
    if mode == "stock":
        assert len(big.made) >= 3  # the counter sees what torch makes
    else:
        assert big.made == []


def test_accumulation_in_both_modes_makes_nothing_big_while_pairs_are_cheaper(monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", WIDTH * 4)
    for mode in MODES:
        model, optimizer = warmed(mode)
        with counted(model, optimizer) as big:
            for _ in range(3):
                with optimizer.no_sync():
                    model(torch.randn(TOKENS, WIDTH)).square().mean().backward()
            assert optimizer.pending_bytes() > 0
            model(torch.randn(TOKENS, WIDTH)).square().mean().backward()
            optimizer.step()
        assert big.made == []
        assert optimizer.pending_bytes() == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", EVERY_MODEL)
def test_no_linear_weight_has_a_grad_after_backward(kind, mode):
    if kind.__name__ == "Outside":
        pytest.skip("autograd delivers half of that gradient itself")
    model = build(kind)
    optimizer = ForgeAdamW(model, update=mode)
    loss_of(model, 0).backward()
    layers = [module for module in model.modules() if type(module) is ForgeLinear]
    assert layers
    assert all(layer.weight.grad is None for layer in layers)
    assert (optimizer.pending_bytes() == 0) is (mode == "backward")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_held_bytes_never_exceed_the_gradients_that_torch_would_hold(mode, dtype):
    model = wide().to(dtype)
    optimizer = ForgeAdamW(model, update=mode)
    dense = sum(module.weight.nbytes for module in model if isinstance(module, nn.Linear))
    seen = []
    for _ in range(12):
        with optimizer.no_sync():
            model(torch.randn(11, WIDTH, dtype=dtype)).square().mean().backward()
        seen.append(optimizer.pending_bytes())
    assert all(0 < held <= dense for held in seen)
    assert seen[0] < seen[1] < seen[-1] == dense  # pairs first, then the dense sum


def test_layers_that_read_the_same_input_hold_it_once():
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
    optimizer = ForgeAdamW(model)
    x = torch.randn(TOKENS, WIDTH)
    sum(layer(x).square().sum() for layer in model).backward()
    assert optimizer.pending_bytes() == 4 * TOKENS * WIDTH * 4  # X and three dY


def test_slices_of_one_projection_do_not_keep_it_alive():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    optimizer = ForgeAdamW(model)
    big = torch.randn(50 * TOKENS, WIDTH)
    model(big[:TOKENS]).square().sum().backward()
    assert optimizer.pending_bytes() == 2 * TOKENS * WIDTH * 4


def test_moments_are_counted():
    model, optimizer = warmed("step")
    steps = 4 * len(list(model.parameters()))
    assert optimizer.state_bytes() == 2 * sum(p.nbytes for p in model.parameters()) + steps
    half = wide().bfloat16()
    optimizer = ForgeAdamW(half)
    half(torch.randn(2, WIDTH).bfloat16()).sum().backward()
    optimizer.step()
    assert optimizer.state_bytes() == 2 * sum(p.nbytes for p in half.parameters()) + steps


@pytest.mark.parametrize("mode", MODES)
def test_a_dropped_optimizer_frees_its_state_and_the_model_trains_as_stock(mode):
    model = build(Shared)
    optimizer = ForgeAdamW(model, update=mode)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    with optimizer.no_sync():
        loss_of(model, 1).backward()
    moment = weakref.ref(optimizer.state[model.first.weight]["exp_avg"])
    pending = weakref.ref(model.first._forge_receiver.gradient)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    assert moment() is None
    assert pending() is None
    model.zero_grad()
    stock = build(Shared)
    stock.load_state_dict(model.state_dict())
    for net in (model, stock):
        loss_of(net, 2).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))


def test_a_dropped_model_is_freed_with_its_optimizer():
    model = build()
    optimizer = ForgeAdamW(model)
    loss_of(model, 0).backward()
    optimizer.step()
    alive = weakref.ref(model.first.weight)
    del model, optimizer
    gc.collect()
    assert alive() is None
