"""Entry of the Triton backend: the functions that `forge_hf.reference` also offers, with their checks.

    wgrad_update_   w, moments = rule(w, coefficient * G, moments),   G = sum_s dy_s^T x_s in fp32
    dense_update_   the same from a dense gradient
    wgrad_norm_sq   ||G||_F^2
    wgrad_norms_sq  the same of many weights at once
    accumulate_lookups_   G += sum_t e_{ids_t} dy_t^T

Every function launches on the device of its tensors, whichever device is current.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ..quantized import Moment
from ..scalars import StepScalars
from ..updates import Update
from .checks import Lookup, Segment, check_lookups, check_update, merge
from .dense_groups import dense_groups_
from .elementwise import launch_dense_update
from .embedding import accumulate_rows, launch_table_update, rows_norm_sq, sum_rows
from .grouped_norm import grouped_norms_sq
from .groups import update_groups_
from .norm_plan import uses_gram
from .paths import choose, chunk_of, on_device_of
from .rules import rule_arguments
from .tiles import INTERPRET
from .wgrad_chunks import launch_wgrad_chunks
from .wgrad_gram import centred_gram_norm_sq
from .wgrad_hopper import HopperUpdate
from .wgrad_norm import gemm_norm_sq
from .wgrad_update import FusedUpdate, fused_update

__all__ = [
    "Lookup",
    "Segment",
    "accumulate_lookups_",
    "available",
    "dense_update_",
    "wgrad_norm_sq",
    "wgrad_norms_sq",
    "wgrad_update_",
]


#: A larger weight keeps the card busy for longer than its launch takes the host.
GROUP_ELEMENTS = 1 << 25


def available(tensor: torch.Tensor) -> bool:
    """Whether these kernels can run where `tensor` is: CUDA from sm_80 on, ROCm, or Triton's interpreter."""
    return INTERPRET or (tensor.is_cuda and _device_supported(tensor.device.index))


@functools.cache
def _device_supported(index: int) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(index) >= (8, 0)


def wgrad_update_(
    weight: torch.Tensor,
    segments: Sequence[Segment],
    moments: Sequence[Moment],
    rule: str,
    scalars: StepScalars,
    *,
    coefficient: torch.Tensor | None = None,
    rng_key: int | None = None,
    low: torch.Tensor | None = None,
    want_norm_sq: bool = False,
    lookups: Sequence[Lookup] = (),
) -> torch.Tensor | None:
    """Update `weight` (N, K) and its moments in place by the gradient of `segments`, which is never stored.

    Args:
        weight: (N, K), contiguous, fp32, bf16 or fp16.
        segments: Pairs (dy (T, N), x (T, K)), any strides; T may differ and may be 0. Several segments are
            concatenated along T into a temporary of their own size, sum(T) * (N + K) elements.
        moments: In the order of `Rule.moment_names`, contiguous: tensors like `weight`, fp32 or bf16, or
            `QuantizedMoment`s.
        rule: "adamw", "lion" or "sgd".
        scalars: The numbers of this step.
        coefficient: 0-d fp32 tensor on the weight's device that multiplies the gradient.
        rng_key: In [0, 2^32), rounds 16-bit weights and bf16 moments stochastically; None rounds to nearest.
        low: Low bits of a bf16 weight, like it, int8 or int16 (see `reference.py`), or None.
        want_norm_sq: Also return ||G||^2 before the coefficient.
        lookups: (ids (T,), dy (T, K)) with integers in [-1, N): dy_t is added to row ids_t, to none for -1.
            Several are concatenated as segments are; their sums take T K fp32 elements for the call.

    Returns:
        0-d fp32 tensor, or None.

    Raises:
        ValueError: shapes, dtypes, strides or devices do not fit.
    """
    with on_device_of(weight):
        if len(segments) == 1 and not lookups:
            known = _known_update(weight, segments[0], moments, rule, scalars, coefficient, rng_key, low)
            if known is not None:
                arguments = rule_arguments(rule, scalars, coefficient, rng_key, moments, low, weight.device)
                return known.run(weight, *segments[0], arguments, want_norm_sq)
        check_update(weight, moments, rule, coefficient, rng_key, low)
        if weight.ndim != 2:
            raise ValueError(f"weight must be 2-D (N, K), got shape {tuple(weight.shape)}")
        N, K = weight.shape
        dy_TN, x_TK = merge(segments, N, K, weight)
        check_lookups(lookups, K, weight)
        arguments = rule_arguments(rule, scalars, coefficient, rng_key, moments, low, weight.device)
        rows, norm_sq = None, None
        if any(ids.shape[0] for ids, _ in lookups):
            only = not dy_TN.shape[0]
            rows, norm_sq = sum_rows(lookups, N, want_norm_sq and only)
            if only:
                launch_table_update(weight, rows, arguments)
                return norm_sq
        chunk = chunk_of(weight, dy_TN, moments)
        if chunk:
            return launch_wgrad_chunks(weight, dy_TN, x_TK, arguments, want_norm_sq, chunk, rows)
        if not weight.numel():
            return torch.zeros((), device=weight.device) if want_norm_sq else None
        if rows is None:
            update = choose(weight, dy_TN, x_TK, moments, arguments.constants, low)
            return update.run(weight, dy_TN, x_TK, arguments, want_norm_sq)
        tied = fused_update(weight, dy_TN, x_TK, moments, arguments.constants)
        return tied.run(weight, dy_TN, x_TK, arguments, want_norm_sq, rows)


