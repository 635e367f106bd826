"""Tensor types: torch <-> xDSL <-> text <-> the wire (wsc.v1)."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

import torch
from xdsl.dialects.builtin import (
    BFloat16Type,
    Float16Type,
    Float32Type,
    Float64Type,
    IntegerType,
    Signedness,
    TensorType,
)
from xdsl.ir import Attribute, SSAValue

from cirh.dialect.errors import CirhError
from wsc.v1 import plan_pb2

MAXIMUM_RANK = 16
MAXIMUM_ELEMENTS = 1 << 48

AnyTensorType: TypeAlias = TensorType[Attribute]


class TensorInfo(NamedTuple):
    """What a tensor type says, in torch's terms."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Element(NamedTuple):
    text: str
    dtype: torch.dtype
    attribute: Attribute
    wire: int | None


# int8 has no code on the wire.
_ELEMENTS = (
    _Element("i1", torch.bool, IntegerType(1), plan_pb2.ELEMENT_TYPE_BOOL),
    _Element("i8", torch.int8, IntegerType(8), None),
    _Element("i16", torch.int16, IntegerType(16), plan_pb2.ELEMENT_TYPE_INT16),
    _Element("i32", torch.int32, IntegerType(32), plan_pb2.ELEMENT_TYPE_INT32),
    _Element("i64", torch.int64, IntegerType(64), plan_pb2.ELEMENT_TYPE_INT64),
    _Element("ui8", torch.uint8, IntegerType(8, Signedness.UNSIGNED), plan_pb2.ELEMENT_TYPE_UINT8),
    _Element("f16", torch.float16, Float16Type(), plan_pb2.ELEMENT_TYPE_FLOAT16),
    _Element("bf16", torch.bfloat16, BFloat16Type(), plan_pb2.ELEMENT_TYPE_BFLOAT16),
    _Element("f32", torch.float32, Float32Type(), plan_pb2.ELEMENT_TYPE_FLOAT32),
    _Element("f64", torch.float64, Float64Type(), plan_pb2.ELEMENT_TYPE_FLOAT64),
)
_BY_DTYPE = {element.dtype: element for element in _ELEMENTS}
_BY_ATTRIBUTE = {element.attribute: element for element in _ELEMENTS}
_BY_TEXT = {element.text: element for element in _ELEMENTS}
_BY_WIRE = {element.wire: element for element in _ELEMENTS if element.wire is not None}


def element_name(dtype: torch.dtype) -> str:
    """The name of an element type in text, e.g. "f32"; also the form that dtype attributes take."""
    element = _BY_DTYPE.get(dtype)
    if element is None:
        raise CirhError(f"{dtype} has no element type in CIRH; use one of {', '.join(str(e.dtype) for e in _ELEMENTS)}")
    return element.text


def element_dtype(name: str) -> torch.dtype:
    """The torch dtype of an element type's name."""
    element = _BY_TEXT.get(name)
    if element is None:
        raise CirhError(f"unknown element type {name!r}")
    return element.dtype


def element_attribute(dtype: torch.dtype) -> Attribute:
    """The xDSL element type of a torch dtype."""
    element_name(dtype)
    return _BY_DTYPE[dtype].attribute


@lru_cache(maxsize=1 << 16)
def _tensor_type(shape: tuple[int, ...], dtype: torch.dtype) -> AnyTensorType:
    if len(shape) > MAXIMUM_RANK:
        raise CirhError(f"a tensor of rank {len(shape)}; at most {MAXIMUM_RANK} dimensions are supported")
    if any(size < 0 for size in shape) or math.prod(shape) > MAXIMUM_ELEMENTS:
        raise CirhError(f"a tensor of shape {list(shape)[:MAXIMUM_RANK]} is not possible")
    return TensorType(element_attribute(dtype), shape)


def tensor_type(shape: Sequence[int], dtype: torch.dtype) -> AnyTensorType:
    """The type of a tensor; CirhError if no such tensor can be."""
    return _tensor_type(tuple(shape), dtype)


_INFO: Final = "cirh_info"  # what a type keeps its info as: its hash takes longer than all else that a lookup does


def _make_info(type: Attribute) -> TensorInfo:
    if not isinstance(type, TensorType):
        raise CirhError(f"expected a tensor type, not {type}")
    element = _BY_ATTRIBUTE.get(type.element_type)
    if element is None:
        raise CirhError(f"unknown element type {type.element_type}")
    return TensorInfo(tuple(type.get_shape()), element.dtype)


def info(value: SSAValue | Attribute) -> TensorInfo:
    """Shape and dtype of a value or of a tensor type."""
    type = value if value.__class__ is TensorType else value.type if isinstance(value, SSAValue) else value
    known: TensorInfo | None = type.__dict__.get(_INFO)
    if known is None:
        known = type.__dict__[_INFO] = _make_info(type)
    return known


def shape(value: SSAValue | Attribute) -> tuple[int, ...]:
    """The shape of a value or of a tensor type."""
    return info(value).shape


def dtype(value: SSAValue | Attribute) -> torch.dtype:
    """The dtype of a value or of a tensor type."""
    return info(value).dtype


def nbytes(value: SSAValue | Attribute) -> int:
    """Bytes of a value, contiguous."""
    tensor = info(value)
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def meta(value: SSAValue | Attribute) -> torch.Tensor:
    """A tensor of the value's type on the meta device."""
    tensor = info(value)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def type_text(value: SSAValue | Attribute) -> str:
    """The type as it stands in text, e.g. "tensor<4x8xf32>"."""
    tensor = info(value)
    return f"tensor<{''.join(f'{size}x' for size in tensor.shape)}{_BY_DTYPE[tensor.dtype].text}>"


def to_proto(value: SSAValue | Attribute) -> plan_pb2.TensorType:
    """The wire's form of a type; CirhError for an element type that the wire has no code for."""
    tensor = info(value)
    return plan_pb2.TensorType(element_type=element_to_proto(tensor.dtype), shape=tensor.shape)


def element_to_proto(dtype: torch.dtype) -> "plan_pb2.ElementType.ValueType":
    """The wire's code for a torch dtype; CirhError if it has none."""
    wire = _BY_DTYPE[dtype].wire
    if wire is None:
        raise CirhError(f"{dtype} cannot be sent between roles; cast it to another integer type")
    return plan_pb2.ElementType.ValueType(wire)


def element_from_proto(element_type: "plan_pb2.ElementType.ValueType") -> torch.dtype:
    """The torch dtype of a wire's code."""
    element = _BY_WIRE.get(element_type)
    if element is None:
        raise CirhError(f"unknown element type code {element_type}")
    return element.dtype


def from_proto(type: plan_pb2.TensorType) -> TensorInfo:
    """Shape and dtype of the wire's form of a type."""
    return info(tensor_type(type.shape, element_from_proto(type.element_type)))
