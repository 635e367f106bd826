"""Values that micro-batches make in parts: what a later one makes is joined in place to what there is."""

from collections.abc import Callable, Collection, Mapping, Sequence
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
JoinBuffer: TypeAlias = "tuple[torch.Tensor, plan_pb2.Reduction.ValueType]"


def joining(kernel: WaferKernel, joined: Mapping[int, JoinBuffer]) -> WaferKernel:
    """The kernel of a later micro-batch. joined: results by position."""
    calls = [(index, place, JOINS[reduction]) for index, (place, reduction) in joined.items()]

    def call(inputs: Sequence[torch.Tensor], places: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        results = kernel(inputs, places)
        for index, place, join in calls:
            results[index] = join(place, results[index], out=place)
        return results

    return call


def beside_inputs(kernel: WaferKernel, results: Collection[int]) -> WaferKernel:
    """The kernel of the first micro-batch; nothing else shows the memory of these results: parts are added there."""

    def call(inputs: Sequence[torch.Tensor], places: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        made = kernel(inputs, places)
        for index in results:
            others = [*inputs, *(other for number, other in enumerate(made) if number != index)]
            if not made[index].is_contiguous() or _shows(made[index], others):
                made[index] = made[index].clone(memory_format=torch.contiguous_format)
        return made

    return call


def adding(kernel: WaferKernel, sums: Mapping[int, int], tensors: Sequence[torch.Tensor | None]) -> WaferKernel:
    """The kernel of a later micro-batch: some results are added in place to values. sums: slots of these, by result."""

    def call(inputs: Sequence[torch.Tensor], places: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        made = kernel(inputs, places)
        for index, slot in sums.items():
            total = tensors[slot]
            assert total is not None, "the first micro-batch has made it"
            made[index] = total.add_(made[index])
        return made

    return call


def _shows(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    memory = tensor.untyped_storage().data_ptr()
    return any(other.untyped_storage().data_ptr() == memory for other in others)
