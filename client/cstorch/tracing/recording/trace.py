"""A traced step: a graph of pure functions, and what goes into it and comes out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cstorch.tracing.recording.parts import Argument, Call
from cstorch.tracing.tensors.cell import Cell
from cstorch.tracing.tensors.tensor import LazyTensor


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
