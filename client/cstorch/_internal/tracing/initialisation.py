"""Initialisation: the calls that will make the value of a tensor, stored instead of its bytes."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

from waferbox.cirh.dialect import elements
from waferbox.cirh.execution import initialisation
from wsc.v1 import initialisation_pb2

_numbers = itertools.count()
_FILLS = frozenset({torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operand:
    """A strided view of a tensor that an initialisation makes, or of a small CPU tensor."""

    source: "Initialisation | torch.Tensor"
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One ATen call.

    number: Increases in the order in which the script made the calls.
    args, kwargs: The arguments, with operands instead of tensors.
    generator: The state of the random generator before the call.
    """

    number: int = field(default_factory=lambda: next(_numbers))
    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    generator: torch.Tensor | None = None

    def operands(self) -> Iterator[Operand]:
        """Yields all operands, in order."""
        for argument in (*self.args, *self.kwargs.values()):
            for item in argument if isinstance(argument, (list, tuple)) else (argument,):
                if isinstance(item, Operand):
                    yield item


class Initialisation:
    """A tensor of zeros, and the calls that write to it or replace it. Used by the script's thread.

    A call that reads another initialisation reads the value at that time, which its calls with smaller numbers make.
    So calls are added, and never removed.
    """

    __slots__ = ("_calls", "_num_calls", "_scratch", "dtype", "numel")

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel = numel
        self.dtype = dtype
        self._calls: list[Call] = []
        # The number of calls, and the bytes of buffers, in the program: an upper bound.
        self._num_calls = 0
        self._scratch = numel * dtype.itemsize

    @property
    def is_zero(self) -> bool:
        """Whether there are no calls."""
        return not self._calls

    @property
    def is_fill(self) -> bool:
        """Whether all elements are the same number, which takes no time to make."""
        return all(call.func in _FILLS for call in self._calls)

    def add(self, call: Call) -> bool:
        """Adds a call, unless the program would become too large; returns whether it was added."""
        num_calls, scratch = self._num_calls + 1, self._scratch
        for operand in call.operands():
            if isinstance(operand.source, torch.Tensor):
                scratch += operand.source.nbytes
            elif operand.source is not self:
                num_calls += operand.source._num_calls
                scratch += operand.source._scratch
        limit = initialisation.scratch_limit(self.numel * self.dtype.itemsize)
        if num_calls > initialisation.MAXIMUM_CALLS or scratch > limit:
            return False
        self._num_calls, self._scratch = num_calls, scratch
        self._calls.append(call)
        return True

    def program(self) -> initialisation_pb2.InitialProgram:
        """Returns the calls as a message."""
        return _Writer(self).program

    def run(self, out: torch.Tensor) -> None:
        """Makes the value in a contiguous CPU tensor."""
        initialisation.run(self.program(), out)


class _Writer:
    """The writer of one program: its own calls and those that they depend on, in the order of the script."""

    def __init__(self, root: Initialisation) -> None:
        self.program = initialisation_pb2.InitialProgram()
        self._buffers: dict[int, int] = {}
        self.program.result = self._buffer(root)
        for maker, call in sorted(_needed(root), key=lambda item: item[1].number):
            self._write(maker, call)

    def _write(self, maker: Initialisation, call: Call) -> None:
        written = self.program.calls.add(operation=str(call.func))
        if not call.func._schema.is_mutable:
            written.result = self._buffer(maker)
        if call.generator is not None:
            written.generator = call.generator.numpy().tobytes()
        for argument in call.args:
            self._argument(written.arguments.add(), argument)
        for name, argument in call.kwargs.items():
            self._argument(written.arguments.add(name=name), argument)

    def _argument(self, written: initialisation_pb2.InitialArgument, argument: Any) -> None:
        match argument:
            case None:
                pass
            case Operand():
                self._view(written.view, argument)
            case [Operand(), *_]:
                for operand in argument:
                    self._view(written.views.views.add(), operand)
            case bool():
                written.flag = argument
            case int():
                written.integer = argument
            case float():
                written.number = argument
            case torch.dtype():
                written.element_type = elements.element_to_proto(argument)
            case _:
                written.integers.SetInParent()
                written.integers.values.extend(argument)

    def _view(self, view: initialisation_pb2.BufferView, operand: Operand) -> None:
        view.buffer = self._buffer(operand.source)
        view.shape.extend(operand.shape)
        view.stride.extend(operand.stride)
        view.offset = operand.offset

    def _buffer(self, source: Initialisation | torch.Tensor) -> int:
        number = self._buffers.get(id(source))
        if number is None:
            number = self._buffers[id(source)] = len(self.program.buffers)
            numel = source.numel() if isinstance(source, torch.Tensor) else source.numel
            element_type = elements.element_to_proto(source.dtype)
            buffer = self.program.buffers.add(element_type=element_type, elements=numel)
            if isinstance(source, torch.Tensor):
                buffer.value = source.view(-1).view(torch.uint8).numpy().tobytes()
        return number


def _needed(root: Initialisation) -> Iterator[tuple[Initialisation, Call]]:
    """Yields all calls that the value depends on, each once."""
    done: dict[Initialisation, int] = {}  # the number of its calls that were yielded
    waiting: list[tuple[Initialisation, int | None]] = [(root, None)]
    while waiting:
        maker, before = waiting.pop()
        calls = maker._calls[done.get(maker, 0) :]
        for call in calls:
            if before is not None and call.number >= before:
                break
            done[maker] = done.get(maker, 0) + 1
            yield maker, call
            for operand in call.operands():
                if isinstance(operand.source, Initialisation) and operand.source is not maker:
                    waiting.append((operand.source, call.number))
