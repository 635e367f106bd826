"""cbfloat16: rounding is exact for each of its values, and elsewhere what arithmetic with fractions says."""

import math
import struct
from fractions import Fraction

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from waferbox.cirh.calls.cbfloat16 import LARGEST, round_to_cbfloat16, round_to_cbfloat16_out

BIAS, MANTISSA = 31, 9


def decode(bits: int) -> float:
    """The value of a cbfloat16 bit pattern."""
    sign, exponent, mantissa = bits >> 15, (bits >> MANTISSA) & 0x3F, bits & 0x1FF
    if exponent == 0x3F:
        value = math.nan if mantissa else math.inf
    elif exponent == 0:
        value = math.ldexp(mantissa, 1 - BIAS - MANTISSA)
    else:
        value = math.ldexp(mantissa + (1 << MANTISSA), exponent - BIAS - MANTISSA)
    return -value if sign else value


ALL = [decode(bits) for bits in range(1 << 16)]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


def exactly(value: float) -> float:
    """The nearest cbfloat16 value by arithmetic with fractions, ties to even."""
    if math.isnan(value) or math.isinf(value) or value == 0:
        return value
    size = abs(Fraction(value))
    exponent = max(math.frexp(abs(value))[1] - 1, 1 - BIAS)
    unit = Fraction(2) ** (exponent - MANTISSA)
    rounded = round(size / unit) * unit  # Fraction rounds halves to even
    result = math.inf if rounded > Fraction(LARGEST) else float(rounded)
    return math.copysign(result, value)


def same(actual: float, expected: float) -> bool:
    if math.isnan(expected):
        return math.isnan(actual)
    return actual == expected and math.copysign(1, actual) == math.copysign(1, expected)


def test_every_value_stays_what_it_is() -> None:
    values = torch.tensor(ALL, dtype=torch.float32)
    rounded = round_to_cbfloat16(values)
    numbers = ~values.isnan()
    assert torch.equal(bits_of(rounded)[numbers], bits_of(values)[numbers])
    assert bool(rounded[~numbers].isnan().all())


def test_between_neighbours_the_nearer_is_taken_and_the_even_one_of_two() -> None:
    positive = torch.tensor(ALL[: 0x3F << MANTISSA], dtype=torch.float32)
    low, high = positive[:-1], positive[1:]
    middle = (low.double() + high.double()) / 2
    even = torch.arange(len(low)) % 2 == 0
    for sign in (1, -1):
        assert torch.equal(round_to_cbfloat16(sign * middle.float()), sign * torch.where(even, low, high))
        below, above = (torch.nextafter(middle.float(), end) for end in (low, high))
        assert torch.equal(round_to_cbfloat16(sign * below), sign * low)
        assert torch.equal(round_to_cbfloat16(sign * above), sign * high)


def test_beyond_the_largest_value_there_is_infinity() -> None:
    limit = (2 - 2**-10) * 2.0**31  # half way to what the next value would be
    values = torch.tensor([limit, limit, 2.0**32, -limit, torch.finfo(torch.float32).max])
    values[1] = torch.nextafter(values[1], torch.tensor(0.0))
    assert round_to_cbfloat16(values).tolist() == [math.inf, LARGEST, math.inf, -math.inf, math.inf]


@given(st.integers(0, 2**32 - 1))
@example(0x00000001)
@example(0x80000000)
@example(0x7F800001)
@example(0xFFFFFFFF)
@example(0x4F7FF000)
def test_any_float_is_rounded_as_fractions_say(bits: int) -> None:
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    tensor = torch.frombuffer(bytearray(struct.pack("<I", bits)), dtype=torch.float32)
    assert same(round_to_cbfloat16(tensor).item(), exactly(value)), value


@given(st.floats(-2.0, 2.0, width=32).map(lambda x: x * 2.0**-29))
def test_small_floats_are_rounded_as_fractions_say(value: float) -> None:
    value = struct.unpack("<f", struct.pack("<f", value))[0]
    assert same(round_to_cbfloat16(torch.tensor([value])).item(), exactly(value)), value


def test_it_may_be_written_over_and_laid_out_in_any_way() -> None:
    torch.manual_seed(0)
    values = torch.randn(6, 8).t()
    expected = round_to_cbfloat16(values.contiguous())
    assert torch.equal(round_to_cbfloat16(values), expected)
    assert round_to_cbfloat16_out(values, out=values) is values
    assert torch.equal(values, expected)
