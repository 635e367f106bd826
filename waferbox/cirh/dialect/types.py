"""Tensor types: torch <-> xDSL <-> text <-> the wire (wsc.v1). Element types are in waferbox.cirh.dialect.elements."""

import math
from collections.abc import Mapping, Sequence
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

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.elements import MAXIMUM_RANK, element_from_proto, element_name, element_to_proto
from wsc.v1 import plan_pb2

MAXIMUM_ELEMENTS = 1 << 48

AnyTensorType: TypeAlias = TensorType[Attribute]


class TensorInfo(NamedTuple):
    """A tensor type in torch's terms."""

    shape: tuple[int, ...]
    dtype: torch.dtype


_ATTRIBUTES: Final[Mapping[torch.dtype, Attribute]] = {
    torch.bool: IntegerType(1),
    torch.int8: IntegerType(8),
    torch.int16: IntegerType(16),
    torch.int32: IntegerType(32),
    torch.int64: IntegerType(64),
    torch.uint8: IntegerType(8, Signedness.UNSIGNED),
    torch.float16: Float16Type(),
    torch.bfloat16: BFloat16Type(),
    torch.float32: Float32Type(),
    torch.float64: Float64Type(),
}
_DTYPES: Final = {attribute: dtype for dtype, attribute in _ATTRIBUTES.items()}


def element_attribute(dtype: torch.dtype) -> Attribute:
    """The xDSL element type of a torch dtype."""
    element_name(dtype)
    return _ATTRIBUTES[dtype]


@lru_cache(maxsize=1 << 16)
def _tensor_type(shape: tuple[int, ...], dtype: torch.dtype) -> AnyTensorType:
    if len(shape) > MAXIMUM_RANK:
        raise CirhError(f"a tensor of rank {len(shape)}; at most {MAXIMUM_RANK} dimensions are supported")
    if any(size < 0 for size in shape) or math.prod(shape) > MAXIMUM_ELEMENTS:
        raise CirhError(f"a tensor of shape {list(shape)[:MAXIMUM_RANK]} is not possible")
    return TensorType(element_attribute(dtype), shape)


def tensor_type(shape: Sequence[int], dtype: torch.dtype) -> AnyTensorType:
    """The type of a tensor. Raises CirhError for an impossible or too large tensor."""
    return _tensor_type(tuple(shape), dtype)


_INFO: Final = "cirh_info"  # the attribute of a type that caches its info, since hashing a type takes long


def _make_info(type: Attribute) -> TensorInfo:
    if not isinstance(type, TensorType):
        raise CirhError(f"expected a tensor type, not {type}")
    dtype = _DTYPES.get(type.element_type)
    if dtype is None:
        raise CirhError(f"unknown element type {type.element_type}")
    return TensorInfo(tuple(type.get_shape()), dtype)


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
    """Bytes of a value as a contiguous tensor."""
    tensor = info(value)
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def meta(value: SSAValue | Attribute) -> torch.Tensor:
    """A tensor of the value's type on the meta device."""
    tensor = info(value)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def type_text(value: SSAValue | Attribute) -> str:
    """The type in text, e.g. "tensor<4x8xf32>"."""
    tensor = info(value)
    return f"tensor<{''.join(f'{size}x' for size in tensor.shape)}{element_name(tensor.dtype)}>"


def to_proto(value: SSAValue | Attribute) -> plan_pb2.TensorType:
    """The wire's form of a type. Raises CirhError for an element type without a code on the wire."""
    tensor = info(value)
    return plan_pb2.TensorType(element_type=element_to_proto(tensor.dtype), shape=tensor.shape)


def from_proto(type: plan_pb2.TensorType) -> TensorInfo:
    """Shape and dtype of the wire's form of a type. Raises CirhError for an impossible one."""
    return info(tensor_type(type.shape, element_from_proto(type.element_type)))
