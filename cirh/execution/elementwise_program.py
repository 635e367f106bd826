"""The element-by-element part of a module as few passes over memory.

A pass reads and writes whole blocks, so what counts is how many there are. In float32 and float64, products with
scalars and sums of products become one pass each: torch.add(alpha=), addcmul and addcdiv. The results differ from the
separate operations by rounding only.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from cirh.dialect.attributes import SplatAttr
from cirh.dialect.operations import Const, body_ops, func_of, return_of
from cirh.dialect.types import dtype, info, shape
from cirh.table.lookup import build, spec


@dataclass(frozen=True, slots=True)
class Block:
    """A block of argument `argument`."""

    argument: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Scalar:
    """A rank-0 value, by its place among the program's scalars."""

    index: int


@dataclass(frozen=True, slots=True)
class Factor:
    """A number known when the kernel is called: a constant times powers (1 or -1) of scalars."""

    constant: float = 1.0
    powers: tuple[tuple[int, int], ...] = ()

    def times(self, other: "Factor") -> "Factor":
        return Factor(self.constant * other.constant, self.powers + other.powers)

    def value(self, scalars: Sequence[torch.Tensor], numbers: dict[int, float]) -> float:
        """The number. `numbers` keeps those scalars that were read already."""
        result = self.constant
        for index, power in self.powers:
            scalar = numbers.get(index)
            if scalar is None:
                scalar = numbers[index] = float(scalars[index].item())
            # A division by zero means here what it means to a float32.
            result = result * scalar if power == 1 else (result / scalar if scalar else result * float("inf"))
        return result


@dataclass(eq=False, slots=True)
class Pass:
    """One torch call over blocks. `factor` is given under `keyword`, or as the second operand of torch.mul."""

    function: Callable[..., Any]
    operands: "tuple[Operand, ...]"
    dtype: torch.dtype
    kind: str = ""
    keyword: str = ""
    factor: Factor = field(default_factory=Factor)


Operand: TypeAlias = Block | Scalar | Pass


@dataclass(slots=True)
class ScalarStep:
    """A rank-0 operation, done once per call."""

    function: Callable[..., Any]
    operands: tuple[int, ...]
    result: int


@dataclass(slots=True)
class Program:
    """Passes in order; results are blocks made by a pass, or scalars."""

    shape: tuple[int, ...]
    scalars: list[torch.Tensor | None]  # constants, and None for arguments and for what steps make
    scalar_arguments: list[tuple[int, int]]  # (argument, index among the scalars)
    scalar_steps: list[ScalarStep]
    passes: list[Pass]
    results: list[Pass | Scalar]


def make_program(module: ModuleOp) -> Program | None:
    """The program of a verified module; None if not all of it goes element by element over one shape."""
    shapes = {shape(v) for op in body_ops(module) for v in op.results if not isinstance(op, Const)}
    shapes |= {shape(argument) for argument in func_of(module).block.args}
    shapes.discard(())
    if len(shapes) != 1:
        return None
    return _Fuser(module, shapes.pop()).program()


