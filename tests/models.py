"""Small plain torch models that use their weights in every way a model can, and the loop that trains them.

All take x of shape (..., 12) and return (..., 6).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IN, HIDDEN, OUT = 12, 24, 6


class Mlp(nn.Module):
    """Three linear layers, one without bias, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, HIDDEN)
        self.middle = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, OUT)

    def body(self, h: Tensor) -> Tensor:
        return F.gelu(self.middle(h))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(F.gelu(self.first(x)))))


class Shared(Mlp):
    """One layer applied three times, as in ALBERT."""

    def body(self, h: Tensor) -> Tensor:
        for _ in range(3):
            h = h + F.gelu(self.middle(h))
        return h


class TiedLinears(Mlp):
    """Two linear layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(HIDDEN, HIDDEN)
        self.again.weight = self.middle.weight

    def body(self, h: Tensor) -> Tensor:
        return self.again(F.gelu(self.middle(h)))


class TiedEmbedding(Mlp):
    """An embedding whose weight is also the head of a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(HIDDEN, HIDDEN)
        self.words.weight = self.middle.weight

    def body(self, h: Tensor) -> Tensor:
        ids = (h.detach()[..., 0].float().abs() * 100).long() % HIDDEN
        return F.gelu(self.middle(h + self.words(ids)))


class Recurrent(Mlp):
    """A cell in a loop over the tokens."""

    def body(self, h: Tensor) -> Tensor:
        state = torch.zeros_like(h[..., 0, :])
        outputs = []
        for token in h.unbind(-2):
            state = torch.tanh(self.middle(state) + token)
            outputs.append(state)
        return torch.stack(outputs, -2)


class Outside(Mlp):
    """A weight that is also read outside its module."""

    def body(self, h: Tensor) -> Tensor:
        return F.gelu(self.middle(h)) + 0.3 * F.linear(h, self.middle.weight)


class InPlace(Mlp):
    """In-place activations and scalings on the outputs of layers."""

    def body(self, h: Tensor) -> Tensor:
        return F.relu_(self.middle(h)) + F.relu_(self.middle(h).add_(1.0))


class Skipping(Mlp):
    """A layer that every other forward leaves out."""

    calls = 0

    def body(self, h: Tensor) -> Tensor:
        self.calls += 1
        return F.gelu(self.middle(h)) if self.calls % 2 else h


class Checkpointed(Mlp):
    """A layer inside two checkpointed blocks and outside of them, with dropout."""

    reentrant: bool = False

    def _block(self, h: Tensor) -> Tensor:
        return h + F.dropout(F.gelu(self.middle(h)), 0.2, self.training)

    def body(self, h: Tensor) -> Tensor:
        for _ in range(2):
            h = checkpoint(self._block, h, use_reentrant=self.reentrant)
        return self._block(h) if self.training else h


class ReentrantCheckpointed(Checkpointed):
    """The same with reentrant checkpoints, whose forward runs without grad."""

    reentrant = True


EVERY_MODEL = [
    Mlp,
    Shared,
    TiedLinears,
    TiedEmbedding,
    Recurrent,
    Outside,
    InPlace,
    Skipping,
    Checkpointed,
    ReentrantCheckpointed,
]


def build(kind: Callable[[], nn.Module] = Mlp, seed: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """A model with the same weights for the same seed."""
    torch.manual_seed(seed)
    return kind().to(dtype)


def batch(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs (2, 3, 12) and targets (2, 3, 6); also seeds what the model draws."""
    torch.manual_seed(seed)
    return torch.randn(2, 3, IN).to(dtype), torch.randn(2, 3, OUT).to(dtype)


def loss_of(model: nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Mean squared error on batch `seed`."""
    x, target = batch(seed, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return F.mse_loss(model(x).to(wide), target.to(wide))


def decay_groups(model: nn.Module, weight_decay: float = 0.3, lr: float = 1e-2) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not, and the vectors have a rate of their own."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": lr / 3},
    ]


def train(
    model: nn.Module,
    optimizer: Any,
    steps: int = 10,
    micro_batches: Sequence[int] = (1,),
    max_norm: float | None = None,
    scheduler: Any = None,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    first_step: int = 0,
) -> list[float]:
    """Train as any plain loop does.

    Args:
        model: The model.
        optimizer: Forge or torch.
        steps: Optimizer steps.
        micro_batches: Micro-batches per step, repeated over the steps.
        max_norm: Clip through torch.nn.utils by this norm.
        scheduler: Stepped after every optimizer step.
        autocast: Run the forward under autocast in this dtype.
        dtype: Of the data.
        first_step: Number of the first step, when going on with a run.

    Returns:
        The gradient norm of every step, when clipping.
    """
    norms = []
    for step in range(first_step, first_step + steps):
        count = micro_batches[step % len(micro_batches)]
        for part in range(count):
            hold = hasattr(optimizer, "no_sync") and part < count - 1
            with optimizer.no_sync() if hold else contextlib.nullcontext():
                with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                    loss = loss_of(model, 1000 * step + part, dtype) / count
                loss.backward()
        if max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        (model if step % 2 else optimizer).zero_grad()
    return norms


def flat(model: nn.Module | Iterable[Tensor]) -> Tensor:
    """All weights in one float64 vector."""
    tensors = model.parameters() if isinstance(model, nn.Module) else model
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def way_off(ours: nn.Module, theirs: nn.Module, start: nn.Module) -> float:
    """Distance of the end points over the way travelled by `theirs`."""
    end = flat(theirs)
    return ((flat(ours) - end).norm() / (end - flat(start)).norm()).item()


def same_bits(first: nn.Module, second: nn.Module) -> bool:
    """Whether all weights are equal bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def snapshot(model: nn.Module) -> nn.Module:
    """A copy that belongs to no optimizer."""
    return copy.deepcopy(model)
