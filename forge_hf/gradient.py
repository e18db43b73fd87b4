"""FactoredGradient: a weight gradient as a value computed on demand, not a tensor.

For Y = X W^T the gradient is G = dY^T X. Everything that anybody asks of G can be had from the pairs (dY, X):

    norm          ||G||^2 by a GEMM with a reduce, or from two small Gram matrices
    accumulation  more pairs: G = sum_s dY_s^T X_s
    projection    G Q = dY^T (X Q),  P^T G = (dY P)^T X (`projection.py` does that)
    update        tile by tile in a fused kernel (`optim.py` does that)

An embedding's gradient is the same with one-hot inputs, G = sum_t e_{ids_t} dY_t^T, and is held as (ids, dY):
a lookup. A weight that is embedding and head at once has pairs and lookups, and one gradient.

Bound: pairs cost T (N + K) elements, the dense gradient N K. As soon as the pairs of a weight would cost
more, they are summed into one dense buffer of the dtype that autograd would have used, so memory never
exceeds what torch needs. Lookups cost T K elements, their ids, and later their sums by row in fp32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .config import refuse
from .dispatch import backend_for
from .reference import accumulate_dense_

__all__ = ["FactoredGradient", "Lookup", "Segment", "compact", "norms_sq", "scale_all_"]


class Segment(NamedTuple):
    """One pair, with the versions its tensors had, so that a later write into them is noticed.

    `exchanged`: of a layer with the weight (in, out), so the layer's input is on the left, in `dy_TN`.
    """

    dy_TN: Tensor
    x_TK: Tensor
    versions: tuple[int, int]
    exchanged: bool = False


class Lookup(NamedTuple):
    """One use of an embedding: ids (T,), -1 for tokens without a gradient, and dY (T, K) with its version."""

    ids_T: Tensor
    dy_TK: Tensor
    version: int


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor keeps no count, and cannot be written to outside its mode
        return 0


def compact(tensor: Tensor) -> Tensor:
    """Copy a small view of a large storage, which holding the view would keep alive."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > 1.25 * tensor.nbytes else tensor


def _compact_bytes(tensor: Tensor) -> int:
    """Bytes that holding `compact(tensor)` costs; an expanded tensor costs less than its elements."""
    storage_bytes, tensor_bytes = tensor.untyped_storage().nbytes(), tensor.nbytes
    return tensor_bytes if storage_bytes > 1.25 * tensor_bytes else storage_bytes


