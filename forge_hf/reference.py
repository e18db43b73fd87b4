"""The backend operations in plain torch: the oracle of the tests, and the path without Triton.

    wgrad_update_   W, moments <- rule(W, moments, c * sum_s dY_s^T X_s)     rows of W at a time
    dense_update_   W, moments <- rule(W, moments, c * G)
    wgrad_norm_sq   || sum_s dY_s^T X_s ||_F^2
    wgrad_norms_sq  the same of many weights, each with one pair

The gradient of an embedding comes as lookups (ids, dY), which add dY_t to row ids_t; a tied weight has both.

Legend: T tokens, N out features, K in features; dy_TN is (T, N), x_TK is (T, K), w_NK is (N, K). Everything
is computed in fp32 whatever the storage. Work goes in chunks of rows, so that no N x K gradient exists at any
time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .quantized import Moment, QuantizedMoment, dequantize, quantize_, uniform_of
from .rounding import join_low_bits, next_bits, random_bits, split_low_bits_, store_
from .row_sums import Lookup, RowSums, add_row_sums_, row_sums
from .scalars import StepScalars
from .updates import Update

__all__ = [
    "accumulate_dense_",
    "accumulate_lookups_",
    "dense_update_",
    "dense_updates_",
    "plain_math",
    "waits_for_company",
    "wgrad_norm_sq",
    "wgrad_norms_sq",
    "wgrad_update_",
    "wgrad_updates_",
]

#: Elements of W that are updated at a time; a few fp32 temporaries of this size are alive.
CHUNK_ELEMENTS = 1 << 20

Segment = tuple[Tensor, Tensor]


def plain_math(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run `function` without grad and outside autocast, whose matmuls would round to 16 bits.

    The device is that of the first argument: a tensor, an object with a `device`, or a list of segments; of
    the second where that list is empty.
    """

    @functools.wraps(function)
    def wrapper(first: Any, *args: Any, **kwargs: Any) -> Any:
        device = first.device if hasattr(first, "device") else (first or args[0])[0][0].device
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            return function(first, *args, **kwargs)

    return wrapper


def _adamw(w: Tensor, g: Tensor, moments: Sequence[Tensor], s: StepScalars) -> None:
    m, v = moments
    m.mul_(s.beta1).add_(g, alpha=1.0 - s.beta1)
    v.mul_(s.beta2).addcmul_(g, g, value=1.0 - s.beta2)
    denominator = v.sqrt().div_(s.bias_correction2_sqrt).add_(s.eps)
    w.mul_(1.0 - s.lr * s.weight_decay).addcdiv_(m, denominator, value=-s.lr / s.bias_correction1)


def _lion(w: Tensor, g: Tensor, moments: Sequence[Tensor], s: StepScalars) -> None:
    (m,) = moments
    direction = (m * s.beta1).add_(g, alpha=1.0 - s.beta1).sign_()
    m.mul_(s.beta2).add_(g, alpha=1.0 - s.beta2)
    w.mul_(1.0 - s.lr * s.weight_decay).sub_(direction, alpha=s.lr)


def _sgd(w: Tensor, g: Tensor, moments: Sequence[Tensor], s: StepScalars) -> None:
    g = g.add(w, alpha=s.weight_decay)
    if moments:
        (buffer,) = moments
        buffer.mul_(s.momentum).add_(g)
        g = g.add(buffer, alpha=s.momentum) if s.nesterov else buffer
    w.sub_(g, alpha=s.lr)


_ARITHMETIC: dict[str, Callable[[Tensor, Tensor, Sequence[Tensor], StepScalars], None]] = {
    "adamw": _adamw,
    "lion": _lion,
    "sgd": _sgd,
}


def _load(stored: Moment) -> Tensor:
    return stored.float() if isinstance(stored, Tensor) else dequantize(stored)


