"""Tensors as the vendor's client writes them, from and to torch's."""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from vendor_wire import appliance_pb2

CHUNK_BYTES: Final = 32 * 1024 * 1024  # of a tensor in one message to the client

# Element type on the wire: that of the tensor, and that of its bytes.
_TYPES: Final[Mapping[int, tuple[torch.dtype, torch.dtype]]] = {
    appliance_pb2.ELEMENT_TYPE_BOOL: (torch.bool, torch.int16),
    appliance_pb2.ELEMENT_TYPE_INT16: (torch.int16, torch.int16),
    appliance_pb2.ELEMENT_TYPE_INT32: (torch.int32, torch.int32),
    appliance_pb2.ELEMENT_TYPE_INT64: (torch.int64, torch.int64),
    appliance_pb2.ELEMENT_TYPE_UINT8: (torch.uint8, torch.uint8),
    appliance_pb2.ELEMENT_TYPE_FLOAT16: (torch.float16, torch.float16),
    appliance_pb2.ELEMENT_TYPE_FLOAT32: (torch.float32, torch.float32),
    appliance_pb2.ELEMENT_TYPE_FLOAT64: (torch.float64, torch.float64),
    appliance_pb2.ELEMENT_TYPE_BFLOAT16: (torch.bfloat16, torch.bfloat16),
}
_CODES: Final = {dtype: code for code, (dtype, _) in _TYPES.items()}


def item_bytes(code: int) -> int:
    """How many bytes an element takes on the wire. ValueError for a type that is not known."""
    if code not in _TYPES:
        raise ValueError(f"there is no element type {code}")
    return _TYPES[code][1].itemsize


def read_value(code: int, data: bytearray) -> torch.Tensor:
    """The elements in these bytes, as a flat tensor. ValueError if they are none."""
    size = item_bytes(code)
    if not data or len(data) % size:
        raise ValueError(f"{len(data)} bytes are no elements of {size} bytes")
    dtype, raw = _TYPES[code]
    return torch.frombuffer(data, dtype=raw).to(dtype)


def write_value(name: str, tensor: torch.Tensor) -> Iterator[appliance_pb2.GetOutputResponse]:
    """The messages that hand a tensor to the client."""
    code = _CODES[tensor.dtype]
    raw = tensor.to(_TYPES[code][1]).contiguous().reshape(-1).view(torch.uint8)
    data = memoryview(raw.numpy().data)
    num_chunks = max(1, -(-len(data) // CHUNK_BYTES))
    for number in range(num_chunks):
        response = appliance_pb2.GetOutputResponse(num_chunks=num_chunks)
        response.value.element_type = code  # type: ignore[assignment]  # one of the enum
        response.value.tensor.name = name
        response.value.tensor.shape.extend(tensor.shape)
        response.value.tensor.data = bytes(data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])
        yield response
