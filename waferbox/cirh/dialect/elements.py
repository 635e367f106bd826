"""Element types of tensors: torch <-> text <-> the wire (wsc.v1)."""

from typing import NamedTuple

import torch

from waferbox.cirh import CirhError
from wsc.v1 import plan_pb2

MAXIMUM_RANK = 16  # of a tensor


class _Element(NamedTuple):
    """An element type: its name in text, its torch dtype, and its code on the wire, if it has one."""

    text: str
    dtype: torch.dtype
    wire: int | None


# int8 has no code on the wire.
_ELEMENTS = (
    _Element("i1", torch.bool, plan_pb2.ELEMENT_TYPE_BOOL),
    _Element("i8", torch.int8, None),
    _Element("i16", torch.int16, plan_pb2.ELEMENT_TYPE_INT16),
    _Element("i32", torch.int32, plan_pb2.ELEMENT_TYPE_INT32),
    _Element("i64", torch.int64, plan_pb2.ELEMENT_TYPE_INT64),
    _Element("ui8", torch.uint8, plan_pb2.ELEMENT_TYPE_UINT8),
    _Element("f16", torch.float16, plan_pb2.ELEMENT_TYPE_FLOAT16),
    _Element("bf16", torch.bfloat16, plan_pb2.ELEMENT_TYPE_BFLOAT16),
    _Element("f32", torch.float32, plan_pb2.ELEMENT_TYPE_FLOAT32),
    _Element("f64", torch.float64, plan_pb2.ELEMENT_TYPE_FLOAT64),
)
_BY_DTYPE = {element.dtype: element for element in _ELEMENTS}
_BY_TEXT = {element.text: element for element in _ELEMENTS}
_BY_WIRE = {element.wire: element for element in _ELEMENTS if element.wire is not None}


def element_name(dtype: torch.dtype) -> str:
    """The name of an element type in text and in dtype attributes, e.g. "f32". Raises CirhError for another dtype."""
    element = _BY_DTYPE.get(dtype)
    if element is None:
        raise CirhError(f"{dtype} has no element type in CIRH; use one of {', '.join(str(e.dtype) for e in _ELEMENTS)}")
    return element.text


def is_element(dtype: torch.dtype) -> bool:
    """Whether a torch dtype has an element type in CIRH."""
    return dtype in _BY_DTYPE


def element_dtype(name: str) -> torch.dtype:
    """The torch dtype of an element type's name. Raises CirhError for an unknown name."""
    element = _BY_TEXT.get(name)
    if element is None:
        raise CirhError(f"unknown element type {name!r}")
    return element.dtype


def can_be_sent(dtype: torch.dtype) -> bool:
    """Whether the wire has a code for a torch dtype."""
    return _BY_DTYPE[dtype].wire is not None


def element_to_proto(dtype: torch.dtype) -> "plan_pb2.ElementType.ValueType":
    """The wire's code for a torch dtype. Raises CirhError if it has none."""
    wire = _BY_DTYPE[dtype].wire
    if wire is None:
        raise CirhError(f"{dtype} cannot be sent between roles; cast it to another integer type")
    return plan_pb2.ElementType.ValueType(wire)


def element_from_proto(element_type: "plan_pb2.ElementType.ValueType") -> torch.dtype:
    """The torch dtype of the wire's code. Raises CirhError for an unknown code."""
    element = _BY_WIRE.get(element_type)
    if element is None:
        raise CirhError(f"unknown element type code {element_type}")
    return element.dtype
