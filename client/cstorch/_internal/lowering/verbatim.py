"""Rules for operations that CIRH has from ATen unchanged, and for norms and image operations made of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from xdsl.ir import SSAValue

from cstorch._internal.lowering.context import Lowering, Result, Rule, arguments_of, shape_of
from waferbox.cirh.dialect import elements, types
from waferbox.cirh.dialect.attributes import AttrValue
from waferbox.cirh.dialect.spec import Count, Kind, OpSpec
from waferbox.cirh.table.lookup import spec

# Attributes that number dimensions of the first operand, or of a result that has more (select_backward, stack).
_DIMENSIONS = frozenset({"dim", "dim0", "dim1", "dim2", "dims"})


def verbatim(lowering: Lowering, node: fx.Node, row: OpSpec) -> Result:
    """Lowers a node to the operation of the same name.

    Operands are the tensor arguments in schema order; other arguments are attributes with the schema's names.
    """
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
        # Operands of rank 0 are broadcast by the operation; all others must have one shape.
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


@contextmanager
def _replaced(lowering: Lowering, values: Mapping[fx.Node, SSAValue]) -> Iterator[None]:
    """Context in which these nodes have other values, for the rule that lowers one of their readers."""
    given = {node: lowering.values[node] for node in values}
    lowering.values.update(values)
    try:
        yield
    finally:
        lowering.values.update(given)


def with_class_numbers(lowering: Lowering, node: fx.Node) -> Result:
    """Losses over class numbers, which may have any integer type."""
    target = arguments_of(node)["target"]
    given = lowering.value(target)
    numbers = given if types.dtype(given).is_floating_point else lowering.cast(given, torch.int64)
    with _replaced(lowering, {target: numbers}):
        return verbatim(lowering, node, spec(str(node.target).removesuffix(".default")))


def solve(lowering: Lowering, node: fx.Node) -> Result:
    """Systems of equations. Matrices of right sides get as many dimensions as the systems have.

    torch could otherwise take them for vectors where a wafer has as many systems as the matrix has rows.
    """
    matrix, right = node.args[:2]
    assert isinstance(right, fx.Node)
    given, systems, shape = lowering.value(right), shape_of(matrix), shape_of(right)
    if 1 < len(shape) < len(systems) and shape != systems[:-1]:
        given = lowering.reshape(given, (*[1] * (len(systems) - len(shape)), *shape))
    with _replaced(lowering, {right: given}):
        return verbatim(lowering, node, spec("aten._linalg_solve_ex"))


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
    """Returns a Python number as a splat, where the schema has a tensor."""
    first = next(argument for argument in node.args if isinstance(argument, fx.Node))
    return lowering.splat(number, (), torch.result_type(first.meta["val"], number))


# --- Norms of halves --------------------------------------------------------------------------------------------------
#
# Computed in float32 and rounded once, as torch's kernels do internally. torch's kernels for a CPU return statistics in
# half, and sum the gradients of weights in half; the tracer, and every other device, has the statistics in float32.

HALVES = frozenset({torch.float16, torch.bfloat16})


def in_float32(rule: Rule) -> Rule:
    """Returns the rule on float32 copies of half operands; its results get the types of torch's."""

    def with_copies(lowering: Lowering, node: fx.Node) -> Result:
        halves = [argument for argument in node.all_input_nodes if types.dtype(lowering.value(argument)) in HALVES]
        if not halves:
            return rule(lowering, node)
        copies = {argument: lowering.cast(lowering.value(argument), torch.float32) for argument in halves}
        with _replaced(lowering, copies):
            results = rule(lowering, node)
        assert isinstance(results, tuple)
        expected = node.meta["val"]
        return tuple(
            value if tensor is None else lowering.cast(value, tensor.dtype)
            for tensor, value in zip(expected, results, strict=False)
        )

    return with_copies


@in_float32
def norm(lowering: Lowering, node: fx.Node) -> Result:
    """Lowers a norm to ATen's operation of the same name."""
    return verbatim(lowering, node, spec(str(node.target).removesuffix(".default")))


# --- Image operations -------------------------------------------------------------------------------------------------


def batch_norm_inference(lowering: Lowering, node: fx.Node) -> Result:
    """Returns only the normalised input: the statistics are empty on a CPU, though not on meta."""
    results = verbatim(lowering, node, spec("aten._native_batch_norm_legit_no_training"))
    assert isinstance(results, tuple)
    return results[:1]


def pixel_shuffle(lowering: Lowering, node: fx.Node) -> SSAValue:
    """Channels (c, factor, factor) become rows (h, factor) and columns (w, factor)."""
    value, factor = lowering.value(node.args[0]), arguments_of(node)["upscale_factor"]
    *batch, channels, height, width = types.shape(value)
    apart = lowering.reshape(value, [*batch, channels // factor**2, factor, factor, height, width])
    return lowering.reshape(lowering.transpose(apart, _tail(len(batch), 0, 3, 1, 4, 2)), shape_of(node))


def pixel_unshuffle(lowering: Lowering, node: fx.Node) -> SSAValue:
    """The inverse of pixel_shuffle."""
    value, factor = lowering.value(node.args[0]), arguments_of(node)["downscale_factor"]
    *batch, channels, height, width = types.shape(value)
    apart = lowering.reshape(value, [*batch, channels, height // factor, factor, width // factor, factor])
    return lowering.reshape(lowering.transpose(apart, _tail(len(batch), 0, 2, 4, 1, 3)), shape_of(node))


def channel_shuffle(lowering: Lowering, node: fx.Node) -> SSAValue:
    """Channels (groups, c) become (c, groups)."""
    value, groups = lowering.value(node.args[0]), arguments_of(node)["groups"]
    samples, channels, *image = types.shape(value)
    apart = lowering.reshape(value, [samples, groups, channels // groups, *image])
    order = [0, 2, 1, *range(3, 3 + len(image))]
    return lowering.reshape(lowering.transpose(apart, order), shape_of(node))


def _tail(batch: int, *order: int) -> list[int]:
    """Returns a permutation of the dimensions after the first ones."""
    return [*range(batch), *(batch + dim for dim in order)]
