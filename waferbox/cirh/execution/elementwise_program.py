"""The element-by-element part of a module as passes over blocks of memory.

A pass reads and writes a whole block, and runs one operation. Passes are not joined to torch's fused operations, such
as addcmul, which round once: results have to equal those of the generated loops, where each operation rounds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from waferbox.cirh.dialect.attributes import SplatAttr
from waferbox.cirh.dialect.operations import Const, body_ops, func_of, return_of
from waferbox.cirh.dialect.types import dtype, shape
from waferbox.cirh.table.lookup import build, spec


@dataclass(frozen=True, slots=True)
class Block:
    """A block of argument `argument`."""

    argument: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value of rank 0, by its index among the program's scalars."""

    index: int


@dataclass(eq=False, slots=True)
class Pass:
    """One torch call over blocks."""

    function: Callable[..., Any]
    operands: "tuple[Operand, ...]"
    dtype: torch.dtype


Operand: TypeAlias = Block | Scalar | Pass


@dataclass(slots=True)
class ScalarStep:
    """An operation of rank 0, run once in a call."""

    function: Callable[..., Any]
    operands: tuple[int, ...]
    result: int


@dataclass(slots=True)
class ElementwiseProgram:
    """The passes of a module in order. Results are blocks of a pass, or scalars."""

    shape: tuple[int, ...]
    scalars: list[torch.Tensor | None]  # constants; None for arguments and for results of steps
    scalar_arguments: list[tuple[int, int]]  # (argument, index among the scalars)
    scalar_steps: list[ScalarStep]
    passes: list[Pass]
    results: list[Pass | Scalar]


def make_program(module: ModuleOp) -> ElementwiseProgram | None:
    """The program of a verified module; None unless all of it works element by element over one shape."""
    shapes = {shape(v) for op in body_ops(module) for v in op.results if not isinstance(op, Const)}
    shapes |= {shape(argument) for argument in func_of(module).block.args}
    shapes.discard(())
    if len(shapes) != 1:
        return None
    return _Maker(module, shapes.pop()).program()


class _Maker:
    """Makes the program of one module."""

    def __init__(self, module: ModuleOp, whole: tuple[int, ...]) -> None:
        self._module = module
        self._shape = whole
        self._values: dict[SSAValue, Operand] = {}
        self._passes: list[Pass] = []
        self._scalars: list[torch.Tensor | None] = []
        self._scalar_steps: list[ScalarStep] = []

    def program(self) -> ElementwiseProgram | None:
        arguments: list[tuple[int, int]] = []
        for number, argument in enumerate(func_of(self._module).block.args):
            if shape(argument):
                self._values[argument] = Block(number, dtype(argument))
            else:
                scalar = self._scalar(None)
                self._values[argument] = scalar
                arguments.append((number, scalar.index))
        for op in body_ops(self._module):
            if not self._add(op):
                return None
        results = [self._values[value] for value in return_of(self._module).operands]
        passes = self._alive(results)
        # A result that is an argument or a constant is made by no pass.
        if not passes or not all(
            isinstance(r, Pass) or (isinstance(r, Scalar) and not shape(v))
            for r, v in zip(results, return_of(self._module).operands, strict=True)
        ):
            return None
        kept = [r for r in results if not isinstance(r, Block)]
        return ElementwiseProgram(self._shape, self._scalars, arguments, self._scalar_steps, passes, kept)

    def _alive(self, results: list[Operand]) -> list[Pass]:
        alive: set[int] = set()
        stack = [r for r in results if isinstance(r, Pass)]
        while stack:
            made = stack.pop()
            if id(made) not in alive:
                alive.add(id(made))
                stack += [o for o in made.operands if isinstance(o, Pass)]
        return [p for p in self._passes if id(p) in alive]

    def _scalar(self, value: torch.Tensor | None) -> Scalar:
        self._scalars.append(value)
        return Scalar(len(self._scalars) - 1)

    def _add(self, op: Operation) -> bool:
        if isinstance(op, Const):
            if not isinstance(op.value, SplatAttr):
                return False
            self._values[op.results[0]] = self._scalar(op.value.scalar())
            return True
        if op.name == "cirh.BroadcastInDim":
            operand = self._values[op.operands[0]]
            self._values[op.results[0]] = operand
            return isinstance(operand, Scalar) or shape(op.operands[0]) == shape(op.results[0])
        if not spec(op.name).pointwise or len(op.results) != 1:
            return False
        call = build(op)
        operands = tuple(self._values[operand] for operand in op.operands)
        result = op.results[0]
        if not shape(result):
            indices = tuple(o.index for o in operands if isinstance(o, Scalar))
            made = self._scalar(None)
            self._scalar_steps.append(ScalarStep(call.function, indices, made.index))
            self._values[result] = made
            return len(indices) == len(operands)
        if call.out is None or all(isinstance(o, Scalar) for o in operands):
            return False
        kinds = {dtype(operand) for operand in op.operands}
        if len(kinds) > 1 and not op.name.startswith("cirh."):
            return False  # in the promotion of types, a scalar counts less than the whole operand that it stands for
        power = self._power(operands[0], operands[1], dtype(result)) if op.name == "cirh.Pow" else None
        made_pass = power if power is not None else Pass(call.out, operands, dtype(result))
        self._passes.append(made_pass)
        self._values[result] = made_pass
        return True

    def _power(self, base: Operand, exponent: Operand, kind: torch.dtype) -> Pass | None:
        """A power with a constant exponent, as torch has fast paths for a square and the like."""
        known = self._scalars[exponent.index] if isinstance(exponent, Scalar) else None
        if known is None or isinstance(base, Scalar):
            return None
        number = known.item()

        def power(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
            return torch.pow(x, number, out=out)

        return Pass(power, (base,), kind)
