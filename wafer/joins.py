"""Values that micro-batches make in parts: what a later one makes is joined in place to what there is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import torch

from wafer.kernels import WaferKernel
from wsc.v1 import plan_pb2

# place, what is joined to it, out=place.
JOINS: Final[Mapping[int, Callable[..., torch.Tensor]]] = {
    plan_pb2.REDUCTION_SUM: torch.add,
    plan_pb2.REDUCTION_MAX: torch.maximum,
    plan_pb2.REDUCTION_MIN: torch.minimum,
}

# Where what there is of a value lies, and how it is joined.
JoinedPlace: TypeAlias = "tuple[torch.Tensor, plan_pb2.Reduction.ValueType]"


def joining(kernel: WaferKernel, joined: Mapping[int, JoinedPlace]) -> WaferKernel:
    """The kernel of a later micro-batch. joined: results by position."""
    calls = [(index, place, JOINS[reduction]) for index, (place, reduction) in joined.items()]

    def call(inputs: Sequence[torch.Tensor], places: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        results = kernel(inputs, places)
        for index, place, join in calls:
            results[index] = join(place, results[index], out=place)
        return results

    return call
