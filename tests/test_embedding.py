"""The swapped embedding: stock outputs and gradients; the stock path where (ids, dY) would not be exact."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from forge_hf import ForgeAdamW, ForgeSGD, detach
from forge_hf.embedding import ForgeEmbedding
from forge_hf.slot import slot_of

from .embedding_models import ScaledEmbedding, Tied, TiedPadded, build, loss_of
from .models import same_bits

ROWS, WIDTH = 30, 5


def table(dtype: torch.dtype = torch.float32, **options: object) -> nn.Embedding:
    torch.manual_seed(3)
    return nn.Embedding(ROWS, WIDTH, **options).to(dtype)


def paths(optimizer: object) -> dict[str, tuple[str, str]]:
    return {entry.name: (entry.path, entry.reason) for entry in optimizer.report()}


IDS = {
    "one": lambda: torch.tensor(4),
    "repeated": lambda: torch.tensor([4, 0, 4, 29, 4]),
    "matrix": lambda: torch.tensor([[1, 2, 0], [1, 1, 7]]),
    "expanded": lambda: torch.arange(5).unsqueeze(0).expand(3, 5),
    "transposed": lambda: torch.arange(6).view(2, 3).t(),
    "int32": lambda: torch.tensor([3, 3, 0], dtype=torch.int32),
    "nothing": lambda: torch.zeros(2, 0, dtype=torch.long),
}


@pytest.mark.parametrize("reduction", ["sum", "square"])
@pytest.mark.parametrize("padding_idx", [None, 0, 4, -1])
@pytest.mark.parametrize("name", IDS)
def test_output_and_update_of_any_ids(name, padding_idx, reduction):
    ours, theirs = table(padding_idx=padding_idx), table(padding_idx=padding_idx)
    optimizer = ForgeSGD(ours, lr=1.0)
    assert type(ours) is ForgeEmbedding
    ids = IDS[name]()
    outputs = [net(ids) for net in (ours, theirs)]
    assert torch.equal(*outputs)
    for output in outputs:
        (output.sum() if reduction == "sum" else output.square().sum()).backward()
    assert ours.weight.grad is None
    assert slot_of(ours.weight).gradient is not None
    expected = theirs.weight - theirs.weight.grad
    optimizer.step()
    assert torch.allclose(ours.weight, expected, atol=1e-5)


def test_the_input_may_be_named_and_the_output_written_to():
    ours, theirs = table(), table()
    optimizer = ForgeSGD(ours, lr=1.0)
    for net in (ours, theirs):
        F.relu_(net(input=torch.tensor([[1, 2], [1, 3]])).mul_(2.0)).square().sum().backward()
    expected = theirs.weight - theirs.weight.grad
    optimizer.step()
    assert torch.allclose(ours.weight, expected, atol=1e-5)


def test_an_output_that_is_made_a_leaf_of_gradients_stays_as_it_is():
    """What `enable_input_require_grads` does, in a forward hook."""
    ours = table()
    optimizer = ForgeSGD(ours, lr=1.0)
    ours.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    before = ours.weight.detach().clone()
    ours(torch.tensor([1, 1])).sum().backward()
    optimizer.step()
    assert torch.equal(before[1] - ours.weight[1], torch.full((WIDTH,), 2.0))


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_autograd_grad_and_create_graph(padding_idx):
    ours, theirs = table(padding_idx=padding_idx), table(padding_idx=padding_idx)
    optimizer = ForgeSGD(ours, lr=1.0)
    ids = torch.tensor([1, 1, 2])
    gradients = []
    for net in (ours, theirs):
        (first,) = torch.autograd.grad(net(ids).pow(3).sum(), net.weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), net.weight)
        gradients.append((first.detach(), second))
    for got, want in zip(*gradients, strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-6)
    assert optimizer.pending_bytes() == 0


def test_gradient_penalty_is_exact():
    model, theirs = build(Tied), build(Tied)
    optimizers = ForgeAdamW(model, lr=1e-2), torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for step in range(3):
        for net, optimizer in zip((model, theirs), optimizers, strict=True):
            loss = loss_of(net, step)
            (g,) = torch.autograd.grad(loss, net.block.weight, create_graph=True)
            (loss + g.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, want in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(ours, want, atol=1e-5)


@pytest.mark.parametrize("when", ["before_forward", "before_backward"])
@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_on_the_table_are_honoured(hook, when):
    ours, theirs = table(), table()
    optimizer = ForgeSGD(ours, lr=1.0)
    seen = []

    def half(value: torch.Tensor) -> torch.Tensor | None:
        seen.append(tuple(value.shape))
        if hook == "register_hook":
            return value / 2
        value.grad.div_(2)
        return None

    for net in (ours, theirs):
        if when == "before_forward":
            handle = getattr(net.weight, hook)(half)
        loss = net(torch.tensor([1, 1, 2])).square().sum()
        if when == "before_backward":
            handle = getattr(net.weight, hook)(half)
        loss.backward()
        handle.remove()
    expected = theirs.weight - theirs.weight.grad
    optimizer.step()
    assert seen == [(ROWS, WIDTH)] * 2
    assert torch.allclose(ours.weight, expected, atol=1e-5)


def test_a_table_frozen_between_forward_and_backward_gets_no_gradient():
    ours = table()
    optimizer = ForgeSGD(ours, lr=1.0)
    before = ours.weight.detach().clone()
    loss = ours(torch.tensor([1])).sum()
    ours.weight.requires_grad_(False)
    loss.backward()
    optimizer.step()
    assert torch.equal(ours.weight, before)


def test_functional_calls_transforms_and_traces_see_a_stock_layer():
    ours = table()
    optimizer = ForgeSGD(ours, lr=1.0)
    ids = torch.tensor([[1, 2], [2, 2]])
    other = {"weight": torch.randn(ROWS, WIDTH)}
    assert torch.equal(functional_call(ours, other, ids), F.embedding(ids, other["weight"]))
    loss = lambda params: functional_call(ours, params, ids).square().sum()  # noqa: E731
    got = grad(loss)(dict(ours.named_parameters()))["weight"]
    want = grad(lambda weight: F.embedding(ids, weight).square().sum())(ours.weight)
    assert torch.allclose(got, want)
    assert torch.equal(vmap(ours)(ids), F.embedding(ids, ours.weight))
    assert torch.equal(torch.jit.trace(ours, ids)(ids), F.embedding(ids, ours.weight))
    assert optimizer.pending_bytes() == 0


def test_a_compiled_table_is_a_stock_one():
    ours, theirs = table(), table()
    optimizer = ForgeSGD(ours, lr=1.0)
    ids = torch.tensor([1, 1, 2])
    torch.compile(ours, backend="eager")(ids).square().sum().backward()
    theirs(ids).square().sum().backward()
    expected = theirs.weight - theirs.weight.grad
    optimizer.step()
    assert torch.allclose(ours.weight, expected, atol=1e-5)


OPTIONS = {
    "max_norm": ({"max_norm": 1.0}, "max_norm rewrites rows"),
    "scale_grad_by_freq": ({"scale_grad_by_freq": True}, "scale_grad_by_freq divides"),
    "sparse": ({"sparse": True}, "sparse=True asks for sparse gradients"),
}


@pytest.mark.parametrize("mode", ["step", "backward"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_need_the_gradient_itself_take_the_ordinary_path(option, when, mode):
    settings, reason = OPTIONS[option]

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        net = nn.Sequential(table(**(settings if when == "before" else {})), nn.Linear(WIDTH, 2))
        return net

    ours, theirs = model(), model()
    optimizer = ForgeSGD(ours, lr=0.1, update=mode)
    if when == "before":
        path, why = paths(optimizer)["0.weight"]
        assert path == "dense" and why.startswith(reason)
    for net in (ours, theirs):
        for name, value in settings.items():
            setattr(net[0], name, value)
        net(torch.tensor([1, 1, 2])).square().sum().backward()
    assert ours[0].weight.grad is not None
    assert ours[0].weight.grad.is_sparse == (option == "sparse")
    if option != "sparse":
        torch.optim.SGD(theirs.parameters(), lr=0.1).step()
        optimizer.step()
        for got, want in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(got, want, atol=1e-6)


class Functional(nn.Embedding):
    """Reads its table without super()."""

    def forward(self, ids):
        return F.embedding(ids, self.weight)


class Both(nn.Embedding):
    """Reads its table with super() and without."""

    def forward(self, ids):
        return super().forward(ids) + self.weight[0]


class AsksForDtype(ScaledEmbedding):
    """A second level of super(), and a question to the weight, as in Gemma."""

    def forward(self, ids):
        return super().forward(ids, 2.0).to(self.weight.dtype)


@pytest.mark.parametrize(
    "kind, path",
    [(ScaledEmbedding, "pair"), (AsksForDtype, "pair"), (Functional, "dense"), (Both, "dense")],
)
@pytest.mark.parametrize("mode", ["step", "backward"])
def test_subclasses_with_a_forward_of_their_own(kind, path, mode):
    torch.manual_seed(0)
    ours = nn.Sequential(kind(ROWS, WIDTH), nn.Linear(WIDTH, 2))
    theirs = copy.deepcopy(ours)
    optimizer = ForgeSGD(ours, lr=0.1, update=mode)
    assert paths(optimizer)["0.weight"] == (
        path,
        "embedding" if path == "pair" else f"{kind.__name__} has a forward of its own",
    )
    assert isinstance(ours[0], kind) and isinstance(ours[0], ForgeEmbedding) is (path == "pair")
    for net in (ours, theirs):
        net(torch.tensor([1, 1, 2])).square().sum().backward()
    assert (ours[0].weight.grad is None) is (path == "pair")
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    optimizer.step()
    for got, want in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(got, want, atol=1e-6)
    copied = pickle.loads(pickle.dumps(ours))
    assert type(copied[0]) is kind
    detach(ours)
    assert type(ours[0]) is kind


def test_copies_are_stock_and_detach_restores():
    model = build(TiedPadded)
    optimizer = ForgeAdamW(model)
    loss_of(model, 0).backward()
    optimizer.step()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.words) is nn.Embedding
        assert other.words.padding_idx == 3
        assert other.words.weight is other.head.weight
        assert same_bits(other, model)
    assert list(model.state_dict()) == ["words.weight", "block.weight", "block.bias", "head.weight"]
    optimizer.detach()
    assert type(model.words) is nn.Embedding and type(model.head) is nn.Linear


def test_report_counts_the_users_of_a_tied_table():
    model = build(Tied)
    model.other = nn.Embedding(40, 8)
    model.other.weight = model.words.weight
    assert paths(ForgeAdamW(model))["words.weight"] == ("pair", "tied: 2 embeddings and 1 linear layer")
    model.other = nn.Embedding(40, 8, max_norm=1.0)
    model.other.weight = model.words.weight
    assert paths(ForgeAdamW(model))["words.weight"][0] == "dense"
    model.other = nn.EmbeddingBag(40, 8)
    model.other.weight = model.words.weight
    assert paths(ForgeAdamW(model))["words.weight"] == ("dense", "shared with EmbeddingBag 'other.weight'")
    model.other = nn.Embedding(40, 8)
    model.other.weight = model.words.weight
    model.head = nn.Linear(8, 40)
    assert paths(ForgeAdamW(model))["words.weight"] == ("pair", "2 embeddings")


def test_a_table_left_alone_by_the_optimizer_is_untouched():
    model = build(Tied)
    model.words.weight.requires_grad_(False)
    optimizer = ForgeAdamW(model)
    assert paths(optimizer)["words.weight"] == ("frozen", "requires_grad is False")
    before = model.words.weight.detach().clone()
    loss_of(model, 0).backward()
    optimizer.step()
    assert torch.equal(model.words.weight, before)
    assert type(model.words) is nn.Embedding


def test_a_resized_table_falls_back_to_the_stock_path():
    """As `resize_token_embeddings` does after the optimizer was built."""
    model = build(Tied)
    optimizer = ForgeAdamW(model)
    model.words.weight = nn.Parameter(torch.randn(50, 8))
    model.words(torch.tensor([45])).sum().backward()
    assert model.words.weight.grad is not None
    assert optimizer.pending_bytes() == 0


def test_zero_grad_drops_or_zeroes_what_is_pending():
    model = build(Tied)
    optimizer = ForgeAdamW(model, lr=1e-2, weight_decay=0.0)
    loss_of(model, 0).backward()
    model.zero_grad()
    assert optimizer.pending_bytes() == 0
    before = model.words.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.words.weight, before)
    loss_of(model, 0).backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert optimizer.state[model.words.weight]["step"] == 1  # a gradient of zeros is one, as in torch
    assert torch.equal(model.words.weight, before)
