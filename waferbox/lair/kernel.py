"""Generated kernels, and their calls with tensors."""

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Final

import torch
from xdsl.dialects.builtin import ModuleOp

from waferbox.cirh.dialect.operations import func_of, return_of
from waferbox.cirh.dialect.types import TensorInfo, info
from waferbox.cirh.execution.kernel import span
from waferbox.lair.library import Function, build
from waferbox.lair.loop_program import LoopKernel
from waferbox.lair.lower import NotLowered, lower

MAX_BUFFERS: Final = 512  # of one kernel: compiled in about half a second


class GeneratedKernel:
    """A compiled loop over the elements of tensors. Thread-safe."""

    def __init__(self, function: Function, module: ModuleOp) -> None:
        self._function = function
        self.inputs: tuple[TensorInfo, ...] = tuple(info(argument) for argument in func_of(module).block.args)
        self.outputs: tuple[TensorInfo, ...] = tuple(info(value) for value in return_of(module).operands)
        shape = next((type.shape for type in (*self.inputs, *self.outputs) if type.shape), ())
        self._elements = prod(shape)

    def bind(
        self, out: Sequence[torch.Tensor], passing: Sequence[int] = (), part: tuple[int, int] = (0, 1)
    ) -> "BoundKernel":
        """The kernel bound to the tensors that it writes.

        Args:
            out: contiguous tensors of the outputs' types, none of which share memory.
            passing: positions of inputs that differ in each call, to which no reference is kept.
            part: number and count of the part of the elements that the call computes. Results of rank 0 are written by
                the last part alone: such a result may replace an input, which all parts have to read unchanged.
        """
        _check(out, self.outputs, "out tensor")
        number, count = part
        first, end = self._elements * number // count, self._elements * (number + 1) // count
        if number + 1 < count:
            out = [tensor if tensor.shape else torch.empty_like(tensor) for tensor in out]
        return BoundKernel(self._function, range(first, end), self.inputs, out, passing)


class BoundKernel:
    """A kernel bound to the tensors that it writes. Inputs that do not change between calls cost nothing.

    Used by one thread at a time.
    """

    def __init__(
        self,
        function: Function,
        elements: range,
        types: tuple[TensorInfo, ...],
        out: Sequence[torch.Tensor],
        passing: Sequence[int],
    ) -> None:
        self._function = function
        self._first = elements.start
        self._elements = len(elements)
        self._types = types
        self._out = tuple(out)
        self._passing = tuple(passing)
        self._given: list[torch.Tensor | None] = [None] * len(types)
        self._read: list[torch.Tensor | None] = [None] * len(types)  # keeps the memory of the buffers alive
        self._buffers = (ctypes.c_void_p * (len(types) + len(out)))()
        for index, tensor in enumerate(out, start=len(types)):
            self._buffers[index] = self._begin(tensor)
        self._written = [span(tensor) for tensor in out]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> None:
        """Writes the results. Inputs may be among the written tensors."""
        given = self._given
        if len(inputs) != len(given):
            raise ValueError(f"{len(inputs)} inputs for a kernel of {len(given)}")
        for index, tensor in enumerate(inputs):
            if tensor is not given[index]:
                self._take(index, tensor)
        self._function(self._elements, self._buffers)
        for index in self._passing:
            given[index] = self._read[index] = None

    def _take(self, index: int, tensor: torch.Tensor) -> None:
        _check([tensor], self._types[index : index + 1], "input")
        start, end = span(tensor)
        # With a shifted overlap, the kernel would write elements of the input before it reads them.
        clashes = any((start, end) != (a, b) and start < b and a < end for a, b in self._written)
        direct = tensor.is_contiguous() and not clashes
        read = tensor if direct else tensor.clone(memory_format=torch.contiguous_format)
        self._buffers[index] = self._begin(read)
        self._read[index] = read
        self._given[index] = tensor if direct else None

    def _begin(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr() + (self._first * tensor.itemsize if tensor.shape else 0)


def _check(tensors: Sequence[torch.Tensor], types: Sequence[TensorInfo], what: str) -> None:
    if len(tensors) != len(types):
        raise ValueError(f"{len(tensors)} {what}s for a kernel of {len(types)}")
    for tensor, type in zip(tensors, types, strict=True):
        if tensor.dtype is not type.dtype or tensor.shape != type.shape:
            raise ValueError(f"an {what} is {tensor.dtype}{list(tensor.shape)}, not {type.dtype}{list(type.shape)}")


def generate(modules: Mapping[int, ModuleOp], folder: Path) -> dict[int, GeneratedKernel]:
    """Generates kernels for those of the verified modules that LAIR can express, under the same numbers.

    Modules that differ only in their shapes share one loop. One of very many tensors is left out: the time of its
    compilation grows with the square of their number. Raises NotBuilt if the kernels cannot be compiled.
    """
    numbers: dict[LoopKernel, int] = {}
    loops: dict[int, int] = {}
    for key, module in modules.items():
        with suppress(NotLowered):
            loop = lower(module)
            if len(loop.arguments) + len(loop.results) <= MAX_BUFFERS:
                loops[key] = numbers.setdefault(loop, len(numbers))
    functions = build(list(numbers), folder)
    return {key: GeneratedKernel(functions[number], modules[key]) for key, number in loops.items()}