#: Updates that were checked once, by all that matters about their tensors.
_KNOWN: dict[tuple[object, ...], FusedUpdate | HopperUpdate] = {}
#: Batches of many lengths would let them grow without end.
_MOST_KNOWN = 4096


def _known_update(
    weight: torch.Tensor,
    segment: Segment,
    moments: Sequence[Moment],
    rule: str,
    scalars: StepScalars,
    coefficient: torch.Tensor | None,
    rng_key: int | None,
    low: torch.Tensor | None,
) -> FusedUpdate | HopperUpdate | None:
    """Launches of a fused update of one pair, or None where another path is taken; checks what is new.

    Raises:
        ValueError: as `wgrad_update_`.
    """
    dy_TN, x_TK = segment
    # torch's settings of the moment have a say in this one
    if dy_TN.ndim == weight.ndim == 2 and chunk_of(weight, dy_TN, moments):
        return None
    tensors = [dy_TN, x_TK, weight, low, coefficient]
    for moment in moments:
        tensors.extend((moment,) if isinstance(moment, torch.Tensor) else moment)
    key = (
        rule,
        scalars.nesterov,
        rng_key is None,
        *[
            None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16 == 0)
            for t in tensors
        ],
    )
    known = _KNOWN.get(key)
    if known is None:
        check_update(weight, moments, rule, coefficient, rng_key, low)
        if weight.ndim != 2 or not (weight.numel() and dy_TN.ndim == 2 and dy_TN.shape[0]):
            return None
        pair = merge([segment], weight.shape[0], weight.shape[1], weight)
        if pair[0] is not dy_TN or pair[1] is not x_TK:
            return None
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        constants = (rule, bool(scalars.nesterov), rng_key is not None)
        known = _KNOWN[key] = choose(weight, dy_TN, x_TK, moments, constants, low)
    elif rng_key is not None and not 0 <= rng_key < 1 << 32:
        raise ValueError(f"rng_key must be in [0, 2**32), got {rng_key}")
    return known


def dense_update_(
    weight: torch.Tensor,
    grad: torch.Tensor,
    moments: Sequence[Moment],
    rule: str,
    scalars: StepScalars,
    *,
    coefficient: torch.Tensor | None = None,
    rng_key: int | None = None,
    low: torch.Tensor | None = None,
) -> None:
    """Update `weight` and its moments in place by a dense gradient.

    Args:
        weight: Any shape, contiguous, fp32, bf16 or fp16.
        grad: Same shape, any strides, any float dtype.
        moments: These and the rest as in `wgrad_update_`.
        rule: As there.
        scalars: As there.
        coefficient: As there.
        rng_key: As there.
        low: As there.

    Raises:
        ValueError: shapes, dtypes, strides or devices do not fit.
    """
    check_update(weight, moments, rule, coefficient, rng_key, low)
    if grad.shape != weight.shape or not grad.is_floating_point() or grad.device != weight.device:
        raise ValueError(
            f"grad {tuple(grad.shape)} {grad.dtype} on {grad.device} does not fit "
            f"weight {tuple(weight.shape)} on {weight.device}"
        )
    with on_device_of(weight):
        arguments = rule_arguments(rule, scalars, coefficient, rng_key, moments, low, weight.device)
        launch_dense_update(weight, grad, arguments)