def _store_moment_(
    target: Moment, values: Tensor, rng_key: int | None, stream: int, start_index: int
) -> None:
    if isinstance(target, Tensor):
        store_(target, values, rng_key, stream, start_index)
        return
    uniform = None
    if rng_key is not None:
        # Both moments of an element share the bits that follow the weight's.
        bits = next_bits(random_bits(values.numel(), rng_key, 0, start_index, values.device))
        uniform = uniform_of(bits, target.signed)
    quantize_(target, values, uniform)


def _update_rows_(
    weight: Tensor,
    grad: Tensor,
    moments: Sequence[Moment],
    rule: str,
    scalars: StepScalars,
    rng_key: int | None,
    low: Tensor | None,
    start_index: int,
) -> None:
    """Update one chunk; `Tensor.float` copies 16-bit storage, and fp32 storage is updated in place."""
    w = weight.float() if low is None else join_low_bits(weight, low)
    new_moments = [_load(moment) for moment in moments]
    _ARITHMETIC[rule](w, grad, new_moments, scalars)
    if low is None:
        store_(weight, w, rng_key, 0, start_index)
    else:
        count, device = w.numel(), w.device
        noise = None if rng_key is None else random_bits(count, rng_key, 0, start_index, device)
        split_low_bits_(weight, low, w, noise)
    for stream, (target, values) in enumerate(zip(moments, new_moments, strict=True), start=1):
        _store_moment_(target, values, rng_key, stream, start_index)


def _rows_of(moment: Moment, rows: slice) -> Moment:
    if isinstance(moment, Tensor):
        return moment[rows]
    return QuantizedMoment(moment.codes[rows], moment.scale[rows])


def _as_one_row(moment: Moment) -> Moment:
    if isinstance(moment, Tensor):
        return moment.view(1, -1)
    return QuantizedMoment(moment.codes.view(1, -1), moment.scale)


def _row_chunks(shape: torch.Size) -> list[slice]:
    rows, columns = shape[0], max(1, shape[1:].numel())
    step = max(1, CHUNK_ELEMENTS // columns)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _gradient_rows(
    segments: Sequence[Segment], looked_up: Sequence[RowSums], rows: slice, columns: int
) -> Tensor:
    """Rows of G in fp32: (sum_s dY_s^T X_s + row sums)[rows], shape (rows, K)."""
    total: Tensor | None = None
    for dy_TN, x_TK in segments:
        part = dy_TN[:, rows].float().t() @ x_TK
        total = part if total is None else total.add_(part)
    if total is None:
        if not looked_up:
            raise ValueError("a gradient needs at least one segment or lookup")
        total = looked_up[0][1].new_zeros(rows.stop - rows.start, columns)
    assert total.shape[1] == columns
    add_row_sums_(total, looked_up, rows.start)
    return total


@plain_math
def wgrad_update_(
    weight: Tensor,
    segments: Sequence[Segment],
    moments: Sequence[Moment],
    rule: str,
    scalars: StepScalars,
    *,
    coefficient: Tensor | None = None,
    rng_key: int | None = None,
    low: Tensor | None = None,
    want_norm_sq: bool = False,
    lookups: Sequence[Lookup] = (),
) -> Tensor | None:
    """Update a weight from its gradient's factors: W, moments <- rule(W, moments, c * sum_s dY_s^T X_s).

    Args:
        weight: (N, K), fp32, bf16 or fp16, updated in place.
        segments: Pairs (dy_TN, x_TK) of one floating dtype each; T may differ between pairs and may be 0.
        moments: Tensors of weight's shape, fp32 or bf16, or `QuantizedMoment`s, in the order of
            `Rule.moment_names`, updated in place.
        rule: "adamw", "lion" or "sgd".
        scalars: Numbers of this update.
        coefficient: 0-d fp32 tensor that multiplies the gradient, or None for 1.
        rng_key: Key of stochastic rounding of 8- and 16-bit storage, or None to round to nearest.
        low: Low bits of a bf16 weight (see `split_low_bits_`), updated in place, or None.
        want_norm_sq: Also return the squared Frobenius norm of the gradient, before the coefficient.
        lookups: (ids_T, dy_TK) with integers in [-1, N): dY_t is added to row ids_t, to none for -1.

    Returns:
        0-d fp32 tensor, or None.
    """
    columns = weight.shape[1]
    inputs = [(dy_TN, x_TK.float()) for dy_TN, x_TK in segments]
    looked_up = [row_sums(*lookup) for lookup in lookups]
    norm_sq = torch.zeros((), dtype=torch.float32, device=weight.device) if want_norm_sq else None
    for rows in _row_chunks(weight.shape):
        grad = _gradient_rows(inputs, looked_up, rows, columns)
        if norm_sq is not None:
            norm_sq += grad.square().sum()
        if coefficient is not None:
            grad.mul_(coefficient)
        chunk = [_rows_of(moment, rows) for moment in moments]
        below, start = None if low is None else low[rows], rows.start * columns
        _update_rows_(weight[rows], grad, chunk, rule, scalars, rng_key, below, start)
    return norm_sq


