"""Rules for reductions: cirh.Reduce for those without a factor, the ATen operation for the others (mean, norms)."""

import math

import torch
from torch import fx
from xdsl.ir import SSAValue

from cstorch._internal.lowering.context import Lowering, Rule, arguments_of, axes_of, dtype_of, shape_of
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue


def reduce(kind: str) -> Rule:
    """sum, amax, amin, and max and min of all elements."""

    def rule(lowering: Lowering, node: fx.Node) -> SSAValue:
        arguments = arguments_of(node)
        value = lowering.cast(lowering.value(node.args[0]), dtype_of(node))
        axes = axes_of(arguments.get("dim"), len(types.shape(value)))
        if not axes:
            return value
        keep = axes if arguments.get("keepdim") else []
        attributes: dict[str, AttrValue] = {"dimensions": axes, "keep_dims": keep, "reduce_kind": kind}
        return lowering.emit("cirh.Reduce", [value], attributes)

    return rule


def position(kind: str) -> Rule:
    """argmax and argmin: along one dimension, or in the flattened tensor."""

    def rule(lowering: Lowering, node: fx.Node) -> SSAValue:
        arguments = arguments_of(node)
        value = lowering.value(node.args[0])
        shape = types.shape(value)
        dim = arguments["dim"]
        if dim is None or not shape:
            value = lowering.reshape(value, [math.prod(shape)])
        axes = [0] if dim is None or not shape else [dim % len(shape)]
        keep = axes if arguments["keepdim"] and dim is not None and shape else []
        attributes: dict[str, AttrValue] = {"dimensions": axes, "keep_dims": keep, "reduce_kind": kind}
        reduced = lowering.emit("cirh.Reduce", [value], attributes)
        assert types.dtype(reduced) is torch.int64
        return lowering.reshape(reduced, shape_of(node))

    return rule


def vector_norm(lowering: Lowering, node: fx.Node) -> SSAValue:
    """x.norm(p, dim): the norm of vectors of that order."""
    arguments = arguments_of(node)
    value = lowering.cast(lowering.value(node.args[0]), dtype_of(node))
    order = 2.0 if arguments["p"] is None else float(arguments["p"])
    attributes: dict[str, AttrValue] = {"ord": order, "keepdim": bool(arguments.get("keepdim"))}
    if arguments.get("dim"):
        attributes["dim"] = axes_of(arguments["dim"], len(types.shape(value)))
    return lowering.emit("aten.linalg_vector_norm", [value], attributes)


def softmax(lowering: Lowering, node: fx.Node) -> SSAValue:
    """_softmax(x, dim, half_to_float): half to float is a cast before it."""
    value = lowering.cast(lowering.value(node.args[0]), dtype_of(node))
    return lowering.emit("cirh.Softmax", [value], {"axis": int(node.args[1]) % len(shape_of(node))})  # type: ignore[arg-type]


def matmul(lowering: Lowering, node: fx.Node) -> SSAValue:
    operands = [lowering.value(node.args[0]), lowering.value(node.args[1])]
    return lowering.emit("cirh.MatMul", operands, {"transpose_a": False, "transpose_b": False})


def mask_from_topk(lowering: Lowering, node: fx.Node) -> SSAValue:
    """The mask of the highest elements along a dimension; a tensor has their number."""
    input, k, dimension = node.args
    assert isinstance(dimension, int)
    return lowering.emit("cirh.MaskFromTopK", [lowering.value(input), lowering.value(k)], {"dimension": dimension})