class _Fuser:
    def __init__(self, module: ModuleOp, whole: tuple[int, ...]) -> None:
        self._module = module
        self._shape = whole
        self._uses: Counter[SSAValue] = Counter(return_of(module).operands)
        for op in body_ops(module):
            self._uses.update(op.operands)
        self._values: dict[SSAValue, Operand] = {}
        self._used_once: dict[int, bool] = {}
        self._passes: list[Pass] = []
        self._scalars: list[torch.Tensor | None] = []
        self._scalar_steps: list[ScalarStep] = []

    def program(self) -> Program | None:
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
        # No pass makes a result that is an argument or a constant.
        if not passes or not all(
            isinstance(r, Pass) or (isinstance(r, Scalar) and not shape(v))
            for r, v in zip(results, return_of(self._module).operands, strict=True)
        ):
            return None
        kept = [r for r in results if not isinstance(r, Block)]
        return Program(self._shape, self._scalars, arguments, self._scalar_steps, passes, kept)

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
            return False  # a scalar would count less than a whole operand in the result's element type
        fused = self._fuse(op, operands) if info(result).dtype in (torch.float32, torch.float64) else None
        made_pass = fused if fused is not None else Pass(call.out, operands, dtype(result), kind=op.name)
        self._used_once[id(made_pass)] = self._uses[result] == 1
        self._passes.append(made_pass)
        self._values[result] = made_pass
        return True

    def _fuse(self, op: Operation, operands: tuple[Operand, ...]) -> Pass | None:
        kind = dtype(op.results[0])
        if op.name == "cirh.Pow" and isinstance(operands[1], Scalar):
            return self._power(operands[0], operands[1], kind)
        scaled = self._scaling(op.name, operands)
        if scaled is not None:
            factor, base = scaled
            inner, base = self._unscaled(base)
            return Pass(torch.mul, (base,), kind, kind="scale", factor=factor.times(inner))
        if op.name == "cirh.Add":
            for left, right in (operands, operands[::-1]):
                made = self._sum(left, right, Factor(), kind)
                if made is not None:
                    return made
        if op.name == "cirh.Sub":
            return self._sum(operands[0], operands[1], Factor(-1.0), kind)
        return None

    def _power(self, base: Operand, exponent: Scalar, kind: torch.dtype) -> Pass | None:
        known = self._scalars[exponent.index]
        if known is None or isinstance(base, Scalar):
            return None
        number = known.item()

        def power(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
            return torch.pow(x, number, out=out)

        return Pass(power, (base,), kind, kind="power")

    def _scaling(self, name: str, operands: tuple[Operand, ...]) -> tuple[Factor, Operand] | None:
        """The factor and the base of an operation that multiplies with a number."""
        if name == "cirh.Neg":
            return Factor(-1.0), operands[0]
        if name not in ("cirh.Mul", "cirh.Div"):
            return None
        left, right = operands
        if isinstance(right, Scalar):
            return self._factor(right, 1 if name == "cirh.Mul" else -1), left
        if isinstance(left, Scalar) and name == "cirh.Mul":
            return self._factor(left, 1), right
        return None

    def _factor(self, scalar: Scalar, power: int) -> Factor:
        known = self._scalars[scalar.index]
        if known is not None and (power == 1 or known.item() != 0):
            return Factor(float(known.item()) if power == 1 else 1.0 / float(known.item()))
        return Factor(1.0, ((scalar.index, power),))

    def _unscaled(self, operand: Operand) -> tuple[Factor, Operand]:
        """A factor is taken out of an operand for nothing: it costs no pass here, and spares one if all users do it."""
        if isinstance(operand, Pass) and operand.kind == "scale":
            return operand.factor, operand.operands[0]
        return Factor(), operand

    def _sum(self, left: Operand, right: Operand, sign: Factor, kind: torch.dtype) -> Pass | None:
        """left + sign * right in one pass, if right is a product."""
        scaled_once = isinstance(right, Pass) and self._used_once.get(id(right), False)
        factor, base = self._unscaled(right)
        factor = factor.times(sign)
        if isinstance(base, Pass) and base.kind in ("cirh.Mul", "cirh.Div") and not isinstance(left, Scalar):
            once = self._used_once[id(base)] and (base is right or scaled_once)
            if once and not any(isinstance(o, Scalar) for o in base.operands):
                first, x = self._unscaled(base.operands[0])
                second, y = self._unscaled(base.operands[1])
                if base.kind == "cirh.Mul":
                    total = factor.times(first).times(second)
                    return Pass(torch.addcmul, (left, x, y), kind, kind="sum", keyword="value", factor=total)
                return Pass(
                    torch.addcdiv,
                    (left, x, base.operands[1]),
                    kind,
                    kind="sum",
                    keyword="value",
                    factor=factor.times(first),
                )
        if base is not right:
            return Pass(torch.add, (left, base), kind, kind="sum", keyword="alpha", factor=factor)
        return None
