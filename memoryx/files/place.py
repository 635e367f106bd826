"""Where a state lies in the memory or the file that it is in, and what it is."""

from dataclasses import dataclass, replace

from interconnect.links.elements import tensor_bytes
from wsc.v1 import plan_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One state's place in a piece of memory, or in a file."""

    offset: int
    element_type: "plan_pb2.ElementType.ValueType"
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def at(cls, offset: int, tensor_type: plan_pb2.TensorType) -> "Place":
        return cls(
            offset=offset,
            element_type=tensor_type.element_type,
            shape=tuple(tensor_type.shape),
            nbytes=tensor_bytes(tensor_type),
        )

    def holds(self, tensor_type: plan_pb2.TensorType) -> bool:
        return self.element_type == tensor_type.element_type and self.shape == tuple(tensor_type.shape)

    def is_like(self, other: "Place") -> bool:
        """Whether a state of the same type lies at the other place."""
        return self.element_type == other.element_type and self.shape == other.shape

    def moved_to(self, offset: int) -> "Place":
        """The same state at another place."""
        return replace(self, offset=offset)
