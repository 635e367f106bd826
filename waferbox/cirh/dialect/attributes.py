"""Constants and attribute values.

Constants keep the exact bits of their elements. A splat is one element and a type, whatever its shape. Two constants
are equal if their bits are, so -0.0 is not 0.0, and a NaN equals itself.
"""

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from xdsl.dialects.builtin import FloatAttr, IntegerAttr, IntegerType, StringAttr, UnitAttr, f64, i64
from xdsl.ir import Attribute, Data, Operation
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.types import AnyTensorType, info, tensor_type, type_text

AttrValue: TypeAlias = bool | int | float | str | Sequence[int] | Sequence[bool] | Sequence[float]
MAXIMUM_LIST = 1 << 16
_I1 = IntegerType(1)


class _Splat(NamedTuple):
    """The content of a SplatAttr."""

    type: AnyTensorType
    bits: int


class _Dense(NamedTuple):
    """The content of a DenseAttr."""

    type: AnyTensorType
    content: bytes


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@lru_cache(maxsize=1 << 14)
def _scalar(bits: int, dtype: torch.dtype) -> torch.Tensor:
    width = dtype.itemsize
    return torch.frombuffer(bytearray(bits.to_bytes(width, "little")), dtype=dtype).reshape(())


@irdl_attr_definition
class SplatAttr(Data[_Splat]):
    """A constant with one value in all elements, which is stored once."""

    name = "cirh.splat"

    @property
    def type(self) -> AnyTensorType:
        return self.data.type

    @property
    def bits(self) -> int:
        """The element's bits as an unsigned integer."""
        return self.data.bits

    @property
    def value(self) -> bool | int | float:
        """The element as a Python number."""
        value: bool | int | float = self.scalar().item()
        return value

    def scalar(self) -> torch.Tensor:
        """The element as a tensor of rank 0, which is shared and must not be written."""
        return _scalar(self.bits, info(self.type).dtype)

    def tensor(self) -> torch.Tensor:
        """The constant as a view of one shared element, which must not be written."""
        return self.scalar().expand(info(self.type).shape)

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> _Splat:
        parser.raise_error("CIRH text is read by waferbox.cirh.text.parser")

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(f"<{self.value} : {type_text(self.type)}>")


@irdl_attr_definition
class DenseAttr(Data[_Dense]):
    """A constant with all its elements, little-endian and row-major. At least two differ, or there are none."""

    name = "cirh.dense"

    @property
    def type(self) -> AnyTensorType:
        return self.data.type

    @property
    def content(self) -> bytes:
        return self.data.content

    def tensor(self) -> torch.Tensor:
        """A copy of the constant."""
        shape, dtype = info(self.type)
        if not self.content:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.content), dtype=dtype).reshape(shape)

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> _Dense:
        parser.raise_error("CIRH text is read by waferbox.cirh.text.parser")

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(f"<{len(self.content)} bytes : {type_text(self.type)}>")


ConstantAttr: TypeAlias = SplatAttr | DenseAttr


@lru_cache(maxsize=1 << 14)
def _bits(key: bytes | int, dtype: torch.dtype) -> int:
    value: float = struct.unpack("<d", key)[0] if isinstance(key, bytes) else key
    if not dtype.is_floating_point and not (isinstance(value, int) or value.is_integer()):
        raise CirhError(f"{value} cannot be a constant of {dtype}")
    try:
        element = torch.tensor(value, dtype=dtype)
    except (RuntimeError, OverflowError, ValueError) as error:
        raise CirhError(f"{value} cannot be a constant of {dtype}: {error}") from None
    return int.from_bytes(element.reshape(1).view(torch.uint8).numpy().tobytes(), "little")


def splat(value: bool | int | float, type: AnyTensorType) -> ConstantAttr:
    """A constant of one value, rounded to the element type. Raises CirhError if the type cannot hold the value."""
    shape, dtype = info(type)
    if math.prod(shape) == 0:
        return DenseAttr(_Dense(type, b""))
    return SplatAttr(_Splat(type, bits_of(value, dtype)))


def bits_of(value: bool | int | float, dtype: torch.dtype) -> int:
    """The bits of a number, rounded to an element type. Raises CirhError if the type cannot hold the number."""
    if not isinstance(value, float) and not -(1 << 63) <= value < 1 << 64:
        raise CirhError(f"the constant {value} does not fit 64 bits")
    # The key is the bits of the number, since -0.0 and 0.0 would be equal keys.
    return _bits(struct.pack("<d", value) if isinstance(value, float) else int(value), dtype)


