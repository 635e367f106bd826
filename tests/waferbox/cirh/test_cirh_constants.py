"""Constants and attributes: exact bits, never expanded."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.attributes import DenseAttr, SplatAttr, attribute, constant_of_bytes, dense, plain, splat
from waferbox.cirh.dialect.locations import location, source_of_location
from waferbox.cirh.dialect.source import Source
from waferbox.cirh.dialect.types import from_proto, info, nbytes, tensor_type, to_proto, type_text
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import float_text, print_module

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*FLOATS, torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_types_go_over_the_wire(dtype: torch.dtype) -> None:
    type = tensor_type((3, 4), dtype)
    assert from_proto(to_proto(type)) == info(type) == ((3, 4), dtype)
    assert nbytes(type) == 12 * dtype.itemsize
    assert type_text(type).startswith("tensor<3x4x")


def test_types_that_cannot_be() -> None:
    for shape in ([-1], [1] * 17, [1 << 40, 1 << 40]):
        with pytest.raises(CirhError):
            tensor_type(shape, torch.float32)
    with pytest.raises(CirhError, match="complex64"):
        tensor_type([1], torch.complex64)
    with pytest.raises(CirhError, match="int8"):
        to_proto(tensor_type([1], torch.int8))


def test_splats_are_equal_by_their_bits() -> None:
    type = tensor_type((2,), torch.float32)
    assert splat(0.0, type) != splat(-0.0, type)
    assert splat(math.nan, type) == splat(math.nan, type)
    assert splat(1, type) == splat(1.0, type) == splat(True, type)
    assert splat(0.1, type) != splat(0.1, tensor_type((3,), torch.float32))
    zero = splat(-0.0, type)
    assert isinstance(zero, SplatAttr)
    assert math.copysign(1, zero.value) == -1


def test_uniform_tensors_are_splats() -> None:
    assert dense(torch.ones(5)) == splat(1.0, tensor_type((5,), torch.float32))
    assert isinstance(dense(torch.tensor([0.0, -0.0])), DenseAttr)
    assert isinstance(dense(torch.empty(0)), DenseAttr)
    assert isinstance(dense(torch.tensor(3)), SplatAttr)


@pytest.mark.parametrize(
    ("value", "dtype"), [(1.5, torch.int64), (300, torch.uint8), (1 << 70, torch.int64), (math.nan, torch.int32)]
)
def test_numbers_that_do_not_fit(value: float, dtype: torch.dtype) -> None:
    with pytest.raises(CirhError):
        splat(value, tensor_type((), dtype))


def test_bytes_that_do_not_fit() -> None:
    with pytest.raises(CirhError):
        constant_of_bytes(tensor_type((2,), torch.float32), b"123")
    with pytest.raises(CirhError):
        constant_of_bytes(tensor_type((2,), torch.bool), b"\1\2")


@given(st.floats(width=64), st.sampled_from(FLOATS))
def test_floats_in_text_keep_their_bits(value: float, dtype: torch.dtype) -> None:
    type = tensor_type((2,), dtype)
    builder = GraphBuilder()
    module = builder.finish([(builder.constant(splat(value, type)), None)])
    assert parse_module(print_module(module)).is_structurally_equivalent(module)


@given(st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.text(max_size=20), st.lists(st.integers(-9, 99))))
def test_plain_attributes_come_back(value: bool | int | str | list[int]) -> None:
    back = plain(attribute(value))
    assert back == value
    assert type(back) is type(value)


@given(st.floats(allow_nan=False))
def test_float_attributes_come_back(value: float) -> None:
    assert struct.pack("<d", plain(attribute(value))) == struct.pack("<d", value)


def test_attributes_of_other_kinds() -> None:
    assert plain(attribute([True, False])) == [True, False]
    assert plain(attribute([1.5, -0.0])) == [1.5, -0.0]
    for wrong in ([1.5, 1], [1, True], {"a": 1}, None):
        with pytest.raises(TypeError):
            attribute(wrong)  # type: ignore[arg-type]  # that is the test
    with pytest.raises(CirhError):
        attribute(1 << 63)


@pytest.mark.parametrize(("value", "text"), [(1.0, "1.000000e+00"), (-0.1, "-1.000000e-01"), (0.9, "0.899999976")])
def test_floats_look_as_in_mlir(value: float, text: str) -> None:
    assert float_text(value, torch.float32) == text


def test_sources() -> None:
    source = Source(module="fc1", backward=True, op="aten::mm", file="train.py", line=53)
    assert source_of_location(location(source)) == source
    assert str(source) == "train.py:53 (in fc1, backward)"
    assert str(Source()) == "unknown source"
    of_metric = Source(module="accuracy", metric=True, op="aten::mm")
    assert source_of_location(location(of_metric)) == of_metric
    assert source_of_location(location(Source(op="aten::mm"))) == Source(op="aten::mm")
