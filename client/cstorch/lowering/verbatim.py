"""The rule for all operations that CIRH takes over from ATen as they are.

Operands are the tensor arguments in schema order; the other arguments are attributes under the schema's names.
"""

from typing import Any

import torch
from torch import fx

from cirh.dialect import elements, types
from cirh.dialect.attributes import AttrValue
from cirh.dialect.spec import Count, Kind, OpSpec
from cirh.table.lookup import spec
from cstorch.lowering.context import Lowering, Result, arguments_of, shape_of

# Attributes that number dimensions of the first operand, or of a result that has more (select_backward, stack).
_DIMENSIONS = frozenset({"dim", "dim0", "dim1", "dim2", "dims"})


def verbatim(lowering: Lowering, node: fx.Node, row: OpSpec) -> Result:
    """Lower a node to the operation of that row, which has the node's own name."""
    arguments = arguments_of(node)
    operands = []
    segments = []
    for operand in row.operands:
        argument = arguments[operand.name]
        listed = argument if operand.count is Count.LIST else [] if argument is None else [argument]
        if any(item is None for item in listed):
            raise lowering.unsupported(f"`{row.name}` with a list that leaves tensors out", "Give all of them.")
        segments.append(len(listed))
        operands += [
            lowering.value(item) if isinstance(item, fx.Node) else _number(lowering, node, item) for item in listed
        ]
    if row.pointwise:
        # Operands of rank 0 stand for whole ones; all others must have one shape.
        operands = [
            operand if not types.shape(operand) else lowering.broadcast(operand, shape_of(node)) for operand in operands
        ]
    result_rank = len(shape_of(node)) if isinstance(node.meta["val"], torch.Tensor) else 0
    rank = max(len(types.shape(operands[0])) if operands else 0, result_rank)
    attributes: dict[str, AttrValue] = {}
    for attribute in row.attributes:
        argument = arguments[attribute.name]
        if argument is not None:
            attributes[attribute.name] = _attribute(attribute.name, attribute.kind, argument, rank)
    if any(count != 1 for count in segments):
        attributes["operand_segments"] = segments
    results = lowering.builder.op(row.name, operands, attributes, lowering.source)
    return results if isinstance(node.meta["val"], (tuple, list)) else results[0]


def with_class_numbers(lowering: Lowering, node: fx.Node) -> Result:
    """Losses over class numbers, which may be integers of any type."""
    target = arguments_of(node)["target"]
    given = lowering.value(target)
    if not types.dtype(given).is_floating_point:
        lowering.values[target] = lowering.cast(given, torch.int64)
    try:
        return verbatim(lowering, node, spec(str(node.target).removesuffix(".default")))
    finally:
        lowering.values[target] = given


def _attribute(name: str, kind: Kind, argument: Any, rank: int) -> AttrValue:
    if kind is Kind.DTYPE:
        return elements.element_name(argument)
    if kind is Kind.INTS:
        listed = list(argument) if isinstance(argument, (list, tuple)) else [argument]
        return [item % rank for item in listed] if name in _DIMENSIONS and rank else listed
    if kind is Kind.INT and name in _DIMENSIONS and rank:
        return int(argument) % rank
    if kind is Kind.BOOLS:
        return list(argument)
    if kind is Kind.FLOAT:
        return float(argument)
    value: AttrValue = argument
    return value


def _number(lowering: Lowering, node: fx.Node, number: Any) -> Any:
    """A Python number where the schema has a tensor."""
    first = next(argument for argument in node.args if isinstance(argument, fx.Node))
    return lowering.splat(number, (), torch.result_type(first.meta["val"], number))
