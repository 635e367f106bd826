"""A traced step: the parts of its recording, its graph of pure functions, its states, inputs and outputs."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cstorch._internal.tracing.cell import Cell
from cstorch._internal.tracing.tensor import LazyTensor
from waferbox.cirh.dialect.source import Source

# --- The parts of a recording -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument of a call that is a value of the recording."""

    value: int


def refs(nest: Any) -> Iterator[Ref]:
    """Yields the values of the recording in the arguments of a call: nested lists, tuples and dictionaries."""
    if isinstance(nest, Ref):
        yield nest
    elif isinstance(nest, (list, tuple)):
        for item in nest:
            yield from refs(item)
    elif isinstance(nest, dict):
        for item in nest.values():
            yield from refs(item)


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded call.

    results: The number of each returned tensor; None for an argument that was written in place, and for no tensor.
    source: The line and the module of the call.
    draw: The index among the random operations of the step.
    like: The meta tensor of the first argument, if the operation reads only its shape and type.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    source: Source
    draw: int | None = None
    like: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A value that the recording starts from: a state (with its cell), an input of the step, or a small constant.

    digest: The digest of the bytes of a CPU tensor that the step uses, as a constant or as a state that never changes.
    """

    kind: str
    name: str
    value: int
    meta: torch.Tensor
    cell: Cell | None = None
    constant: torch.Tensor | None = None
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class UnannouncedTensor:
    """A tensor that was not announced as a state, its description, and the line that first used it."""

    tensor: "weakref.ref[LazyTensor]"
    description: str
    line: str


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor made in the step, and the line that made it."""

    tensor: "weakref.ref[LazyTensor]"
    source: Source


# --- The traced step --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StateInfo:
    """A state that the step reads or changes. `changed`: whether it has a new value after each step."""

    name: str
    cell: Cell
    changed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InputInfo:
    """A tensor of the batch."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputInfo:
    """A tensor whose value at the end of each step is sent to the script."""

    name: str
    tensor: LazyTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A traced step as a graph of pure ATen functions.

    number: The number of the recording, unique in the process; its tensors have it as well.
    graph: Its placeholders are the states and then the inputs; its results are the new values of the changed states and
        then the outputs.
    states, inputs, outputs: In the order of the graph; inputs in flatten order of the batch.
    result: The result of the step's function.
    calls, arguments: The recording from which the graph was made: all calls, used or not.
    optimizers: The optimizers that stepped.
    repeats: The Python functions that every step that repeats the trace calls.
    with_outputs: Returns the same trace with more outputs: tensors of the trace, or whole states, at the step's end.
    kept_gradients: The parameters to whose gradients plain PyTorch would add those of the next step.
    """

    number: int
    graph: fx.Graph
    states: tuple[StateInfo, ...]
    inputs: tuple[InputInfo, ...]
    outputs: tuple[OutputInfo, ...]
    result: Any
    calls: tuple[Call, ...]
    arguments: tuple[Argument, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    repeats: Sequence[Callable[[], None]]
    with_outputs: "Callable[[Sequence[OutputInfo]], Trace]"
    kept_gradients: tuple[str, ...]
