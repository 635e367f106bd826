"""Fuses softmax cross entropy with the product that makes its logits, so that large logits never exist whole.

cirh.LinearCrossEntropy makes logits some rows at a time, and its gradient makes them again. That is a product more, so
small logits stay. If anything else reads the logits, such as the accuracy of a validation, they stay, too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import NONE, Rewriter
from appliance.compiler.passes.dce import eliminate_dead_code
from appliance.compiler.passes.matching import broadcast_source, fuse_each, made_by, number
from appliance.compiler.passes.matrices import swap_last
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue, attrs
from waferbox.cirh.dialect.operations import body_ops
from waferbox.cirh.table.lookup import SEGMENTS

# With fewer bytes of logits in the batch of a step, the second product costs more than the memory is worth.
LEAST_BYTES: Final = 1 << 30
_MOST_STEPS: Final = 6
_SPARSE: Final = "cirh.SparseSoftmaxCrossEntropyWithLogits"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Logits:
    """Logits: `(rows @ weight^T + bias) * scale`.

    Attributes:
        rows: the left operand of the product.
        weight: the right one, as the product reads it.
        has_classes_first: whether the weight has a row for each class.
        bias: a number for each class, if there is one.
        scale: the product of the factors.
    """

    rows: SSAValue
    weight: SSAValue
    has_classes_first: bool
    bias: SSAValue | None
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    """The backward pass.

    Attributes:
        row_gradients: the gradient of each row's loss.
        first: its first operation.
        results: the operation that makes each gradient, by name.
        has_classes_first: whether the gradient of the weight has a row for each class.
    """

    row_gradients: SSAValue
    first: Operation
    results: dict[str, Operation]
    has_classes_first: bool


def fuse_linear_cross_entropy(module: ModuleOp) -> bool:
    """Fuses products with losses of labels and their gradients. Returns whether there was any."""
    if not any(op.name in (_SPARSE, "aten.nll_loss_forward") for op in body_ops(module)):
        return False
    eliminate_dead_code(module)  # which would count as a reader
    changed = fuse_each(module, (_SPARSE,), _fuse_training)
    return fuse_each(module, ("aten.nll_loss_forward",), _fuse_loss) or changed


def _fuse_training(op: Operation) -> bool:
    """Fuses a loss with its gradient."""
    logits = _logits_of(op.operands[0], op)
    if logits is None or attrs(op)["axis"] not in (1, -1) or not _is_large(op.operands[0]):
        return False
    backward = _backward_of(op.results[1], logits)
    if backward is None:
        return False
    rewriter = Rewriter(op)
    weight = logits.weight if logits.has_classes_first else swap_last(rewriter, logits.weight)
    labels = _as_int64(rewriter, op.operands[1])
    bias = [] if logits.bias is None else [logits.bias]
    loss, _, logsumexp = _emit_loss(rewriter, logits, weight, labels)
    op.results[0].replace_all_uses_with(loss)
    rewriter = Rewriter(backward.first)
    nothing = rewriter.splat(0.0, *types.info(loss))
    is_trained = "weight" in backward.results or "bias" in backward.results
    attributes: dict[str, AttrValue] = {"is_trained": is_trained, SEGMENTS: [1] * 7 + [len(bias)]}
    if logits.scale != 1:
        attributes["scale"] = logits.scale
    made = rewriter.emit(
        "cirh.LinearCrossEntropyGrad",
        [backward.row_gradients, nothing, nothing, logsumexp, logits.rows, weight, labels, *bias],
        attributes,
    )
    for name, gradient in zip(("rows", "weight", "bias"), made, strict=False):
        if name not in backward.results:
            continue
        rewriter = Rewriter(backward.results[name])
        if name == "weight" and not backward.has_classes_first:
            gradient = swap_last(rewriter, gradient)
        rewriter.replace([gradient])
    return True


def _fuse_loss(op: Operation) -> bool:
    """Fuses a loss without a gradient."""
    probabilities = made_by(op.operands[0], "aten._log_softmax")
    if probabilities is None or len(op.operands) != 2 or attrs(op)["reduction"] != NONE:
        return False
    dims = attrs(probabilities)["dim"], len(types.shape(op.operands[0]))
    if dims not in ((1, 2), (-1, 2)) or len(list(probabilities.results[0].uses)) != 1 or op.results[1].uses:
        return False
    logits = _logits_of(probabilities.operands[0], probabilities)
    if logits is None or not _is_large(probabilities.operands[0]):
        return False
    rewriter, labels = Rewriter(op), op.operands[1]
    rows, dtype = types.info(op.results[0])
    ignored = rewriter.splat(int(attrs(op)["ignore_index"]), *types.info(labels))  # type: ignore[arg-type]
    (counts,) = rewriter.emit("cirh.Compare", [labels, ignored], {"comparison_direction": "NE"})
    (known,) = rewriter.emit("cirh.Select", [counts, labels, rewriter.splat(0, *types.info(labels))])
    weight = logits.weight if logits.has_classes_first else swap_last(rewriter, logits.weight)
    loss = _emit_loss(rewriter, logits, weight, _as_int64(rewriter, known))[0]
    (kept,) = rewriter.emit("cirh.Select", [counts, loss, rewriter.splat(0.0, rows, dtype)])
    rewriter.replace([kept, rewriter.splat(0.0, (), dtype)])
    return True


def _emit_loss(rewriter: Rewriter, logits: _Logits, weight: SSAValue, labels: SSAValue) -> tuple[SSAValue, ...]:
    bias = [] if logits.bias is None else [logits.bias]
    attributes: dict[str, AttrValue] = {SEGMENTS: [1, 1, 1, len(bias)]}
    if logits.scale != 1:
        attributes["scale"] = logits.scale
    return rewriter.emit("cirh.LinearCrossEntropy", [logits.rows, weight, labels, *bias], attributes)


def _as_int64(rewriter: Rewriter, labels: SSAValue) -> SSAValue:
    if types.dtype(labels) is torch.int64:
        return labels
    return rewriter.emit("cirh.Cast", [labels], types=[types.tensor_type(types.shape(labels), torch.int64)])[0]


def _is_large(logits: SSAValue) -> bool:
    return types.nbytes(logits) >= LEAST_BYTES


# --- The pattern ------------------------------------------------------------------------------------------------------


def _logits_of(value: SSAValue, reader: Operation) -> _Logits | None:
    """The product that makes logits, which only `reader` reads, behind views, casts from halves, and factors."""
    scale = 1.0
    for _ in range(_MOST_STEPS):
        op = value.owner
        if not isinstance(op, Operation) or any(use.operation is not reader for use in value.uses):
            return None
        product = _product(op, scale)
        if product is not None:
            return product
        step = _step(op)
        if step is None:
            return None
        value, factor = step
        scale, reader = scale * factor, op
    return None


def _step(op: Operation) -> tuple[SSAValue, float] | None:
    """The operand of a view, of a cast, or of a product with a number, and the number."""
    if op.name in ("cirh.Mul", "cirh.Div"):
        factor = number(op.operands[1])
        if factor is None or not math.isfinite(factor) or factor == 0:
            return None
        return op.operands[0], factor if op.name == "cirh.Mul" else 1 / factor
    before, after = types.info(op.operands[0]), types.info(op.results[0])
    if op.name == "cirh.Reshape" and before.shape[-1:] == after.shape[-1:]:
        return op.operands[0], 1.0
    is_wider = before.dtype.is_floating_point and after.dtype.is_floating_point
    return (op.operands[0], 1.0) if op.name == "cirh.Cast" and is_wider else None


def _product(op: Operation, scale: float) -> _Logits | None:
    """The logits that a product of two matrices makes."""
    if op.name == "cirh.MatMul" and not attrs(op).get("transpose_a"):
        rows, weight = op.operands
        first = bool(attrs(op).get("transpose_b"))
        return _Logits(rows=rows, weight=weight, has_classes_first=first, bias=None, scale=scale)
    if op.name == "aten.addmm" and attrs(op).get("alpha", 1) == attrs(op).get("beta", 1) == 1:
        bias, rows, weight = op.operands
        view = made_by(weight, "cirh.Transpose")
        if types.shape(bias) != types.shape(op.results[0])[1:] or len(types.shape(weight)) != 2:
            return None
        source = view.operands[0] if view is not None else weight
        return _Logits(rows=rows, weight=source, has_classes_first=view is not None, bias=bias, scale=scale)
    return None


def _backward_of(backprop: SSAValue, logits: _Logits) -> _Backward | None:
    """The backward pass of logits, if it alone reads the gradient of each row's loss."""
    uses = list(backprop.uses)
    scaled = uses[0].operation if len(uses) == 1 and uses[0].operation.name == "cirh.Mul" else None
    if scaled is None:
        return None
    row_gradients = broadcast_source(scaled.operands[1 - uses[0].index], [0])
    if row_gradients is None:
        return None
    value, scale = scaled.results[0], 1.0
    for _ in range(_MOST_STEPS):
        found = list(_gradients(value, logits))
        if all(name is not None for name, _, _ in found):
            break
        step = _step(found[0][1]) if len(found) == 1 else None
        if step is None or step[0] is not value:
            return None
        scale *= step[1]
        value = found[0][1].results[0]
    else:
        return None
    results = {name: op for name, op, _ in found if name is not None}
    block = scaled.parent_block()
    if not found or len(results) < len(found) or not math.isclose(scale, logits.scale, rel_tol=1e-6) or block is None:
        return None
    made = set(results.values())
    return _Backward(
        row_gradients=row_gradients,
        first=next(op for op in block.ops if op in made),
        results=results,
        has_classes_first=next((first for name, _, first in found if name == "weight"), True),
    )


def _gradients(value: SSAValue, logits: _Logits) -> Iterator[tuple[str | None, Operation, bool]]:
    """Yields each reader of the logits' gradient, with the gradient that it makes; None if it makes no other.

    The last is whether the gradient of a weight has a row for each class.
    """
    for use in value.uses:
        op, name, first = use.operation, None, True
        if op.name == "cirh.MatMul":
            other = op.operands[1 - use.index]
            flags = bool(attrs(op).get("transpose_a")), bool(attrs(op).get("transpose_b"))
            if use.index == 0 and flags == (False, not logits.has_classes_first) and other is logits.weight:
                name = "rows"
            elif use.index == 0 and flags == (True, False) and other is logits.rows:
                name = "weight"
            elif use.index == 1 and flags == (True, False) and other is logits.rows:
                name, first = "weight", False
        elif op.name == "cirh.Reduce" and attrs(op)["reduce_kind"] == "ADD" and attrs(op)["dimensions"] == [0]:
            is_bias = logits.bias is not None and types.info(op.results[0]) == types.info(logits.bias)
            name = "bias" if is_bias else None
        yield name, op, first
