"""Kernels of values that micro-batches make in parts: each later part is joined in place to the earlier ones."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, TypeAlias

import torch

from wafer.kernels import WaferKernel
from wsc.v1 import plan_pb2

# Called with the joined value, the next part, and out=the joined value.
JOINS: Final[Mapping[int, Callable[..., torch.Tensor]]] = {
    plan_pb2.REDUCTION_SUM: torch.add,
    plan_pb2.REDUCTION_MAX: torch.maximum,
    plan_pb2.REDUCTION_MIN: torch.minimum,
}

# The joined value, and the operation that joins the next part to it.
JoinBuffer: TypeAlias = "tuple[torch.Tensor, plan_pb2.Reduction.ValueType]"


def joining(kernel: WaferKernel, joined: Mapping[int, JoinBuffer]) -> WaferKernel:
    """Returns the kernel of a later micro-batch, which joins some results. joined: their buffers, by position."""
    calls = [(index, buffer, JOINS[reduction]) for index, (buffer, reduction) in joined.items()]

    def call(inputs: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        results = kernel(inputs, destinations)
        for index, buffer, join in calls:
            results[index] = join(buffer, results[index], out=buffer)
        return results

    return call


def beside_inputs(kernel: WaferKernel, results: Collection[int]) -> WaferKernel:
    """Returns the kernel of the first micro-batch, whose `results` share memory with no input and no other result.

    Later micro-batches add to these results in place, which would change such a view.
    """

    def call(inputs: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        read = [_memory(tensor) for tensor in inputs]
        made = kernel(inputs, destinations)
        for index in results:
            others = [*read, *(_memory(other) for number, other in enumerate(made) if number != index)]
            if not made[index].is_contiguous() or _memory(made[index]) in others:
                made[index] = made[index].clone(memory_format=torch.contiguous_format)
        return made

    return call


def adding(kernel: WaferKernel, sums: Mapping[int, int], tensors: Sequence[torch.Tensor | None]) -> WaferKernel:
    """Returns the kernel of a later micro-batch, which adds some results to values. sums: value indices, by result."""

    def call(inputs: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        made = kernel(inputs, destinations)
        for index, value in sums.items():
            total = tensors[value]
            assert total is not None, "the first micro-batch makes it"
            made[index] = total.add_(made[index])
        return made

    return call


def _memory(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor may share with others."""
    return tensor.untyped_storage().data_ptr()