@plain_math
def dense_update_(
    weight: Tensor,
    grad: Tensor,
    moments: Sequence[Moment],
    rule: str,
    scalars: StepScalars,
    *,
    coefficient: Tensor | None = None,
    rng_key: int | None = None,
    low: Tensor | None = None,
) -> None:
    """Update a parameter of any shape from its gradient of that shape; the rest as in `wgrad_update_`."""
    if weight.dim() == 0 or any(isinstance(m, QuantizedMoment) and weight.dim() == 1 for m in moments):
        weight, grad, low = weight.view(1, -1), grad.view(1, -1), None if low is None else low.view(1, -1)
        moments = [_as_one_row(moment) for moment in moments]
    columns = weight.shape[1:].numel()
    for rows in _row_chunks(weight.shape):
        part = grad[rows].float()
        if coefficient is not None:
            part = part * coefficient
        chunk = [_rows_of(moment, rows) for moment in moments]
        below, start = None if low is None else low[rows], rows.start * columns
        _update_rows_(weight[rows], part, chunk, rule, scalars, rng_key, below, start)


def dense_updates_(updates: Sequence[Update]) -> None:
    """`dense_update_` of each."""
    for update in updates:
        assert isinstance(update.gradient, Tensor)
        dense_update_(
            update.weight, update.gradient, update.moments, update.rule, update.scalars,
            coefficient=update.coefficient, rng_key=update.rng_key, low=update.low,
        )  # fmt: skip


def wgrad_updates_(updates: Sequence[Update], want_norm_sq: bool = False) -> list[Tensor | None]:
    """`wgrad_update_` of each, which has one pair."""
    results = []
    for update in updates:
        assert isinstance(update.gradient, tuple)
        results.append(
            wgrad_update_(
                update.weight,
                [update.gradient],
                update.moments,
                update.rule,
                update.scalars,
                coefficient=update.coefficient,
                rng_key=update.rng_key,
                low=update.low,
                want_norm_sq=want_norm_sq,
            )  # fmt: skip
        )
    return results


def waits_for_company(update: Update) -> bool:
    """No update is faster together with others here."""
    return False


@plain_math
def wgrad_norm_sq(segments: Sequence[Segment], lookups: Sequence[Lookup] = ()) -> Tensor:
    """|| sum_s dY_s^T X_s ||_F^2 without the matrix, by whichever of two ways costs fewer operations.

    GEMM and reduce: 2 T N K. Gram: sum of (X X^T) o (dY dY^T), T^2 (N + K) when symmetry is used.

    Args:
        segments: As in `wgrad_update_`.
        lookups: As there. Either may be empty, not both.

    Returns:
        0-d fp32 tensor on the segments' device, never negative.
    """
    device = (segments or lookups)[0][0].device
    looked_up = [row_sums(*lookup) for lookup in lookups]
    if not segments:
        return _norm_sq_of_rows(looked_up)
    out_features, in_features = segments[0][0].shape[1], segments[0][1].shape[1]
    tokens = sum(dy_TN.shape[0] for dy_TN, _ in segments)
    if not lookups and tokens * (out_features + in_features) < 2 * out_features * in_features:
        return _norm_sq_gram(segments)
    shape = torch.Size((out_features, in_features))
    inputs = [(dy_TN, x_TK.float()) for dy_TN, x_TK in segments]
    total = torch.zeros((), dtype=torch.float32, device=device)
    for rows in _row_chunks(shape):
        total += _gradient_rows(inputs, looked_up, rows, in_features).square_().sum()
    return total


