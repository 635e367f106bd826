"""LAIR from CIRH, for modules that work element by element over one shape, and over single numbers."""

from collections.abc import Callable, Mapping

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from waferbox.cirh.dialect.attributes import SplatAttr, attrs
from waferbox.cirh.dialect.operations import Const, body_ops, func_of, return_of
from waferbox.cirh.dialect.types import dtype, shape
from waferbox.cirh.table.lookup import spec
from waferbox.lair.loop_program import Argument, LoopKernel, Result, Statement

# Opcodes that a loop may have: a compiler makes vector instructions of them. The others are calls of the C library for
# each element, which are slower than torch's own.
_OPCODES = """
    const add sub mul div neg abs sqrt rsqrt reciprocal maximum minimum select floor ceil round trunc sign
    eq ne lt le gt ge and or xor not cast isnan
"""
_VECTORISED = frozenset(_OPCODES.split())
_BINARY: Mapping[str, str] = {
    "cirh.Add": "add",
    "cirh.Sub": "sub",
    "cirh.Mul": "mul",
    "cirh.Div": "div",
    "cirh.And": "and",
    "cirh.Or": "or",
    "cirh.Xor": "xor",
    "cirh.Atan2": "atan2",
    "aten.maximum": "maximum",
    "aten.minimum": "minimum",
}
_UNARY: Mapping[str, str] = {
    "cirh.Tanh": "tanh",
    "cirh.Sqrt": "sqrt",
    "cirh.Rsqrt": "rsqrt",
    "cirh.Exp": "exp",
    "cirh.Log": "log",
    "cirh.Abs": "abs",
    "cirh.Neg": "neg",
    "cirh.Cos": "cos",
    "cirh.Sin": "sin",
    "cirh.Floor": "floor",
    "cirh.Ceil": "ceil",
    "cirh.Round": "round",
    "cirh.Sign": "sign",
    "cirh.Reciprocal": "reciprocal",
    "cirh.Not": "not",
    "aten.isnan": "isnan",
    "aten.trunc": "trunc",
    "aten.log1p": "log1p",
    "aten.expm1": "expm1",
}
_FLOATS_ONLY = frozenset({"div", "sqrt", "rsqrt", "reciprocal", "pow", "maximum", "minimum", "sign", "neg", "abs"})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class NotLowered(Exception):
    """Raised for a module that LAIR cannot express, or that is not worth a loop, with the reason."""


def lower(module: ModuleOp) -> LoopKernel:
    """The kernel of a verified module.

    Raises:
        NotLowered: some operation does not work element by element, or is not worth a loop.
    """
    shapes = {shape(argument) for argument in func_of(module).block.args}
    shapes |= {shape(value) for op in body_ops(module) for value in op.results if not isinstance(op, Const)}
    shapes.discard(())
    if len(shapes) > 1:
        raise NotLowered(f"it works on {len(shapes)} shapes")
    return _Lowering(module).kernel()