class FactoredGradient:
    """Gradient of one weight: coefficient * (sum of dY^T X over segments + rows of lookups + buffer).

    Args:
        weight: The weight (N, K); gives shape, dtype of the dense form, and device.
        name: Its name, for messages.

    Attributes:
        segments: Held pairs, oldest first.
        looked_up: Held lookups, oldest first.
        buffer: Dense sum (N, K) in the weight's dtype, or None. Where it is in use nothing else is.
        coefficient: 0-d fp32 tensor that multiplies everything (clipping, unscaling), or None for 1.
        measurable: Whether its norm can be had, unless it was given up on purpose.
    """

    measurable = True

    def __init__(self, weight: Tensor, name: str = "weight") -> None:
        self.shape = weight.shape
        self.dtype = weight.dtype
        self.device = weight.device
        self.name = name
        self.segments: list[Segment] = []
        self.looked_up: list[Lookup] = []
        self.buffer: Tensor | None = None
        self.coefficient: Tensor | None = None
        self._weight = weight
        # 0-d, or a vector of the norms of many gradients and the place of this one
        self._norm_sq: Tensor | None = None
        self._place = 0

    @property
    def empty(self) -> bool:
        """Whether nothing has been added."""
        return not self.holds_factors and self.buffer is None

    @property
    def holds_factors(self) -> bool:
        """Whether output gradients are held, whose memory others may use too."""
        return bool(self.segments or self.looked_up)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the gradient that autograd would have stored."""
        return self.shape.numel() * self.dtype.itemsize

    def storages(self) -> dict[int, int]:
        """Bytes of each storage that is held, by address, so that tensors sharing one count once."""
        tensors = [self.buffer] if self.buffer is not None else self._factors()
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    def held_bytes(self) -> int:
        """Bytes held now."""
        return sum(self.storages().values())

    def add_pair(
        self,
        dy_TN: Tensor,
        x_TK: Tensor,
        bounded: bool = True,
        keep_input: Callable[[Tensor], Tensor] = compact,
        exchanged: bool = False,
    ) -> None:
        """Add dY^T X.

        Args:
            dy_TN: (T, N), gradient of the layer's output.
            x_TK: (T, K), its input, same dtype.
            bounded: Sum into a dense buffer when the pairs would need more memory than it. False for a pair
                that is consumed at once.
            keep_input: Returns the form in which the layer's input is held beyond this call: it or a copy.
            exchanged: `dy_TN` is the layer's input and `x_TK` the gradient of its output.
        """
        self._fold_coefficient()
        self._norm_sq = None
        dy_TN, x_TK = dy_TN.detach(), x_TK.detach()
        if self.buffer is not None:
            accumulate_dense_(self.buffer, dy_TN, x_TK)
            return
        if bounded:
            if self._exceeds_dense(self.looked_up, dy_TN, x_TK):
                accumulate_dense_(self._densify(), dy_TN, x_TK)
                return
            keep_left, keep_right = (keep_input, compact) if exchanged else (compact, keep_input)
            dy_TN, x_TK = keep_left(dy_TN), keep_right(x_TK)
        self.segments.append(Segment(dy_TN, x_TK, (_version(dy_TN), _version(x_TK)), exchanged))

    def add_lookup(self, ids_T: Tensor, dy_TK: Tensor) -> None:
        """Add dY_t to row ids_t for every token t.

        A table smaller than its tokens' gradients gets a dense buffer at once, even where the lookup is to be
        consumed now.

        Args:
            ids_T: (T,) integers in [-1, N), -1 for a token without a gradient. Kept, so not to be written to.
            dy_TK: (T, K), gradient of the embedding's output.
        """
        self._fold_coefficient()
        self._norm_sq = None
        lookup = Lookup(ids_T, dy_TK.detach(), 0)
        if self.buffer is None and self._exceeds_dense([*self.looked_up, lookup]):
            self._densify()
        if self.buffer is not None:
            backend_for(self._weight).accumulate_lookups_(self.buffer, [lookup[:2]])
            return
        dy_TK = compact(lookup.dy_TK)
        self.looked_up.append(Lookup(ids_T, dy_TK, _version(dy_TK)))

    def add_dense(self, grad: Tensor) -> None:
        """Add a gradient that exists as a tensor (N, K), such as one that autograd produced."""
        self._fold_coefficient()
        self._norm_sq = None
        self._densify().add_(grad)

    def accumulate(self, other: FactoredGradient) -> None:
        """Add another gradient of the same weight."""
        if other.coefficient is not None or other.buffer is not None:
            self.add_dense(other.dense())
            return
        for (dy_TN, x_TK), segment in zip(other.pairs(), other.segments, strict=True):
            self.add_pair(dy_TN, x_TK, exchanged=segment.exchanged)
        for ids_T, dy_TK in other.lookups():
            self.add_lookup(ids_T, dy_TK)

    def scale_(self, coefficient: Tensor) -> None:
        """Multiply by a 0-d tensor on this device, without touching the pairs and without synchronising."""
        coefficient = coefficient.detach().to(device=self.device, dtype=torch.float32)
        self.scale_by_(coefficient.clone() if self.coefficient is None else coefficient)

    def scale_by_(self, coefficient: Tensor) -> None:
        """`scale_` by a 0-d fp32 tensor on this device that nobody writes to: it is kept without a copy."""
        self.coefficient = coefficient if self.coefficient is None else self.coefficient * coefficient

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The held (dy_TN, x_TK).

        Raises:
            ForgeRefusal: a held tensor was written to since it was handed over.
        """
        pairs = []
        for dy_TN, x_TK, (dy_version, x_version), exchanged in self.segments:
            if _version(dy_TN) != dy_version:
                what = "input" if exchanged else "output gradient"
                raise refuse("pair_modified", what=what, param=self.name)
            if _version(x_TK) != x_version:
                what = "output gradient" if exchanged else "input"
                raise refuse("pair_modified", what=what, param=self.name)
            pairs.append((dy_TN, x_TK))
        return pairs

    def pairs_to_measure(self) -> list[tuple[Tensor, Tensor]]:
        """The held pairs, or those of the transposed gradient, which has the same norm.

        Inputs are what nearly repeats from token to token, so the Gram form centres the right side only, and
        inputs should be there (measured with inputs on the left: 4.0 times the norm). Raises as `pairs`.
        """
        pairs = self.pairs()
        if pairs and not self.looked_up and all(segment.exchanged for segment in self.segments):
            return [(right, left) for left, right in pairs]
        return pairs

    def lookups(self) -> list[tuple[Tensor, Tensor]]:
        """The held (ids_T, dy_TK).

        Raises:
            ForgeRefusal: a held gradient was written to since it was handed over.
        """
        if not self.looked_up:
            return []
        for lookup in self.looked_up:
            if _version(lookup.dy_TK) != lookup.version:
                raise refuse("pair_modified", what="output gradient", param=self.name)
        return [(lookup.ids_T, lookup.dy_TK) for lookup in self.looked_up]

    def norm_sq(self) -> Tensor:
        """||coefficient * G||_F^2 as a 0-d fp32 tensor."""
        norm_sq = self.unscaled_norm_sq()
        return norm_sq if self.coefficient is None else norm_sq * self.coefficient.square()

    def unscaled_norm_sq(self) -> Tensor:
        """||G||_F^2 before the coefficient; computed once, until something is added."""
        if self._norm_sq is None:
            if self.buffer is not None:
                self._norm_sq = torch.linalg.vector_norm(self.buffer, dtype=torch.float32).square()
            elif self.holds_factors:
                self._norm_sq = backend_for(self._weight).wgrad_norm_sq(
                    self.pairs_to_measure(), self.lookups()
                )
            else:
                self._norm_sq = torch.zeros((), dtype=torch.float32, device=self.device)
        return self._norm_sq[self._place] if self._norm_sq.ndim else self._norm_sq

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The gradient as a new tensor (N, K), in the weight's dtype or `dtype`; the pairs stay."""
        dtype = dtype or self.dtype
        result = torch.zeros(self.shape, dtype=dtype, device=self.device)
        if self.buffer is not None:
            result.copy_(self.buffer)
        for dy_TN, x_TK in self.pairs():
            accumulate_dense_(result, dy_TN, x_TK)
        if self.looked_up:
            backend_for(self._weight).accumulate_lookups_(result, self.lookups())
        return result if self.coefficient is None else result.mul_(self.coefficient)

    def _densify(self) -> Tensor:
        """Sum pairs and lookups into the dense buffer, one after the other, freeing each."""
        if self.buffer is None:
            pairs, lookups = self.pairs(), self.lookups()
            self.buffer = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self.segments.clear()
            self.looked_up.clear()
            while pairs:
                accumulate_dense_(self.buffer, *pairs.pop(0))
            while lookups:
                backend_for(self._weight).accumulate_lookups_(self.buffer, [lookups.pop(0)])
        return self.buffer

    def _factors(self) -> list[Tensor]:
        tensors = [tensor for segment in self.segments for tensor in segment[:2]]
        return tensors + [tensor for lookup in self.looked_up for tensor in lookup[:2]]

    def _exceeds_dense(self, lookups: list[Lookup], *more: Tensor) -> bool:
        """Whether holding what is held, `lookups` and `more` takes more memory than the dense gradient.

        The use of lookups counts as well: their sums by row in fp32, an index of the rows, the sorted ids,
        and one dY where there are several.
        """
        held = [tensor for segment in self.segments for tensor in segment[:2]]
        held += [tensor for lookup in lookups for tensor in lookup[:2]]
        cost = sum(map(_compact_bytes, [*held, *more]))
        if not lookups:
            return cost > self.dense_bytes
        cost += 4 * self.shape[0] + sum(4 * dy_TK.numel() + 12 * len(ids) for ids, dy_TK, _ in lookups)
        if len(lookups) > 1:
            cost += sum(lookup.dy_TK.nbytes for lookup in lookups)
        return cost > self.dense_bytes

    def _fold_coefficient(self) -> None:
        """Apply the coefficient before more is added, since it belongs to what was there."""
        if self.coefficient is not None:
            self._densify().mul_(self.coefficient)
            self.coefficient = None


