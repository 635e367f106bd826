"""Rules for attention: the whole operation, and the softmax of attention that torch decomposed."""

import math

from torch import fx
from xdsl.ir import SSAValue

from cstorch._internal.lowering.context import Lowering, Result, arguments_of, dtype_of
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue


def attention(lowering: Lowering, node: fx.Node) -> Result:
    """query, key, value and mask -> output and logsumexp."""
    return _attention(lowering, node, "cirh.Attention", ["query", "key", "value"])


def attention_backward(lowering: Lowering, node: fx.Node) -> Result:
    names = ["grad_out", "query", "key", "value", "out", "logsumexp"]
    return _attention(lowering, node, "cirh.AttentionGrad", names)


def _attention(lowering: Lowering, node: fx.Node, name: str, operands: list[str]) -> Result:
    arguments = arguments_of(node)
    assert arguments["dropout_p"] == 0, "attention with dropout is traced in parts"
    values = [lowering.value(arguments[operand]) for operand in operands]
    attributes: dict[str, AttrValue] = {"is_causal": bool(arguments["is_causal"])}
    if arguments["scale"] is not None:
        attributes["scale"] = float(arguments["scale"])
    if arguments["attn_mask"] is not None:
        values.append(lowering.value(arguments["attn_mask"]))
    attributes["operand_segments"] = [*[1] * len(operands), len(values) - len(operands), 0]
    return lowering.builder.op(name, values, attributes, lowering.source)


def safe_softmax(lowering: Lowering, node: fx.Node) -> SSAValue:
    """softmax, with zeros for rows whose scores are all -inf (a query whose keys are all masked)."""
    value = lowering.cast(lowering.value(node.args[0]), dtype_of(node))
    shape, dtype = types.info(value)
    axis = int(arguments_of(node)["dim"]) % len(shape)
    largest = lowering.emit("cirh.Reduce", [value], {"dimensions": [axis], "keep_dims": [axis], "reduce_kind": "MAX"})
    nothing = lowering.splat(-math.inf, types.shape(largest), dtype)
    hidden = lowering.emit("cirh.Compare", [largest, nothing], {"comparison_direction": "EQ"})
    operands = [
        lowering.broadcast(hidden, shape),
        lowering.splat(0, shape, dtype),
        lowering.emit("cirh.Softmax", [value], {"axis": axis}),
    ]
    return lowering.emit("cirh.Select", operands)
