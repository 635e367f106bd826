"""Conversions of the values of the vendor's client: tensors, numbers of steps, and releases."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from vendor_wire import appliance_pb2

# --- Tensors ----------------------------------------------------------------------------------------------------------


CHUNK_BYTES: Final = 32 * 1024 * 1024  # the most of a tensor in one message to the client

# The dtype of the tensor and that of its bytes, by element type on the wire.
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
    """Returns the bytes of an element on the wire. Raises ValueError for an unknown type."""
    if code not in _TYPES:
        raise ValueError(f"there is no element type {code}")
    return _TYPES[code][1].itemsize


def read_value(code: int, data: bytearray) -> torch.Tensor:
    """Returns the elements in these bytes as a flat tensor. Raises ValueError for a part of an element, or none."""
    size = item_bytes(code)
    if not data or len(data) % size:
        raise ValueError(f"{len(data)} bytes are no elements of {size} bytes")
    dtype, raw = _TYPES[code]
    return torch.frombuffer(data, dtype=raw).to(dtype)


def write_value(name: str, tensor: torch.Tensor) -> Iterator[appliance_pb2.GetOutputResponse]:
    """Yields the messages that send a tensor to the client."""
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


# --- Steps, which the vendor numbers from 0 and Waferbox from 1 -------------------------------------------------------


MAX_STEPS: Final = 1 << 40
MAX_CHECKPOINTS: Final = 1 << 20


def checkpoint_steps(schedule: appliance_pb2.Schedule, num_steps: int) -> Sequence[int]:
    """Returns the steps of a schedule, from 1, ascending. Raises ValueError for too many, or steps beyond the run."""
    steps: set[int] = set()
    for interval in schedule.intervals:
        if not 0 <= interval.start < interval.end <= num_steps or not interval.step:
            raise ValueError(f"no steps of a run of {num_steps} are from {interval.start} to {interval.end}")
        if (interval.end - interval.start) // interval.step > MAX_CHECKPOINTS:
            raise ValueError(f"more than {MAX_CHECKPOINTS} checkpoints are too many")
        steps.update(range(interval.start, interval.end, interval.step))
        if interval.include_last:
            steps.add(interval.end - 1)
    return [step + 1 for step in sorted(steps)]


# --- Releases of the vendor's client ----------------------------------------------------------------------------------


# The builds, by version. The client refuses a server of another build than its own, but sends only its version. The
# served messages are the same in all of these releases.
BUILDS: Final[Mapping[str, str]] = {
    "2.6.0": "0c2f21fdef",
    "2.7.0": "e1377561a5",
    "2.7.1": "115095ac7d",
    "2.8.0": "56f21b7ebd",
    "2.9.0": "e2e12a41a8",
    "2.10.0": "32008fd851",
}


class ReleaseRefusedError(ValueError):
    """Raised for a client of a release that is not served."""


def build_of(version: str) -> str:
    """Returns the build that a client of this version expects. Raises ReleaseRefusedError."""
    release = version.partition("+")[0]
    build = BUILDS.get(release)
    if build is None:
        *others, last = BUILDS
        raise ReleaseRefusedError(
            f"this Waferbox serves cerebras_pytorch and cerebras_appliance {', '.join(others)} and {last}, and this "
            f"client is of release {release[:32] or '(it does not say which)'}: install {last}"
        )
    return build
