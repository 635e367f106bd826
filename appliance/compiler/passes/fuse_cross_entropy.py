"""Fuses softmax cross entropy with its gradient, which saves one of three tensors of the logits' size.

As traced, the log-probabilities are kept for the backward pass, which makes a mostly empty gradient of them, and from
both the gradient of the logits. SparseSoftmaxCrossEntropyWithLogits makes each row's loss and gradient at once, in
place; the backward pass only scales rows. A step without a backward pass is not changed, as it needs no gradient.
"""

from dataclasses import dataclass

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import MEAN, NONE, TOTAL, Rewriter
from appliance.compiler.passes.matching import are_private, fuse_each, made_by
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import attrs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """The operations of one loss.

    Attributes:
        probabilities: the log softmax.
        forward: the loss.
        ahead: the gradient of the log-probabilities.
        backward: the gradient of the logits.
    """

    probabilities: Operation
    forward: Operation
    ahead: Operation
    backward: Operation


def fuse_cross_entropy(module: ModuleOp) -> bool:
    """Fuses log softmax, a loss of labels without class weights, and both gradients. Returns whether there was any."""
    return fuse_each(module, ("aten._log_softmax_backward_data",), _fuse)


def _match(backward: Operation) -> _Loss | None:
    probabilities = made_by(backward.operands[1], "aten._log_softmax")
    ahead = made_by(backward.operands[0], "aten.nll_loss_backward")
    if probabilities is None or ahead is None or len(ahead.operands) != 4 or not are_private([ahead], backward):
        return None
    users = {use.operation for use in probabilities.results[0].uses} - {ahead, backward}
    forward = users.pop() if len(users) == 1 else None
    if forward is None or forward.name != "aten.nll_loss_forward" or len(forward.operands) != 2:
        return None
    loss = _Loss(probabilities=probabilities, forward=forward, ahead=ahead, backward=backward)
    said, again = attrs(forward), attrs(ahead)
    same = all(said[name] == again[name] for name in ("reduction", "ignore_index"))
    same = same and list(ahead.operands[1:]) == [*forward.operands, forward.results[1]]
    return loss if same and said["reduction"] in (NONE, MEAN, TOTAL) and _has_rows(probabilities) else None


def _has_rows(probabilities: Operation) -> bool:
    """Whether a log softmax goes over the classes of each row, in float32 or float64."""
    attributes = attrs(probabilities)
    shape, dtype = types.info(probabilities.operands[0])
    exact = dtype in (torch.float32, torch.float64) and not attributes["half_to_float"]
    return exact and len(shape) == 2 and attributes["dim"] in (1, -1)


def _fuse(backward: Operation) -> bool:
    loss = _match(backward)
    if loss is None:
        return False
    counts, gradients = _fuse_forward(loss)
    _fuse_backward(loss, counts, gradients)
    return True


def _fuse_forward(loss: _Loss) -> tuple[SSAValue, SSAValue]:
    """Inserts the fused operation in the forward pass. Returns which rows count, and the gradients of rows' losses."""
    rewriter = Rewriter(loss.forward)
    counts, known = counted_labels(rewriter, loss.forward)
    losses, gradients = rewriter.emit(
        "cirh.SparseSoftmaxCrossEntropyWithLogits", [loss.probabilities.operands[0], known], {"axis": 1}
    )
    rewriter.replace(reduced(rewriter, loss.forward, counts, losses))
    return counts, gradients


def counted_labels(rewriter: Rewriter, forward: Operation) -> tuple[SSAValue, SSAValue]:
    """Which rows of an nll_loss_forward are not ignored, and labels that are classes in all rows."""
    labels = forward.operands[1]
    rows, dtype = types.info(labels)
    ignored = rewriter.splat(int(attrs(forward)["ignore_index"]), rows, dtype)  # type: ignore[arg-type]
    (counts,) = rewriter.emit("cirh.Compare", [labels, ignored], {"comparison_direction": "NE"})
    return counts, rewriter.emit("cirh.Select", [counts, labels, rewriter.splat(0, rows, dtype)])[0]


def reduced(rewriter: Rewriter, forward: Operation, counts: SSAValue, losses: SSAValue) -> list[SSAValue]:
    """The results of an nll_loss_forward, from the losses of its rows."""
    rows, dtype = types.info(losses)
    reduction = attrs(forward)["reduction"]
    (kept,) = rewriter.emit("cirh.Select", [counts, losses, rewriter.splat(0.0, rows, dtype)])
    if reduction == NONE:
        return [kept, rewriter.splat(0.0, (), dtype)]  # there is no count without a reduction
    (numbers,) = rewriter.emit("cirh.Cast", [counts], types=[types.tensor_type(rows, dtype)])
    total, count = _sum(rewriter, kept), _sum(rewriter, numbers)
    return [rewriter.emit("cirh.Div", [total, count])[0] if reduction == MEAN else total, count]


def _sum(rewriter: Rewriter, value: SSAValue) -> SSAValue:
    return rewriter.emit("cirh.Reduce", [value], {"dimensions": [0], "keep_dims": [], "reduce_kind": "ADD"})[0]


def row_gradients(rewriter: Rewriter, ahead: Operation, counts: SSAValue) -> SSAValue:
    """The gradient of each row's loss, from the operands of an nll_loss_backward. Ignored rows get zero."""
    scale, count = ahead.operands[0], ahead.operands[3]
    rows, dtype = types.shape(counts), types.dtype(scale)
    if attrs(ahead)["reduction"] == MEAN:
        (scale,) = rewriter.emit("cirh.Div", [scale, count])
    if attrs(ahead)["reduction"] != NONE:
        kind = types.tensor_type(rows, dtype)
        (scale,) = rewriter.emit("cirh.BroadcastInDim", [scale], {"broadcast_dimensions": []}, types=[kind])
    return rewriter.emit("cirh.Select", [counts, scale, rewriter.splat(0.0, rows, dtype)])[0]


def _fuse_backward(loss: _Loss, counts: SSAValue, gradients: SSAValue) -> None:
    """Scales the gradient of each row by that of the loss."""
    rewriter = Rewriter(loss.backward)
    scales = row_gradients(rewriter, loss.ahead, counts)
    kind = types.tensor_type(*types.info(gradients))
    (whole,) = rewriter.emit("cirh.BroadcastInDim", [scales], {"broadcast_dimensions": [0]}, types=[kind])
    rewriter.replace(rewriter.emit("cirh.Mul", [gradients, whole]))