def wgrad_norms_sq(pairs: Sequence[Segment]) -> Tensor:
    """||dY^T X||_F^2 of each pair (dY (T, N), X (T, K)), all on one device: fp32 (len(pairs),)."""
    return torch.stack([wgrad_norm_sq([pair]) for pair in pairs])


def _norm_sq_of_rows(looked_up: Sequence[RowSums]) -> Tensor:
    if len(looked_up) == 1:
        return looked_up[0][1].square().sum()
    rows, sums = (torch.cat(parts) for parts in zip(*looked_up, strict=True))
    return row_sums(rows, sums)[1].square_().sum()


def _norm_sq_gram(segments: Sequence[Segment]) -> Tensor:
    """The Gram form on centred inputs: G = sum dY^T (X - 1 m^T) + (sum dY)^T m^T, for the mean row m.

    Inputs that are nearly the same for all tokens would otherwise cancel: measured 1.22 for a norm of 0.14.
    """
    tokens = sum(dy_TN.shape[0] for dy_TN, _ in segments)
    mean_1K = torch.stack([x_TK.float().sum(0, keepdim=True) for _, x_TK in segments]).sum(0) / max(tokens, 1)
    total_1N = torch.stack([dy_TN.float().sum(0, keepdim=True) for dy_TN, _ in segments]).sum(0)
    factors = [(dy_TN.float(), x_TK.float() - mean_1K) for dy_TN, x_TK in segments]
    factors.append((total_1N, mean_1K))
    norm_sq = torch.zeros((), dtype=torch.float32, device=segments[0][0].device)
    for index, (dy_TN, x_TK) in enumerate(factors):
        for other, (dy_SN, x_SK) in enumerate(factors[: index + 1]):
            product = (dy_TN @ dy_SN.t()).mul_(x_TK @ x_SK.t()).sum()
            norm_sq += product if other == index else 2.0 * product
    return norm_sq.clamp_(min=0.0)


@plain_math
def accumulate_dense_(buffer: Tensor, dy_TN: Tensor, x_TK: Tensor) -> None:
    """Buffer += dY^T X with fp32 accumulation and temporaries far smaller than the buffer.

    Args:
        buffer: (N, K) in the dtype that autograd would have given the gradient.
        dy_TN: (T, N).
        x_TK: (T, K), same dtype as `dy_TN`.
    """
    if dy_TN.dtype == buffer.dtype:
        buffer.addmm_(dy_TN.t(), x_TK)
        return
    for rows in _row_chunks(buffer.shape):
        dy_rows = dy_TN[:, rows]
        if buffer.is_cuda and HAS_OUT_DTYPE:
            part = torch.mm(dy_rows.t(), x_TK, out_dtype=torch.float32)
        else:
            part = dy_rows.t().float() @ x_TK.float()
        buffer[rows] += part


@plain_math
def accumulate_lookups_(buffer: Tensor, lookups: Sequence[Lookup]) -> None:
    """buffer[ids_t] += dY_t with fp32 sums per row, some columns at a time.

    Args:
        buffer: (N, K) in the dtype that autograd would have given the gradient.
        lookups: As in `wgrad_update_`.
    """
    for ids_T, dy_TK in lookups:
        step = max(1, CHUNK_ELEMENTS // max(1, ids_T.shape[0]))
        for first in range(0, buffer.shape[1], step):
            columns = slice(first, first + step)
            add_row_sums_(buffer[:, columns], [row_sums(ids_T, dy_TK[:, columns])], 0)


# torch.mm(..., out_dtype=) keeps cuBLAS' fp32 accumulator; it came with torch 2.8.
HAS_OUT_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)
