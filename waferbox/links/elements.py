"""Element types of the wire as torch dtypes, and the sizes of tensors in bytes."""

import math
from typing import TYPE_CHECKING

from wsc.v1 import plan_pb2

if TYPE_CHECKING:
    import torch

_NAMES = {
    plan_pb2.ELEMENT_TYPE_BOOL: ("bool", 1),
    plan_pb2.ELEMENT_TYPE_INT16: ("int16", 2),
    plan_pb2.ELEMENT_TYPE_INT32: ("int32", 4),
    plan_pb2.ELEMENT_TYPE_INT64: ("int64", 8),
    plan_pb2.ELEMENT_TYPE_UINT8: ("uint8", 1),
    plan_pb2.ELEMENT_TYPE_FLOAT16: ("float16", 2),
    plan_pb2.ELEMENT_TYPE_FLOAT32: ("float32", 4),
    plan_pb2.ELEMENT_TYPE_FLOAT64: ("float64", 8),
    plan_pb2.ELEMENT_TYPE_BFLOAT16: ("bfloat16", 2),
}

# Members of a group, and states in their memory, begin at multiples of so many bytes.
ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def item_size(element_type: "plan_pb2.ElementType.ValueType") -> int:
    """Bytes of one element. Raises ValueError for an unknown type."""
    return _entry(element_type)[1]


def tensor_bytes(tensor_type: plan_pb2.TensorType) -> int:
    """Bytes of a dense tensor of this type. Raises ValueError for an impossible shape or an unknown element type."""
    if any(size < 0 for size in tensor_type.shape):
        raise ValueError(f"a tensor cannot have the shape {list(tensor_type.shape)}")
    return math.prod(tensor_type.shape) * item_size(tensor_type.element_type)


def torch_dtype(element_type: "plan_pb2.ElementType.ValueType") -> "torch.dtype":
    """The torch dtype of an element type; imports torch. Raises ValueError for an unknown type."""
    import torch

    dtype = getattr(torch, _entry(element_type)[0])
    assert isinstance(dtype, torch.dtype)
    return dtype


def _entry(element_type: "plan_pb2.ElementType.ValueType") -> tuple[str, int]:
    entry = _NAMES.get(element_type)
    if entry is None:
        raise ValueError(f"there is no element type {element_type}")
    return entry
