"""Small models whose embeddings are used in every way a model can, and the loop that trains them.

All take ids (B, S) below VOCABULARY and return (B, S, VOCABULARY).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, LENGTH = 40, 8, 3


class Table(nn.Module):
    """Nothing but embeddings: logits are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids)


class Untied(nn.Module):
    """Words, a block, a head of its own."""

    padding_idx: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, padding_idx=self.padding_idx)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        return self.words(ids)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.gelu(self.block(self.embed(ids))))


class Padded(Untied):
    """A row that gets no gradient."""

    padding_idx = 3


class Tied(Untied):
    """The head is the table."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.words.weight


class TiedPadded(Tied):
    """The padding row gets the head's gradient only."""

    padding_idx = 3


class Twice(Tied):
    """The table is read twice per forward, and once as the head."""

    def embed(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.words(ids.flip(-1)).square()


class Three(Untied):
    """Words, expanded positions and types, as in RoBERTa; the last two are smaller than their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(LENGTH + 2, WIDTH, padding_idx=1)
        self.types = nn.Embedding(2, WIDTH)

    def embed(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0).expand(ids.shape)
        return self.words(ids) + self.positions(positions) + self.types(torch.zeros_like(ids))


class ScaledEmbedding(nn.Embedding):
    """Word embeddings times the root of the width, as in BART and Gemma."""

    def forward(self, ids: Tensor, factor: float = 1.0) -> Tensor:
        return super().forward(ids) * (factor * math.sqrt(WIDTH))


class Scaled(Tied):
    """A tied table whose lookups are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.words = ScaledEmbedding(VOCABULARY, WIDTH)
        self.head.weight = self.words.weight


class Outside(Untied):
    """The table is also read without its module."""

    def embed(self, ids: Tensor) -> Tensor:
        return self.words(ids) + F.embedding(ids.flip(-1), self.words.weight)


class Sometimes(Tied):
    """Every other forward leaves the table out, but for the head."""

    calls = 0

    def embed(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return self.words(ids) if self.calls % 2 else torch.ones(*ids.shape, WIDTH).to(self.head.weight)


class Checkpointed(Tied):
    """Embedding, block and head are recomputed in backward."""

    reentrant = False

    def forward(self, ids: Tensor) -> Tensor:
        # Reentrant checkpointing wants an input with a gradient.
        start = torch.zeros(*ids.shape, WIDTH, dtype=self.words.weight.dtype, requires_grad=True)
        run = lambda function, h: checkpoint(function, h, use_reentrant=self.reentrant)  # noqa: E731
        h = run(lambda h: h + self.words(ids), start)
        h = run(lambda h: F.gelu(self.block(h + 0.1 * self.words(ids))), h)
        return run(self.head, h)


class ReentrantCheckpointed(Checkpointed):
    """The same, with the forward run without grad."""

    reentrant = True


EVERY_MODEL = [
    Table, Untied, Padded, Tied, TiedPadded, Twice, Three, Scaled, Outside, Sometimes, Checkpointed,
    ReentrantCheckpointed,
]  # fmt: skip


def build(kind: Callable[[], nn.Module], seed: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """A model with the same weights for the same seed."""
    torch.manual_seed(seed)
    return kind().to(dtype)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    """Cross entropy on a batch whose ids repeat; rows 20 to 39 are in no batch."""
    generator = torch.Generator().manual_seed(seed)
    device = model.words.weight.device
    ids, target = (torch.randint(0, 20, (2, LENGTH), generator=generator).to(device) for _ in range(2))
    logits = model(ids).double() if model.words.weight.dtype == torch.float64 else model(ids).float()
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def train(
    model: nn.Module,
    optimizer: Any,
    steps: int = 8,
    micro_batches: Sequence[int] = (1,),
    max_norm: float | None = None,
    autocast: bool = False,
    first_step: int = 0,
) -> list[float]:
    """Train as any plain loop does; returns the gradient norm of every step, when clipping."""
    norms = []
    for step in range(first_step, first_step + steps):
        count = micro_batches[step % len(micro_batches)]
        for part in range(count):
            hold = hasattr(optimizer, "no_sync") and part < count - 1
            with optimizer.no_sync() if hold else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = loss_of(model, 1000 * step + part) / count
                loss.backward()
        if max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms
