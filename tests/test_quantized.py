"""8-bit moments: the error bound of the docstring, special values, means, and both backends alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_hf import quantized
from forge_hf.quantized import QuantizedMoment
from tests.tolerances import MEAN_STANDARD_ERRORS

INF, NAN = float("inf"), float("nan")
SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["first", "second"])


def stored(values: torch.Tensor, signed: bool, uniform: torch.Tensor | None = None) -> torch.Tensor:
    moment = quantized.zeros(values, signed)
    quantized.quantize_(moment, values, uniform)
    return quantized.dequantize(moment)


def spread(rows: int, columns: int, signed: bool, seed: int, orders: float = 2.0) -> torch.Tensor:
    """Values over several orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(orders * torch.randn(rows, columns, generator=generator))
    values = size * torch.randn(rows, columns, generator=generator)
    return values if signed else values.square()


@SIGNED
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    columns=st.integers(1, 200),
    orders=st.floats(0, 6),
    exponent=st.integers(-60, 60),
    nearest=st.booleans(),
)
def test_the_error_bound(signed, seed, columns, orders, exponent, nearest):
    """Between neighbours of the grid, and within the fraction of the block's maximum that the page states."""
    values = spread(3, columns, signed, seed, orders).clamp(max=1e15) * 2.0**exponent
    uniform = None if nearest else torch.rand(3, columns, generator=torch.Generator().manual_seed(seed))
    moment = quantized.zeros(values, signed)
    quantized.quantize_(moment, values, uniform)
    error = (quantized.dequantize(moment) - values).abs().double()
    padded = torch.nn.functional.pad(values.abs(), (0, -columns % 64))
    top = padded.view(3, -1, 64).amax(2).double()
    unit = torch.exp2(moment.scale.double() - 127)
    wide = lambda t: t.repeat_interleave(64, 1)[:, :columns]  # noqa: E731
    power = 2 if signed else 4
    lower = (values.abs().double() / wide(unit)).pow(1 / power).floor()
    gap = ((lower + 1) ** power - lower**power) * wide(unit)
    # Twice: fp32 roots may put a value that lies on the grid one code lower. 1 %: halves in fp32.
    half = 0.505 if nearest else 1.0
    rounds_up = (lower == 0) & (not signed)
    assert (error <= torch.where(rounds_up, 1.0, half) * gap * (1 + 1e-5) + 1e-30).all()
    usual = wide(top) > 2.0**-90
    assert (error[usual] <= wide(top)[usual] / (44 if signed else 52)).all()
    assert (wide(top / unit)[usual] > (7938 if signed else 2.04e9) * (1 - 1e-6)).all()


@SIGNED
def test_stochastic_rounding_keeps_the_mean(signed):
    values = spread(4, 128, signed, 1)
    generator, count = torch.Generator().manual_seed(5), 4000
    total, squares = torch.zeros_like(values).double(), torch.zeros_like(values).double()
    for _ in range(count):
        got = stored(values, signed, torch.rand(values.shape, generator=generator)).double()
        total += got
        squares += got.square()
    mean = total / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt() / count**0.5
    unit = quantized.zeros(values, signed)
    quantized.quantize_(unit, values)
    floor = torch.exp2(unit.scale.double() - 127).repeat_interleave(64, 1)
    above = values.abs() > (0 if signed else 1) * floor
    off = (mean - values).abs()[above] / (deviation + values.abs().double() * 1e-6)[above]
    assert off.max() < MEAN_STANDARD_ERRORS
    assert deviation.max() > 0


@SIGNED
def test_zeros_and_blocks(signed):
    values = torch.zeros(2, 130)
    values[1, 64:128] = 1.0
    values[0, 129] = 1e-20
    got = stored(values, signed)
    if signed:
        assert torch.equal(got == 0, values == 0)
    else:  # no second moment is 0 once it was written
        assert (got > 0).all() and (got[values == 0] <= 1 / 2.04e9).all() and (got[0, :128] < 1.2e-38).all()
    torch.testing.assert_close(got, values, rtol=0.02, atol=1 / 2.04e9)
    fresh = quantized.dequantize(quantized.zeros(values, signed))
    assert torch.equal(fresh, torch.zeros(2, 130))


@SIGNED
def test_one_huge_element_leaves_its_neighbours_positive(signed):
    """With linear codes all others become 0; a second moment of 0 under a first one is an explosion."""
    values = torch.full((1, 64), 1e-6)
    values[0, 7] = 1e3
    got = stored(values, signed)
    torch.testing.assert_close(got[0, 7], values[0, 7], rtol=0.02, atol=0)
    if signed:
        assert (got[0, :7] <= 1e3 / 7938).all()
    else:
        assert (got[0, :7] > 0).all() and (got[0, :7] <= 1e3 / 2.04e9).all()
    assert (stored(values[:, :7], signed) - 1e-6).abs().max() < 1e-6 / 44


@SIGNED
@pytest.mark.parametrize("special", [INF, -INF, NAN, 3.39e38])
@pytest.mark.parametrize("uniform", [None, 0.999])
def test_a_block_that_is_not_finite_decodes_to_no_finite_number(signed, special, uniform):
    """A lost run must not look alive; the other blocks stay as they are."""
    values = torch.rand(2, 128)
    values[0, 3] = special
    noise = None if uniform is None else torch.full(values.shape, uniform)
    got = stored(values if signed else values.abs(), signed, noise)
    assert not got[0, :64].isfinite().any()
    assert got[0, 64:].isfinite().all() and got[1].isfinite().all()
    moment = quantized.zeros(values, signed)
    quantized.quantize_(moment, got)
    assert torch.equal(quantized.dequantize(moment).isfinite(), got.isfinite())


@SIGNED
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1.2e-38, 3e-38, 1e-30, 1e38, 3.2e38])
def test_ends_of_the_range(signed, size):
    values = torch.full((1, 64), size)
    got = stored(values, signed)
    assert got.isfinite().all() and (got >= 0).all()
    # A unit is at least 2^-126, and the second code of a second moment is 16 units.
    assert (got - values).abs().max() <= size / 88 + (2 if signed else 8) * 2.0**-126
    if not signed:
        assert (got > 0).all()


@SIGNED
@pytest.mark.parametrize("shape", [(5000,), (3, 5, 7), (64, 64), (1, 1), (0, 4), (4, 0), ()])
def test_any_shape(signed, shape):
    values = torch.rand(shape)
    moment = quantized.zeros(values, signed)
    assert moment.codes.shape == values.shape
    quantized.quantize_(moment, values)
    torch.testing.assert_close(quantized.dequantize(moment), values, rtol=0, atol=1 / 44)


def test_the_grid_stays_while_the_maximum_drifts():
    """A unit that followed the maximum would round all elements anew at every step."""
    values = stored(spread(1, 64, False, 3), False)
    values[0, values.argmax()] *= 0.999
    again = stored(values, False)
    others = values != values.max()
    assert torch.equal(again[others], values[others])


def test_a_moment_is_two_plain_tensors():
    moment = quantized.zeros(torch.empty(4, 100), signed=False)
    assert isinstance(moment, QuantizedMoment) and not moment.signed
    assert moment.codes.dtype == moment.scale.dtype == torch.uint8
    assert moment.scale.shape == (4, 2)