def constant_of_bytes(type: AnyTensorType, content: bytes) -> ConstantAttr:
    """A constant from the bytes of all elements, or of a single one for all. Raises CirhError for a wrong number."""
    shape, dtype = info(type)
    elements, width = math.prod(shape), dtype.itemsize
    if dtype is torch.bool and content.strip(b"\0\1"):
        raise CirhError("a constant of truth values holds something other than 0 and 1")
    if elements and content == content[:width] * (len(content) // width) and len(content) in (width, elements * width):
        return SplatAttr(_Splat(type, int.from_bytes(content[:width], "little")))
    if len(content) != elements * width:
        raise CirhError(f"{len(content)} bytes given for a constant of type {type_text(type)}")
    return DenseAttr(_Dense(type, content))


def dense(tensor: torch.Tensor) -> ConstantAttr:
    """A constant from a CPU tensor; a splat if all its elements have the same bits."""
    # Cloned, since a tensor of one element counts as contiguous whatever its strides, and may have no view of bytes.
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    content = flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return constant_of_bytes(tensor_type(tensor.shape, tensor.dtype), content)


@lru_cache(maxsize=1 << 14)
def _attribute(kind: type, key: object, values: tuple[int, ...] | None) -> Attribute:
    if values is not None:
        return dense(torch.tensor(values, dtype=torch.bool if kind is bool else torch.int64))
    if kind is bool:
        return IntegerAttr(int(bool(key)), _I1)
    if kind is int:
        assert isinstance(key, int)
        return IntegerAttr(key, i64)
    if kind is float:
        assert isinstance(key, bytes)
        return FloatAttr(struct.unpack("<d", key)[0], f64)
    assert isinstance(key, str)
    return StringAttr(key)


def attribute(value: AttrValue) -> Attribute:
    """The xDSL attribute of a plain value: bool, int (64 bits), float (64 bits), str, list of int, bool or float."""
    if isinstance(value, bool):
        return _attribute(bool, value, None)
    if isinstance(value, str):
        return _attribute(str, value, None)
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise CirhError(f"the integer {value} does not fit 64 bits")
        return _attribute(int, value, None)
    if isinstance(value, float):
        return _attribute(float, struct.pack("<d", value), None)
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(item, bool) for item in value):
            return _attribute(bool, None, tuple(value))
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return _attribute(int, None, tuple(value))
        if all(isinstance(item, float) for item in value):
            # Not cached by value, since -0.0 and 0.0 would be equal keys.
            return dense(torch.tensor(value, dtype=torch.float64))
    raise TypeError(f"an attribute is a bool, int, float, str or a list of int, bool or float, not {value!r}")


@lru_cache(maxsize=1 << 14)
def _elements(constant: ConstantAttr) -> tuple[int, ...] | tuple[float, ...]:
    shape = info(constant.type).shape
    if len(shape) != 1 or shape[0] > MAXIMUM_LIST:
        raise CirhError(f"a list of at most {MAXIMUM_LIST} elements is expected, not {type_text(constant.type)}")
    return tuple(constant.tensor().tolist())


def plain(value: Attribute) -> AttrValue:
    """The plain Python value of an attribute. Raises CirhError for a kind without one."""
    if isinstance(value, IntegerAttr):
        return bool(value.value.data) if value.type == _I1 else value.value.data
    if isinstance(value, FloatAttr):
        return value.value.data
    if isinstance(value, StringAttr):
        return value.data
    if isinstance(value, (SplatAttr, DenseAttr)):
        return list(_elements(value))
    if isinstance(value, UnitAttr):
        return True
    raise CirhError(f"an attribute of an unexpected kind: {value}")


def is_annotation(name: str) -> bool:
    """Whether an attribute is an annotation: its name has a dot (cs.internal), and it has no effect on the module."""
    return "." in name


def attrs(op: Operation) -> dict[str, AttrValue]:
    """The attributes of an operation as plain Python values, without annotations and without the value of a Const."""
    return {
        name: plain(value)
        for name, value in op.attributes.items()
        if not is_annotation(name) and not (name == "value" and op.name == "cirh.Const")
    }
