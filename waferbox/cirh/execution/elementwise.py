"""Running an element-by-element module over blocks that stay in the cache, with results written in place.

The updates of weights run here. Operation by operation over whole tensors, they take several times as long.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from xdsl.dialects.builtin import ModuleOp

from waferbox.cirh.dialect.operations import func_of, return_of
from waferbox.cirh.dialect.types import TensorInfo, info
from waferbox.cirh.execution.elementwise_program import Block, ElementwiseProgram, Pass, Scalar, make_program
from waferbox.cirh.execution.kernel import getter, span
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.text.parser import parse_module

# Elements of a block: a handful of float32 blocks fit a core's second-level cache.
BLOCK = 1 << 16


class _Scratch(threading.local):
    """Blocks for intermediate values, which all kernels of a thread share: their content lasts for one block."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def block(self, dtype: torch.dtype, number: int) -> torch.Tensor:
        key = (dtype, number)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = torch.empty(BLOCK, dtype=dtype)
        return block


_SCRATCH = _Scratch()


@dataclass(frozen=True, slots=True)
class _BoundPass:
    """A pass whose operands and result are indices in the list of blocks of inputs, outputs, scratch and scalars."""

    source: Pass
    operands: Callable[[list[Any]], Any]
    result: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """The buffers of all passes, for one way in which outputs share memory with inputs."""

    passes: list[_BoundPass]
    scratch: list[tuple[torch.dtype, int]]
    copies: list[tuple[int, int]]  # (from, to), at the end of each block


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """A kernel bound to the tensors of a call, which are cut into blocks."""

    inputs: tuple[tuple[int, torch.Tensor], ...]  # those of the kernel's shape, with their positions
    outputs: tuple[tuple[int, torch.Tensor], ...]
    scalars: tuple[tuple[int, torch.dtype], ...]
    targets: list[torch.Tensor]  # outputs, or tensors that are copied there at the end
    layout: _Layout
    blocks: list[list[torch.Tensor]]
    num_out: int
    thread: int  # the thread whose scratch the blocks use

    def fits(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> bool:
        """Whether a call has the same tensors; its scalars may be others of their types."""
        return (
            len(inputs) == len(self.inputs) + len(self.scalars)
            and len(out) == self.num_out
            and threading.get_ident() == self.thread
            and all(inputs[index] is tensor for index, tensor in self.inputs)
            and all(out[index] is tensor for index, tensor in self.outputs)
            and all(inputs[index].dtype is dtype and not inputs[index].shape for index, dtype in self.scalars)
        )


class ElementwiseKernel:
    """A module whose operations all work element by element over one shape, and over scalars."""

    def __init__(self, program: ElementwiseProgram, module: ModuleOp) -> None:
        self._program = program
        self.inputs: tuple[TensorInfo, ...] = tuple(info(a) for a in func_of(module).block.args)
        self.outputs: tuple[TensorInfo, ...] = tuple(info(v) for v in return_of(module).operands)
        self._elements = prod(program.shape)
        self._vector_inputs = [i for i, type in enumerate(self.inputs) if type.shape]
        self._vector_outputs = [i for i, type in enumerate(self.outputs) if type.shape]
        self._layouts: dict[tuple[tuple[int, ...], ...], _Layout] = {}
        self._bound: _Bound | None = None
        self._steps = [(s.function, getter(s.operands), s.result) for s in program.scalar_steps]

    @classmethod
    def build(cls, module: ModuleOp | str) -> "ElementwiseKernel | None":
        """The kernel; None if the module is of another kind. Raises CirhError for an invalid module."""
        if isinstance(module, str):
            module = parse_module(module)
        verify(module)
        program = make_program(module)
        return None if program is None else cls(program, module)

    def __call__(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
        """Writes the results to `out`.

        Tensors of `out` may be inputs, since all reads of an element come before its write. Two of them must not share
        memory. A call with the tensors of the call before, as in training, needs no preparation.
        """
        bound = self._bound
        if bound is None or not bound.fits(inputs, out):
            self._check(inputs, self.inputs, "input")
            self._check(out, self.outputs, "out tensor")
            bound = self._bound = self._bind(inputs, out)
        with torch.no_grad():
            scalars = self._scalars(inputs)
            if self._elements:
                self._run(bound, out, scalars)
            written = [(out[i], scalars[r.index]) for i, r in enumerate(self._program.results) if isinstance(r, Scalar)]
            if len(written) > 1:
                # A value may be an input that is also the target of an earlier copy.
                written = [(target, value.clone()) for target, value in written]
            for target, value in written:
                target.copy_(value)

    @staticmethod
    def _check(given: Sequence[torch.Tensor], types: tuple[TensorInfo, ...], what: str) -> None:
        if len(given) != len(types):
            raise ValueError(f"{len(given)} {what}s for a kernel of {len(types)}")
        for index, (tensor, type) in enumerate(zip(given, types, strict=True)):
            if tensor.dtype is not type.dtype or tensor.shape != type.shape:
                raise ValueError(
                    f"{what} {index} is {tensor.dtype}{list(tensor.shape)}, not {type.dtype}{list(type.shape)}"
                )

    def _scalars(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """All scalars. Results of rank 0 are written last, so that scalar arguments need no copies."""
        values: list[Any] = list(self._program.scalars)
        for argument, index in self._program.scalar_arguments:
            values[index] = inputs[argument]
        for function, operands, result in self._steps:
            values[result] = function(*operands(values))
        return values

    def _bind(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> _Bound:
        """The part of a call that depends on the tensors alone."""
        sources = [inputs[i] for i in self._vector_inputs]
        spans = [span(tensor) for tensor in sources]
        targets = [out[i] for i in self._vector_outputs]
        shared: list[tuple[int, ...]] = []
        for number, target in enumerate(targets):
            place = span(target)
            # A contiguous input has each element where the output has it; a strided view of the memory has not.
            same = tuple(i for i, other in enumerate(spans) if other == place and sources[i].is_contiguous())
            clashes = [
                i for i, other in enumerate(spans) if i not in same and other[0] < place[1] and place[0] < other[1]
            ]
            if clashes or not target.is_contiguous():
                # This output cannot be written block by block.
                targets[number], same = torch.empty(target.shape, dtype=target.dtype), ()
            shared.append(same)
        layout = self._layout(tuple(shared))
        return _Bound(
            inputs=tuple((i, inputs[i]) for i in self._vector_inputs),
            outputs=tuple((i, out[i]) for i in self._vector_outputs),
            scalars=tuple((i, type.dtype) for i, type in enumerate(self.inputs) if not type.shape),
            targets=targets,
            layout=layout,
            blocks=self._blocks(sources, targets, layout.scratch) if self._elements else [],
            num_out=len(out),
            thread=threading.get_ident(),
        )

    def _run(self, bound: _Bound, out: Sequence[torch.Tensor], scalars: list[Any]) -> None:
        passes = [(p.source.function, p.operands, p.result) for p in bound.layout.passes]
        for blocks in bound.blocks:
            values = [*blocks, *scalars]
            for function, operands, result in passes:
                function(*operands(values), out=values[result])
            for origin, target_slot in bound.layout.copies:
                values[target_slot].copy_(values[origin])
        for target, (index, _) in zip(bound.targets, bound.outputs, strict=True):
            if target is not out[index]:
                out[index].copy_(target)

    def _blocks(
        self, sources: list[torch.Tensor], targets: list[torch.Tensor], scratch: list[tuple[torch.dtype, int]]
    ) -> list[list[torch.Tensor]]:
        """The inputs, outputs and scratch of every block."""
        buffers = [_SCRATCH.block(dtype, number) for dtype, number in scratch]
        if self._elements <= BLOCK:
            whole = self._program.shape
            return [[*sources, *targets, *(buffer[: self._elements].view(whole) for buffer in buffers)]]
        flat = [tensor.reshape(-1) for tensor in (*sources, *targets)]
        parts = [[*part] for part in zip(*(torch.split(tensor, BLOCK) for tensor in flat), strict=True)]
        for part in parts[:-1]:
            part += buffers
        rest = self._elements % BLOCK or BLOCK
        parts[-1] += [buffer[:rest] for buffer in buffers]
        return parts

    def _layout(self, shared: tuple[tuple[int, ...], ...]) -> _Layout:
        layout = self._layouts.get(shared)
        if layout is None:
            layout = self._layouts[shared] = _Planner(self._program, self._vector_inputs, shared).layout()
        return layout


class _Planner:
    """Assigns the result of each pass to an output whose old content is no longer read, or to scratch."""

    def __init__(
        self, program: ElementwiseProgram, vector_inputs: list[int], shared: tuple[tuple[int, ...], ...]
    ) -> None:
        self._program = program
        self._block_slots = {argument: slot for slot, argument in enumerate(vector_inputs)}
        self._shared = shared
        self._scratch: list[tuple[torch.dtype, int]] = []
        self._first_scratch = len(vector_inputs) + len(shared)
        self._free: dict[torch.dtype, list[int]] = {}
        self._last_read: dict[int, int] = {}  # identity of a pass -> the last pass that reads its result
        self._last_block_read = [-1] * len(vector_inputs)
        for number, made in enumerate(program.passes):
            for operand in made.operands:
                if isinstance(operand, Pass):
                    self._last_read[id(operand)] = number
                elif isinstance(operand, Block):
                    self._last_block_read[self._block_slots[operand.argument]] = number
        self._outputs: dict[int, list[int]] = {}
        passes = [result for result in program.results if isinstance(result, Pass)]
        for output, result in enumerate(passes):
            self._outputs.setdefault(id(result), []).append(output)

    def layout(self) -> _Layout:
        inputs = len(self._block_slots)
        slots: dict[int, int] = {}
        placed: list[tuple[Pass, int]] = []
        copies: list[tuple[int, int]] = []
        for number, made in enumerate(self._program.passes):
            outputs = self._outputs.get(id(made), [])
            direct = next((o for o in outputs if self._is_free(o, number)), None)
            self._release(made, number, slots)
            slot = inputs + direct if direct is not None else self._take(made.dtype)
            slots[id(made)] = slot
            placed.append((made, slot))
            copies += [(slot, inputs + output) for output in outputs if output != direct]
        first_scalar = self._first_scratch + len(self._scratch)
        bound = [
            _BoundPass(p, getter(tuple(self._slot(o, slots, first_scalar) for o in p.operands)), s) for p, s in placed
        ]
        return _Layout(bound, self._scratch, copies)

    def _slot(self, operand: Pass | Block | Scalar, slots: dict[int, int], first_scalar: int) -> int:
        if isinstance(operand, Pass):
            return slots[id(operand)]
        if isinstance(operand, Block):
            return self._block_slots[operand.argument]
        return first_scalar + operand.index

    def _is_free(self, output: int, number: int) -> bool:
        """Whether no later pass reads the old content of the output's memory."""
        return all(self._last_block_read[block] <= number for block in self._shared[output])

    def _release(self, made: Pass, number: int, slots: dict[int, int]) -> None:
        """Frees scratch of operands that no later pass reads; this pass may write there itself, element by element."""
        for operand in {id(o): o for o in made.operands if isinstance(o, Pass)}.values():
            slot = slots[id(operand)]
            last = self._last_read[id(operand)] == number and id(operand) not in self._outputs
            if last and slot >= self._first_scratch:
                self._free.setdefault(operand.dtype, []).append(slot)

    def _take(self, dtype: torch.dtype) -> int:
        free = self._free.get(dtype)
        if free:
            return free.pop()
        self._scratch.append((dtype, sum(1 for kind, _ in self._scratch if kind is dtype)))
        return self._first_scratch + len(self._scratch) - 1