def norms_sq(gradients: Sequence[FactoredGradient]) -> list[Tensor]:
    """||coefficient * G||_F^2 of all gradients, as fp32 vectors that together have one element for each.

    In few launches, which fill what `FactoredGradient.norm_sq` keeps. The vectors, each on one device, and
    their elements come in an order that is the same for the same gradients.
    """
    _measure(dict.fromkeys([g for g in gradients if g._norm_sq is None or not g._norm_sq.ndim]))
    # By vector and coefficient; those that share the first have mostly been scaled together.
    groups: defaultdict[tuple[int, int], list[FactoredGradient]] = defaultdict(list)
    for gradient in gradients:
        groups[id(gradient._norm_sq), id(gradient.coefficient)].append(gradient)
    vectors = []
    for members in groups.values():
        vector, coefficient = members[0]._norm_sq, members[0].coefficient
        assert vector is not None
        places = [gradient._place for gradient in members]
        if sorted(places) != list(range(len(vector))):
            vector = torch.stack([vector[place] for place in places])
        vectors.append(vector if coefficient is None else vector * coefficient.square())
    return vectors


def _measure(gradients: Iterable[FactoredGradient]) -> None:
    """Give each gradient a place in a vector of squared norms before the coefficients."""
    buffers: defaultdict[tuple[torch.device, torch.dtype], list[FactoredGradient]] = defaultdict(list)
    pairs: defaultdict[tuple[torch.device, ModuleType], list[FactoredGradient]] = defaultdict(list)
    others: defaultdict[torch.device, list[FactoredGradient]] = defaultdict(list)
    for gradient in gradients:
        if gradient._norm_sq is None and gradient.buffer is not None:
            buffers[gradient.device, gradient.buffer.dtype].append(gradient)
        elif gradient._norm_sq is None and len(gradient.segments) == 1 and not gradient.looked_up:
            pairs[gradient.device, backend_for(gradient._weight)].append(gradient)
        else:
            others[gradient.device].append(gradient)
    for members in buffers.values():
        tensors = [gradient.buffer for gradient in members if gradient.buffer is not None]
        norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
        _place(members, torch.stack(norms).square())
    for (_, backend), members in pairs.items():
        # Sides as in `pairs_to_measure`, without its calls for every weight.
        sides = [gradient.pairs()[0][:: -1 if gradient.segments[0].exchanged else 1] for gradient in members]
        _place(members, backend.wgrad_norms_sq(sides))
    for members in others.values():
        _place(members, torch.stack([gradient.unscaled_norm_sq() for gradient in members]))


def _place(gradients: list[FactoredGradient], vector: Tensor) -> None:
    for place, gradient in enumerate(gradients):
        gradient._norm_sq, gradient._place = vector, place


def scale_all_(gradients: Iterable[FactoredGradient], coefficient: Tensor) -> None:
    """`FactoredGradient.scale_` of each by the same 0-d tensor, of which one copy a device is made.

    Gradients that shared a coefficient share the new one, which is computed once.
    """
    copies: dict[torch.device, Tensor] = {}
    # Old coefficients with the new ones; they stay alive here, so that no new tensor gets the id of one.
    scaled: dict[tuple[torch.device, int], tuple[Tensor | None, Tensor | None]] = {}
    for gradient in gradients:
        old = gradient.coefficient
        key = gradient.device, id(old)
        if key in scaled:
            gradient.coefficient = scaled[key][1]
            continue
        if gradient.device not in copies:
            copies[gradient.device] = coefficient.detach().to(gradient.device, torch.float32, copy=True)
        gradient.scale_by_(copies[gradient.device])
        scaled[key] = old, gradient.coefficient
