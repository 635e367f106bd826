"""A traced step: the parts of its recording, its graph of pure functions, and what goes into it and comes out."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cstorch._internal.tracing.cell import Cell
from cstorch._internal.tracing.tensor import LazyTensor
from waferbox.cirh.dialect.source import Source

# --- What a recording consists of -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument of a call that is a value of the recording."""

    value: int


def refs(nest: Any) -> Iterator[Ref]:
    """The values of the recording in the arguments of a call: nested lists, tuples and dictionaries."""
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
    """`results` numbers the tensors returned, in order; None stands for a result that is an argument written in place
    or is no tensor. `draw`: its place among the random operations of the step. `like`: the meta tensor of the first
    argument, where the operation takes the shape of that alone."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    source: Source
    draw: int | None = None
    like: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A value that the recording starts from: state (with its cell), an input of the step, or a small constant.

    digest: of the bytes of a CPU tensor that the step takes as it is, be it a small constant or travel as state.
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
    """A tensor that was not announced as state: which one, and the line that first used it."""

    tensor: "weakref.ref[LazyTensor]"
    description: str
    line: str


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor made in the step, and the line that made it."""

    tensor: "weakref.ref[LazyTensor]"
    source: Source


# --- A traced step: a graph of pure functions, and what goes into it and comes out ------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StateInfo:
    """A loop-carried tensor that the step reads or changes. `changed`: it has a new value after each step."""

    name: str
    cell: Cell
    changed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InputInfo:
    """A tensor of the batch, in flatten order."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputInfo:
    """A tensor whose value goes to the user after each step: the value that it has at the end of the step."""

    name: str
    tensor: LazyTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A traced step as a graph of pure ATen functions.

    number: of the recording, which no other one in the process has; its tensors bear it.

    The placeholders of `graph` are the states and then the inputs, in these orders; its results are the new values of
    the changed states and then the outputs. `result` is what the step returned, `optimizers` those that stepped in it.
    `kept_gradients` names the parameters to whose gradients plain PyTorch would add those of the next step.
    `repeats` is what every step that repeats it does in Python.
    `with_outputs` makes the same trace with more outputs: tensors of the trace, or whole states, as they are at the end
    of the step.
    `calls` and `arguments` are the recording that the graph was made of: all that was called, used or not.
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
