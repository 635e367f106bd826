"""What a recording consists of."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cirh.dialect.source import Source
from cstorch.tracing.tensors.cell import Cell
from cstorch.tracing.tensors.tensor import LazyTensor


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
class Met:
    """A tensor that was not announced as state: which one, and the line that first used it."""

    tensor: "weakref.ref[LazyTensor]"
    description: str
    line: str


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor made in the step, and the line that made it."""

    tensor: "weakref.ref[LazyTensor]"
    source: Source