class _Lowering:
    """Lowers one module. Each value gets a number, and a statement in the loop or before it."""

    def __init__(self, module: ModuleOp) -> None:
        self._module = module
        self._values: dict[SSAValue, int] = {}
        self._whole: list[bool] = []  # by value
        self._dtypes: list[torch.dtype] = []
        self._once: list[Statement] = []
        self._loop: list[Statement] = []
        self._literals: dict[tuple[torch.dtype, str], int] = {}

    def kernel(self) -> LoopKernel:
        arguments = []
        for argument in func_of(self._module).block.args:
            whole = bool(shape(argument))
            self._values[argument] = value = self._number(dtype(argument), whole)
            arguments.append(Argument(value=value, dtype=dtype(argument), whole=whole))
        for op in body_ops(self._module):
            self._values[op.results[0]] = self._lower(op)
        results = [
            Result(value=self._values[value], dtype=dtype(value), whole=bool(shape(value)))
            for value in return_of(self._module).operands
        ]
        return LoopKernel(
            arguments=tuple(arguments), once=tuple(self._once), loop=tuple(self._loop), results=tuple(results)
        )

    def _number(self, kind: torch.dtype, whole: bool) -> int:
        self._dtypes.append(kind)
        self._whole.append(whole)
        return len(self._whole) - 1

    def _emit(self, opcode: str, *operands: int, to: torch.dtype | None = None) -> int:
        kind = to if to is not None else self._dtypes[operands[0]]
        if opcode in _FLOATS_ONLY and kind not in _FLOATS:
            raise NotLowered(f"it has a {opcode} of whole numbers")
        whole = any(self._whole[operand] for operand in operands)
        if whole and opcode not in _VECTORISED:
            raise NotLowered(f"it has a {opcode} for each element")
        value = self._number(kind, whole)
        statement = Statement(value=value, opcode=opcode, operands=operands, dtype=kind)
        (self._loop if whole else self._once).append(statement)
        return value

    def _literal(self, number: float | int | bool, kind: torch.dtype) -> int:
        # Rounded to the type, as torch does before it computes.
        exact = torch.tensor(number, dtype=kind).item()
        value = self._literals.get((kind, repr(exact)))
        if value is None:
            value = self._literals[kind, repr(exact)] = self._number(kind, False)
            self._once.append(Statement(value=value, opcode="const", operands=(), dtype=kind, literal=exact))
        return value

    def _lower(self, op: Operation) -> int:
        if isinstance(op, Const):
            if not isinstance(op.value, SplatAttr):
                raise NotLowered("it has a constant with more than one value")
            return self._literal(op.value.scalar().item(), dtype(op.results[0]))
        operands = [self._values[operand] for operand in op.operands]
        if op.name == "cirh.BroadcastInDim" and (
            not self._whole[operands[0]] or shape(op.operands[0]) == shape(op.results[0])
        ):
            return operands[0]
        if not spec(op.name).pointwise or len(op.results) != 1:
            raise NotLowered(f"it has a {op.name}")
        rule = _RULES.get(op.name)
        if rule is not None:
            return rule(self, op, operands)
        opcode = _BINARY.get(op.name) or _UNARY.get(op.name)
        if opcode is None:
            raise NotLowered(f"it has a {op.name}")
        self._same(op, operands)
        return self._emit(opcode, *operands, to=dtype(op.results[0]))

    def _same(self, op: Operation, operands: list[int]) -> None:
        if len({self._dtypes[operand] for operand in operands}) > 1:
            raise NotLowered(f"it has a {op.name} of different types")

    def _joined(self, op: Operation, operands: list[int]) -> None:
        """Refuses halves, for operations of several statements that torch rounds once. Raises NotLowered."""
        self._same(op, operands)
        if self._dtypes[operands[0]] in (torch.float16, torch.bfloat16):
            raise NotLowered(f"it has a {op.name} in half precision")

    # --- Operations of several statements, or with attributes ---------------------------------------------------------

    def compare(self, op: Operation, operands: list[int]) -> int:
        self._same(op, operands)
        return self._emit(str(attrs(op)["comparison_direction"]).lower(), *operands, to=torch.bool)

    def cast(self, op: Operation, operands: list[int]) -> int:
        return self._emit("cast", operands[0], to=dtype(op.results[0]))

    def select(self, op: Operation, operands: list[int]) -> int:
        self._same(op, operands[1:])
        return self._emit("select", *operands, to=dtype(op.results[0]))

    def clamp(self, op: Operation, operands: list[int]) -> int:
        self._same(op, operands)
        return self._emit("minimum", self._emit("maximum", operands[0], operands[1]), operands[2])

    def power(self, op: Operation, operands: list[int]) -> int:
        self._same(op, operands)
        exponent = op.operands[1].owner
        if isinstance(exponent, Const) and isinstance(exponent.value, SplatAttr):
            # torch does the same where the exponent is a number.
            match exponent.value.scalar().item():
                case 2:
                    return self._emit("mul", operands[0], operands[0])
                case 0.5 if self._dtypes[operands[0]] in (torch.float32, torch.float64):
                    return self._emit("sqrt", operands[0])
        return self._emit("pow", *operands)

    def relu(self, op: Operation, operands: list[int]) -> int:
        zero = self._literal(0, self._dtypes[operands[0]])
        return self._emit("maximum", operands[0], zero)

    def relu_gradient(self, op: Operation, operands: list[int]) -> int:
        self._same(op, operands)
        gradient, features = operands
        zero = self._literal(0, self._dtypes[gradient])
        is_off = self._emit("le", features, zero, to=torch.bool)
        return self._emit("select", is_off, zero, gradient, to=dtype(op.results[0]))

    def add_product(self, op: Operation, operands: list[int]) -> int:
        self._joined(op, operands)
        total, left, right = operands
        return self._emit("add", total, self._emit("mul", self._scaled(op, left), right))

    def add_quotient(self, op: Operation, operands: list[int]) -> int:
        self._joined(op, operands)
        total, left, right = operands
        return self._emit("add", total, self._emit("div", self._scaled(op, left), right))

    def _scaled(self, op: Operation, operand: int) -> int:
        value = attrs(op).get("value", 1)
        assert isinstance(value, (int, float))
        return operand if value == 1 else self._emit("mul", self._literal(value, self._dtypes[operand]), operand)

    def interpolate(self, op: Operation, operands: list[int]) -> int:
        """Interpolates by torch's own formula, which is exact at both ends."""
        self._joined(op, operands)
        start, end = operands[:2]
        kind = self._dtypes[start]
        if len(operands) == 3:
            weight = operands[2]
        else:
            number = attrs(op)["weight"]
            assert isinstance(number, (int, float))
            weight = self._literal(number, kind)
        distance = self._emit("sub", end, start)
        near = self._emit("add", start, self._emit("mul", weight, distance))
        rest = self._emit("sub", self._literal(1, kind), weight)
        far = self._emit("sub", end, self._emit("mul", distance, rest))
        is_near = self._emit("lt", self._emit("abs", weight), self._literal(0.5, kind), to=torch.bool)
        return self._emit("select", is_near, near, far, to=kind)


_RULES: Mapping[str, Callable[[_Lowering, Operation, list[int]], int]] = {
    "cirh.Compare": _Lowering.compare,
    "cirh.Cast": _Lowering.cast,
    "cirh.Select": _Lowering.select,
    "cirh.Clamp": _Lowering.clamp,
    "cirh.Pow": _Lowering.power,
    "cirh.Relu": _Lowering.relu,
    "cirh.ReluGrad": _Lowering.relu_gradient,
    "aten.addcmul": _Lowering.add_product,
    "aten.addcdiv": _Lowering.add_quotient,
    "aten.lerp.Scalar": _Lowering.interpolate,
    "aten.lerp.Tensor": _Lowering.interpolate,
}
