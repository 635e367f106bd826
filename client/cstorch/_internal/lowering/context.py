"""The state of one lowering, and the operations that many rules share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload
from xdsl.ir import SSAValue

from cstorch.errors import CompileError
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue, ConstantAttr, SplatAttr
from waferbox.cirh.dialect.operations import Const
from waferbox.cirh.dialect.source import Source
from waferbox.cirh.modules.builder import GraphBuilder

Number: TypeAlias = bool | int | float
Result: TypeAlias = SSAValue | tuple[SSAValue, ...]


class Lowering:
    """The state of one lowering: the module under construction, and the values of lowered nodes.

    source: The source of the present node, which all operations emitted for it get.
    counter: The counter of the step's random numbers, if the step draws any.
    """

    def __init__(self) -> None:
        self.builder = GraphBuilder()
        self.source = Source()
        self.values: dict[fx.Node, Result] = {}
        self.counter: SSAValue | None = None
        self.taken_apart: list[OpOverload] = []  # operations whose parts are being lowered, outermost first

    # --- Operands -----------------------------------------------------------------------------------------------------

    def value(self, argument: Any) -> SSAValue:
        """Returns the value of a node that has one result."""
        value = self.values[argument]
        assert isinstance(value, SSAValue), f"{argument} has several results"
        return value

    def operand(self, argument: Any, shape: Sequence[int], dtype: torch.dtype) -> SSAValue:
        """Returns a node or a number as an operand of this shape and type: cast, broadcast, or a splat."""
        if isinstance(argument, fx.Node):
            return self.broadcast(self.cast(self.value(argument), dtype), shape)
        return self.builder.splat(_as_number(argument, dtype), shape, dtype, self.source)

    # --- Operations ---------------------------------------------------------------------------------------------------

    def emit(
        self,
        name: str,
        operands: Sequence[SSAValue],
        attributes: Mapping[str, AttrValue] | None = None,
        result: tuple[Sequence[int], torch.dtype] | None = None,
    ) -> SSAValue:
        """Emits an operation with one result; `result` is its shape and type if the operation does not imply them."""
        given = [types.tensor_type(*result)] if result is not None else None
        return self.builder.op(name, operands, attributes, self.source, types=given)[0]

    def cast(self, value: SSAValue, dtype: torch.dtype) -> SSAValue:
        shape, current = types.info(value)
        if current is dtype:
            return value
        return self._change("cirh.Cast", value, {"Truncate": False}, shape, dtype)

    def broadcast(self, value: SSAValue, shape: Sequence[int]) -> SSAValue:
        """Returns the value broadcast to a shape, with dimensions aligned at the right, as in torch."""
        current, dtype = types.info(value)
        if current == tuple(shape):
            return value
        dimensions = list(range(len(shape) - len(current), len(shape)))
        return self._change("cirh.BroadcastInDim", value, {"broadcast_dimensions": dimensions}, shape, dtype)

    def reshape(self, value: SSAValue, shape: Sequence[int]) -> SSAValue:
        current, dtype = types.info(value)
        if current == tuple(shape):
            return value
        return self._change("cirh.Reshape", value, None, shape, dtype)

    def _change(
        self,
        name: str,
        value: SSAValue,
        attributes: Mapping[str, AttrValue] | None,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> SSAValue:
        """Returns the value in another type; a splat stays a splat."""
        constant = splat_of(value)
        if constant is not None:
            return self.splat(constant.to(dtype), shape, dtype)
        return self.emit(name, [value], attributes, (shape, dtype))

    def transpose(self, value: SSAValue, permutation: Sequence[int]) -> SSAValue:
        if list(permutation) == list(range(len(permutation))):
            return value
        constant = self.builder.dense(torch.tensor(permutation, dtype=torch.int64, device="cpu"), self.source)
        return self.emit("cirh.Transpose", [value, constant])

    def splat(self, value: Number | torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> SSAValue:
        """Returns a constant of one value, which is stored as one element."""
        number = value.item() if isinstance(value, torch.Tensor) else value
        return self.builder.splat(_as_number(number, dtype), shape, dtype, self.source)

    def unsupported(self, operation: str, way_out: str) -> CompileError:
        """Returns the error for an operation that cannot be lowered, with the user's line."""
        return CompileError(f"{self.source}: the Cerebras backend does not support {operation}. {way_out}")


Rule: TypeAlias = Callable[[Lowering, fx.Node], Result]


def splat_of(value: SSAValue) -> torch.Tensor | None:
    """Returns the element of a splat constant, as a tensor of rank 0; None for any other value."""
    if not isinstance(value.owner, Const):
        return None
    constant: ConstantAttr = value.owner.value
    return constant.scalar() if isinstance(constant, SplatAttr) else None


def shape_of(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def dtype_of(node: Any) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def axes_of(dims: Any, rank: int) -> list[int]:
    """Returns dimension numbers counted from the front, in order; None and an empty list mean all dimensions."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(rank))
    listed = dims if isinstance(dims, (list, tuple)) else [dims]
    return sorted(dim % rank if rank else 0 for dim in listed) if rank else []


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Returns all arguments of a node by the names of its schema, with defaults."""
    arguments = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if position < len(node.args):
            arguments[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            arguments[argument.name] = node.kwargs[argument.name]
        else:
            arguments[argument.name] = argument.default_value if argument.has_default_value() else None
    return arguments


def _as_number(value: Any, dtype: torch.dtype) -> Number:
    if dtype is torch.bool:
        return bool(value)
    return float(value) if dtype.is_floating_point else int(value)