def wgrad_norm_sq(segments: Sequence[Segment], lookups: Sequence[Lookup] = ()) -> torch.Tensor:
    """||G||_F^2 (0-d fp32) of segments and lookups, by Gram matrices or by the GEMM, whichever is faster.

    Several segments are concatenated along T first, as in `wgrad_update_`: their cross terms count.

    Raises:
        ValueError: nothing at all (a norm needs a device), or factors that do not fit each other.
    """
    if not segments and not lookups:
        raise ValueError("wgrad_norm_sq needs at least one segment or lookup (it may have no tokens)")
    if not segments:
        like = lookups[0][1]
        check_lookups(lookups, like.shape[-1], like)
        with on_device_of(like):
            return rows_norm_sq(lookups)
    dy, x = segments[0]
    if dy.ndim != 2 or x.ndim != 2:
        raise ValueError(f"segments must be 2-D pairs, got {tuple(dy.shape)} and {tuple(x.shape)}")
    dy_TN, x_TK = merge(segments, dy.shape[1], x.shape[1], dy)
    (T, N), K = dy_TN.shape, x_TK.shape[1]
    check_lookups(lookups, K, dy)
    looked_up = any(ids.shape[0] for ids, _ in lookups)
    with on_device_of(dy):
        if looked_up and not T:
            return rows_norm_sq(lookups)
        if not looked_up and uses_gram(T, N, K, dy_TN.dtype):
            return centred_gram_norm_sq(dy_TN, x_TK)
        return gemm_norm_sq(dy_TN, x_TK, sum_rows(lookups, N, False)[0] if looked_up else None)


def wgrad_norms_sq(pairs: Sequence[Segment]) -> torch.Tensor:
    """||dy^T x||_F^2 of each pair: fp32 (len(pairs),) with the bits of `wgrad_norm_sq([pair])`.

    Args:
        pairs: (dy (T, N), x (T, K)) of different weights, in any mixture, all on one device.

    Raises:
        ValueError: no pair at all (a norm needs a device), or one that does not fit.
    """
    if not pairs:
        raise ValueError("wgrad_norms_sq needs at least one pair (it may have no tokens)")
    if len(pairs) == 1:
        return wgrad_norm_sq(pairs).reshape(1)
    with on_device_of(pairs[0][0]):
        norms, alone = grouped_norms_sq(pairs)
        for index in alone:
            norms[index] = wgrad_norm_sq([pairs[index]])
        return norms


def accumulate_lookups_(buffer: torch.Tensor, lookups: Sequence[Lookup]) -> None:
    """buffer[ids_t] += dy_t, each row's tokens summed in fp32 first.

    Args:
        buffer: (N, K), contiguous, fp32, bf16 or fp16.
        lookups: As in `wgrad_update_`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_lookups(lookups, buffer.shape[1], buffer)
    with on_device_of(buffer):
        accumulate_rows(buffer, lookups)


def dense_updates_(updates: Sequence[Update]) -> None:
    """`dense_update_` of each; those of one kind share a launch, whatever their sizes.

    Raises:
        ValueError: as `dense_update_`.
    """
    for index in dense_groups_(updates):
        weight, gradient, moments, rule, scalars, coefficient, rng_key, low = updates[index]
        assert isinstance(gradient, torch.Tensor)
        dense_update_(
            weight, gradient, moments, rule, scalars, coefficient=coefficient, rng_key=rng_key, low=low
        )


def wgrad_updates_(updates: Sequence[Update], want_norm_sq: bool = False) -> list[torch.Tensor | None]:
    """`wgrad_update_` of weights with one pair each; those alike share a launch.

    Returns:
        For each an fp32 tensor whose sum is ||G||^2, or None.

    Raises:
        ValueError: as `wgrad_update_`.
    """
    results, left = update_groups_(updates, want_norm_sq)
    for index in left:
        weight, pair, moments, rule, scalars, coefficient, rng_key, low = updates[index]
        assert isinstance(pair, tuple)
        results[index] = wgrad_update_(
            weight, [pair], moments, rule, scalars,
            coefficient=coefficient, rng_key=rng_key, low=low, want_norm_sq=want_norm_sq,
        )  # fmt: skip
    return results


def waits_for_company(update: Update) -> bool:
    """Whether one launch for this update and others of its kind is faster."""
    weight, pair, moments = update[:3]
    assert isinstance(pair, tuple)
    return weight.numel() < GROUP_ELEMENTS and not chunk_of(weight, pair[0], moments)
