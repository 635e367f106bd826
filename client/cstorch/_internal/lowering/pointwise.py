"""Rules for operations that work element by element.

CIRH has no broadcasting and no type promotion: the rules emit both, and a Python number becomes a splat.
"""

from typing import Any

import torch
from torch import fx
from xdsl.ir import SSAValue

from cstorch._internal.lowering.context import Lowering, Rule, arguments_of, dtype_of, shape_of

_OTHER = "other"


def unary(name: str) -> Rule:
    """One operand, cast to the result's type."""

    def rule(lowering: Lowering, node: fx.Node) -> SSAValue:
        return lowering.emit(name, [lowering.operand(node.args[0], shape_of(node), dtype_of(node))])

    return rule


def binary(name: str, *, swap: bool = False) -> Rule:
    """Two operands, broadcast and cast to the result's shape and type. `alpha` scales the second."""

    def rule(lowering: Lowering, node: fx.Node) -> SSAValue:
        shape, dtype = shape_of(node), dtype_of(node)
        first, second = _operands(node)
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2:
            second = _scaled(lowering, second, arguments_of(node)["alpha"], shape, dtype)
        operands = [lowering.operand(first, shape, dtype), _value(lowering, second, shape, dtype)]
        return lowering.emit(name, operands[::-1] if swap else operands)

    return rule


def reverse_subtract(lowering: Lowering, node: fx.Node) -> SSAValue:
    """rsub: other - alpha * self."""
    shape, dtype = shape_of(node), dtype_of(node)
    arguments = arguments_of(node)
    subtracted = _scaled(lowering, arguments["self"], arguments["alpha"], shape, dtype)
    return lowering.emit("cirh.Sub", [lowering.operand(arguments[_OTHER], shape, dtype), subtracted])


def _scaled(lowering: Lowering, argument: Any, alpha: Any, shape: tuple[int, ...], dtype: torch.dtype) -> SSAValue:
    value = lowering.operand(argument, shape, dtype)
    return value if alpha == 1 else lowering.emit("cirh.Mul", [value, lowering.operand(alpha, shape, dtype)])


def _value(lowering: Lowering, argument: Any, shape: tuple[int, ...], dtype: torch.dtype) -> SSAValue:
    return argument if isinstance(argument, SSAValue) else lowering.operand(argument, shape, dtype)


def _operands(node: fx.Node) -> tuple[Any, Any]:
    return node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs[_OTHER]


def compare(direction: str) -> Rule:
    """A comparison of operands in the type in which torch compares; the result is boolean."""

    def rule(lowering: Lowering, node: fx.Node) -> SSAValue:
        first, second = _operands(node)
        dtype = torch.result_type(_example(first), _example(second))
        operands = [lowering.operand(argument, shape_of(node), dtype) for argument in (first, second)]
        return lowering.emit("cirh.Compare", operands, {"comparison_direction": direction})

    return rule


def _example(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def logical(name: str) -> Rule:
    """and, or, xor and not: operands are cast to booleans."""

    def rule(lowering: Lowering, node: fx.Node) -> SSAValue:
        return lowering.emit(name, [lowering.operand(item, shape_of(node), torch.bool) for item in node.args])

    return rule


def select(lowering: Lowering, node: fx.Node) -> SSAValue:
    """where, with both branches in the result's type."""
    condition, first, second = node.args
    return _select(lowering, node, condition, first, second)


def masked_fill(lowering: Lowering, node: fx.Node) -> SSAValue:
    tensor, mask, value = node.args
    return _select(lowering, node, mask, value, tensor)


def _select(lowering: Lowering, node: fx.Node, condition: Any, first: Any, second: Any) -> SSAValue:
    shape, dtype = shape_of(node), dtype_of(node)
    operands = [lowering.operand(condition, shape, torch.bool)]
    operands += [lowering.operand(argument, shape, dtype) for argument in (first, second)]
    return lowering.emit("cirh.Select", operands)


def clamp(lowering: Lowering, node: fx.Node) -> SSAValue:
    """clamp: Clamp with both bounds, and the maximum or minimum with one."""
    shape, dtype = shape_of(node), dtype_of(node)
    arguments = arguments_of(node)
    low, high = arguments.get("min"), arguments.get("max")
    value = lowering.operand(arguments["self"], shape, dtype)
    bounds = [None if bound is None else lowering.operand(bound, shape, dtype) for bound in (low, high)]
    if bounds[0] is not None and bounds[1] is not None:
        return lowering.emit("cirh.Clamp", [value, bounds[0], bounds[1]])
    if bounds[0] is not None:
        return lowering.emit("aten.maximum", [value, bounds[0]])
    assert bounds[1] is not None
    return lowering.emit("aten.minimum", [value, bounds[1]])


def relu_backward(lowering: Lowering, node: fx.Node) -> SSAValue:
    """threshold_backward(gradient, features, threshold)."""
    shape, dtype = shape_of(node), dtype_of(node)
    gradient, features, threshold = node.args
    operands = [lowering.operand(gradient, shape, dtype), lowering.operand(features, shape, dtype)]
    if threshold == 0:
        return lowering.emit("cirh.ReluGrad", operands)
    assert isinstance(threshold, (int, float))
    return lowering.emit("aten.threshold_backward", operands, {"threshold": threshold})


def gelu(name: str) -> Rule:
    """gelu and its gradient; `approximate` is "none" or "tanh"."""

    def rule(lowering: Lowering, node: fx.Node) -> SSAValue:
        approximation = str(arguments_of(node)["approximate"]).upper()
        operands = [
            lowering.operand(argument, shape_of(node), dtype_of(node)) for argument in node.args if _is_node(argument)
        ]
        return lowering.emit(name, operands, {"approximation": approximation})

    return rule


def _is_node(argument: Any) -> bool:
    return isinstance(argument, fx.Node)


def is_nan(lowering: Lowering, node: fx.Node) -> SSAValue:
    value = lowering.value(node.args[0])
    return lowering.emit("cirh.Compare", [value, value], {"comparison_direction": "NE"})


def divide(lowering: Lowering, node: fx.Node) -> SSAValue:
    """div with a rounding mode; without one it is Div."""
    mode = arguments_of(node)["rounding_mode"]
    shape, dtype = shape_of(node), dtype_of(node)
    operands = [lowering.operand(argument, shape, dtype) for argument in _operands(node)]
    if mode is None:
        return lowering.emit("cirh.Div", operands)
    return lowering.emit("aten.div.Tensor_mode", operands, {"rounding_mode": str(mode)})
