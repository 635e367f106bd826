"""The outputs of a step: their names, and their values in the arguments of closures."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cstorch._internal.execution import Closure
from cstorch._internal.tracing import LazyTensor, OutputInfo, Source, StepValue, Trace
from cstorch.errors import InternalError, UsageError
from waferbox.links.elements import tensor_bytes, torch_dtype
from wsc.v1 import coordinator_pb2, plan_pb2

MAX_LABEL = 100  # characters


class Outputs:
    """The traced tensors whose values are sent to the script, each once, under a unique name.

    A *late* output is one that the script uses for the first time after the step was traced.
    """

    def __init__(self) -> None:
        self._tensors: list[LazyTensor] = []
        self._same: dict[object, LazyTensor] = {}  # tensors of other traces of the step, which the script may have kept
        self._names: dict[int, str] = {}  # by id of the tensor
        self._provisional: set[int] = set()
        self._inputs: Sequence[LazyTensor] = ()
        self._late: dict[object, LazyTensor] = {}

    def add_arguments(self, closure: Closure) -> None:
        """Adds the tensor arguments of a closure in the traced function, named after its parameters."""
        for name, tensor in named_tensors(closure.function, closure.args, closure.kwargs):
            if id(tensor) not in self._names:
                self._tensors.append(tensor)
                self._name(tensor, f"output_{name}")

    def add_results(self, result: Any) -> None:
        """Adds the tensors that the traced function returned; the first closure that takes one changes its name."""
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, LazyTensor)]
        for index, tensor in enumerate(tensors):
            if id(tensor) not in self._names:
                self._tensors.append(tensor)
                self._name(tensor, f"output_values_{index}")
                self._provisional.add(id(tensor))

    def set_inputs(self, inputs: Sequence[LazyTensor]) -> None:
        """Sets the tensors of the batch in the trace, by their positions."""
        self._inputs = inputs

    def add_late(self, source: Source, name: str) -> None:
        """Adds a value of a step that is traced already, unless it is an output."""
        if self.find(source) is None:
            tensor = self._inputs[source] if isinstance(source, int) else source
            assert isinstance(tensor, LazyTensor)
            self._late[_key(tensor)] = tensor
            self._name(tensor, f"output_{name}")

    def find(self, source: Source) -> LazyTensor | None:
        """Returns the output that has the value of a source at the end of the step; None if there is none."""
        tensor = self._inputs[source] if isinstance(source, int) else source
        assert isinstance(tensor, LazyTensor)
        tensor = self._same.get(_key(tensor), tensor)
        if (late := self._late.get(_key(tensor))) is not None:
            return late
        if tensor._handle.cell is not None:
            return None  # an output of the trace may have an earlier value of the state
        return next((output for output in self._tensors if _key(output) == _key(tensor)), None)

    def rename_by_argument(self, tensor: LazyTensor, name: str) -> None:
        """Names a result after the parameter of the first closure that takes it."""
        if id(tensor) in self._provisional:
            self._provisional.remove(id(tensor))
            del self._names[id(tensor)]
            self._name(tensor, f"output_{name}")

    def _name(self, tensor: LazyTensor, name: str) -> None:
        self._names[id(tensor)] = unique_name(name, self._names.values())

    def add_same(self, others: "Outputs") -> bool:
        """Makes the tensors of another trace aliases of those at the same positions; False if the numbers differ."""
        if len(self._tensors) != len(others._tensors):
            return False
        self._same.update((_key(other), tensor) for tensor, other in zip(self._tensors, others._tensors, strict=True))
        return True

    def items(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the name and the tensor of each output of the trace, in order."""
        return [(self._names[id(tensor)], tensor) for tensor in self._tensors]

    def named(self, trace: Trace) -> Trace:
        """Returns the trace with the late outputs, and the final names of all."""
        if self._late:
            late = [OutputInfo(name=self._names[id(tensor)], tensor=tensor) for tensor in self._late.values()]
            trace = trace.with_outputs(late)
        outputs = tuple(replace(output, name=self._names[id(output.tensor)]) for output in trace.outputs)
        return replace(trace, outputs=outputs)

    def labels(self, calls: Iterable[Closure]) -> dict[str, str]:
        """Returns what the script calls the outputs that it gives to closures, by their names in the plan.

        Args:
            calls: The calls of closures in a step; the first that takes an output counts.
        """
        labels: dict[str, str] = {}
        for closure in calls:
            for label, leaf in labelled_values(closure):
                source = leaf.source if isinstance(leaf, StepValue) else leaf
                output = self.find(source) if source is not None else None
                name = self._names.get(id(output))
                if name is not None and name not in labels:
                    labels[name] = unique_name(label[:MAX_LABEL], labels.values())
        return labels

    def value(self, source: Source, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the value of a source from the outputs of a step."""
        output = self.find(source)
        assert output is not None
        return values[self._names[id(output)]]

    def fill(self, closure: Closure, values: Mapping[str, torch.Tensor]) -> Closure:
        """Returns the closure with the values of a step in its arguments."""

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, StepValue):
                return leaf.evaluate(lambda source: self.value(source, values))
            return values[self._names[id(leaf)]] if isinstance(leaf, LazyTensor) else leaf

        args, kwargs = pytree.tree_map(filled, (closure.args, closure.kwargs))
        return replace(closure, args=args, kwargs=kwargs)


def _key(tensor: LazyTensor) -> object:
    """Returns a key that is equal for tensors that are the same value of a trace, or the same state."""
    handle = tensor._handle
    return id(handle.cell) if handle.cell is not None else (handle.trace, handle.value)


def unique_name(name: str, taken: Collection[str]) -> str:
    """Returns the name, with a number if it is taken."""
    unique, number = name, 0
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    return unique


def named_tensors(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, LazyTensor]]:
    """Yields the device tensors among the arguments of a call, each with a name after its parameter."""
    arguments: Mapping[str, Any] = inspect.signature(function).bind(*args, **kwargs).arguments
    for name, value in arguments.items():
        if isinstance(value, LazyTensor):
            yield name, value
            continue
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, LazyTensor)]
        for index, tensor in enumerate(tensors):
            yield f"{name}_{index}", tensor


def labelled_values(closure: Closure) -> Iterator[tuple[str, LazyTensor | StepValue]]:
    """Yields the values of a step among the arguments of a call, each with what the script calls it.

    That is the text before the only value, as in `summarize_scalar("train/loss", loss)`, or the key of a dictionary,
    or else the parameter.
    """
    arguments: Mapping[str, Any] = inspect.signature(closure.function).bind(*closure.args, **closure.kwargs).arguments
    found: list[tuple[str, LazyTensor | StepValue]] = []
    texts: list[str] = []
    for name, argument in arguments.items():
        if isinstance(argument, str) and not found:
            texts.append(argument)
        for path, leaf in pytree.tree_leaves_with_path(argument):
            if isinstance(leaf, LazyTensor | StepValue):
                found.append((_label(name, path), leaf))
    if len(found) == 1 and texts:
        found = [(texts[-1], found[0][1])]
    yield from found


def _label(parameter: str, path: Sequence[object]) -> str:
    """What the script calls a value at a place in the argument of a parameter."""
    keys = [str(part.key) for part in path if isinstance(part, pytree.MappingKey)]
    indices = [str(part.idx) for part in path if isinstance(part, pytree.SequenceKey)]
    return "_".join([*(keys or [parameter]), *indices])


def takes_values(closure: Closure) -> bool:
    """Whether the arguments of a closure contain values of a step."""
    leaves = pytree.tree_leaves((closure.args, closure.kwargs))
    return any(isinstance(leaf, LazyTensor | StepValue) for leaf in leaves)


def unpack(outputs: Sequence[plan_pb2.Output], received: coordinator_pb2.StepOutputs) -> dict[str, torch.Tensor]:
    """Returns the outputs of a step as CPU tensors, by name.

    Raises:
        InternalError: The received tensors are not those of the plan.
    """
    if len(received.tensors) != len(outputs):
        raise InternalError(f"step {received.step} has {len(received.tensors)} outputs instead of {len(outputs)}")
    values: dict[str, torch.Tensor] = {}
    for output, data in zip(outputs, received.tensors, strict=True):
        if len(data) != tensor_bytes(output.type):
            raise InternalError(
                f"the output {output.name!r} has {len(data)} bytes instead of {tensor_bytes(output.type)}"
            )
        shape = tuple(output.type.shape)
        dtype = torch_dtype(output.type.element_type)
        if math.prod(shape) == 0:
            values[output.name] = torch.empty(shape, dtype=dtype)
        else:
            # A bytearray, since a closure may write to its tensor.
            values[output.name] = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    return values


def unknown_tensor(closure: Closure) -> UsageError:
    """Returns the error for a closure that is called with a tensor that is not an output."""
    name = getattr(closure.function, "__qualname__", repr(closure.function))
    return UsageError(
        f"{name} is called with a device tensor that is not an output of the step: return it from the traced function, "
        "or call the closure inside the traced function. (Only outputs that the first step uses are sent: call the "
        "closure in every step, and decide inside of it.)"
    )


def weight_in_closure(closure: Closure) -> UsageError:
    """Returns the error for a closure that is called with a parameter of the model."""
    tensors = named_tensors(closure.function, closure.args, closure.kwargs)
    names = [name for name, tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
    return UsageError(
        f"Attempting to get weight tensor {names[0]!r} in a step closure but this is not supported yet. Please use "
        '"cstorch.save()" API to save model weights, in a @cstorch.checkpoint_closure.'
    )
