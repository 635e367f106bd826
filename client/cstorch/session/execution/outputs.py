"""The outputs of a step: what they are called, and their values in the place of the placeholders."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cstorch.errors import InternalError, UsageError
from cstorch.execution import Closure
from cstorch.tracing import LazyTensor, Trace
from interconnect.links.elements import tensor_bytes, torch_dtype
from wsc.v1 import coordinator_pb2, plan_pb2


class Outputs:
    """The traced tensors whose values the script gets. A tensor is one output, whoever asks for it."""

    def __init__(self) -> None:
        self._tensors: list[LazyTensor] = []
        self._others: list[LazyTensor] = []  # of other traces; they are kept so that their ids stay their own
        self._names: dict[int, str] = {}  # by id of the tensor
        self._provisional: set[int] = set()

    def add_arguments(self, closure: Closure) -> None:
        """Makes the arguments of a closure that the traced function calls outputs, called after its parameters."""
        for name, tensor in _named_tensors(closure.function, closure.args, closure.kwargs):
            if tensor not in self:
                self._tensors.append(tensor)
                self._name(tensor, f"output_{name}")

    def add_results(self, result: Any) -> None:
        """Makes what the traced function returned outputs; their names wait for the closures that take them."""
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, LazyTensor)]
        for index, tensor in enumerate(tensors):
            if tensor not in self:
                self._tensors.append(tensor)
                self._name(tensor, f"output_values_{index}")
                self._provisional.add(id(tensor))

    def rename_by_arguments(self, closure: Closure) -> None:
        """Calls the results that a closure takes after its parameters; the first closure of the first step decides."""
        for name, tensor in _named_tensors(closure.function, closure.args, closure.kwargs):
            if id(tensor) in self._provisional:
                self._provisional.remove(id(tensor))
                del self._names[id(tensor)]
                self._name(tensor, f"output_{name}")

    def _name(self, tensor: LazyTensor, name: str) -> None:
        unique, number = name, 0
        while unique in self._names.values():
            number += 1
            unique = f"{name}_{number}"
        self._names[id(tensor)] = unique

    def add_same(self, others: "Outputs") -> None:
        """Takes the tensors of another trace of the same step for those at the same places here."""
        for tensor, other in zip(self._tensors, others._tensors, strict=True):
            self._names[id(other)] = self._names[id(tensor)]
        self._others += others._tensors

    def items(self) -> list[tuple[str, torch.Tensor]]:
        """Name and tensor of each output, in order."""
        return [(self._names[id(tensor)], tensor) for tensor in self._tensors]

    def named(self, trace: Trace) -> Trace:
        """The trace with the final names of its outputs."""
        outputs = tuple(replace(output, name=self._names[id(output.tensor)]) for output in trace.outputs)
        return replace(trace, outputs=outputs)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, tensor: LazyTensor) -> bool:
        return id(tensor) in self._names

    def fill(self, closure: Closure, values: Mapping[str, torch.Tensor]) -> Closure:
        """The closure with the values of a step in its arguments."""
        args, kwargs = pytree.tree_map_only(
            LazyTensor, lambda tensor: values[self._names[id(tensor)]], (closure.args, closure.kwargs)
        )
        return Closure(function=closure.function, args=args, kwargs=kwargs, at_checkpoint=closure.at_checkpoint)


def _named_tensors(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, LazyTensor]]:
    arguments: Mapping[str, Any] = inspect.signature(function).bind(*args, **kwargs).arguments
    for name, value in arguments.items():
        if isinstance(value, LazyTensor):
            yield name, value
            continue
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, LazyTensor)]
        for index, tensor in enumerate(tensors):
            yield f"{name}_{index}", tensor


def unpack(outputs: Sequence[plan_pb2.Output], received: coordinator_pb2.StepOutputs) -> dict[str, torch.Tensor]:
    """The outputs of a step as CPU tensors, by name.

    Raises:
        InternalError: what came is not what the plan says.
    """
    if len(received.tensors) != len(outputs):
        raise InternalError(f"step {received.step} came with {len(received.tensors)} outputs instead of {len(outputs)}")
    values: dict[str, torch.Tensor] = {}
    for output, data in zip(outputs, received.tensors, strict=True):
        if len(data) != tensor_bytes(output.type):
            raise InternalError(
                f"the output {output.name!r} came with {len(data)} bytes instead of {tensor_bytes(output.type)}"
            )
        shape = tuple(output.type.shape)
        dtype = torch_dtype(output.type.element_type)
        if math.prod(shape) == 0:
            values[output.name] = torch.empty(shape, dtype=dtype)
        else:
            # bytearray: the closure may write to its tensor.
            values[output.name] = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    return values


def unknown_tensor(closure: Closure) -> UsageError:
    """The error for a closure that is called with a tensor of which no value arrives."""
    name = getattr(closure.function, "__qualname__", repr(closure.function))
    return UsageError(
        f"{name} is called with a device tensor that is not an output of the step: return it from the traced function, "
        "or call the closure inside the traced function. (Only what the first step asks for is sent.)"
    )


def weight_in_closure(closure: Closure) -> UsageError:
    """The error for a closure that is called with a parameter of the model."""
    tensors = _named_tensors(closure.function, closure.args, closure.kwargs)
    names = [name for name, tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
    return UsageError(
        f"Attempting to get weight tensor {names[0]!r} in a step closure but this is not supported yet. Please use "
        '"cstorch.save()" API to save model weights, in a @cstorch.checkpoint_closure.'
    )
