"""How a script wants a wafer's rows to be divided in time."""

from dataclasses import dataclass

from wsc.v1 import plan_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatching:
    """Rows of a micro-batch. size 0: the compiler chooses: as many as fit a wafer, or, to explore, those that are
    predicted to be the fastest of the sizes from min_size to max_size (0: no bound)."""

    size: int = 0
    explore: bool = False
    min_size: int = 0
    max_size: int = 0

    @classmethod
    def from_proto(cls, message: plan_pb2.MicroBatching) -> "MicroBatching":
        return cls(size=message.size, explore=message.explore, min_size=message.min_size, max_size=message.max_size)
