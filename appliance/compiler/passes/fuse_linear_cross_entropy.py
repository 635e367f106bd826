"""Fuses softmax cross entropy with the product that makes its logits, so that large logits never exist whole.

cirh.LinearCrossEntropy makes logits some rows at a time, and its gradient makes them again. That is a product more, so
small logits stay. If anything else reads the logits, such as the accuracy of a validation, they stay, too.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.passes.dce import eliminate_dead_code
from appliance.compiler.passes.fuse_cross_entropy import counted_labels, reduced, row_gradients
from appliance.compiler.passes.matching import broadcast_dims, commuted, fuse_each, made_by, number
from appliance.compiler.passes.matrices import swap_last
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue, attrs
from waferbox.cirh.dialect.operations import body_ops
from waferbox.cirh.table.lookup import SEGMENTS

# With fewer bytes of logits in the batch of a step, the second product costs more than the memory is worth.
LEAST_BYTES: Final = 1 << 30
_MOST_STEPS: Final = 10
_SPARSE: Final = "cirh.SparseSoftmaxCrossEntropyWithLogits"
_FORWARD: Final = "aten.nll_loss_forward"
_BACKWARD: Final = frozenset({"aten._log_softmax_backward_data", "aten.nll_loss_backward"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Logits:
    """Logits: `(rows @ weight^T + bias) * scale`, or `cap * tanh` of that (soft capping).

    Attributes:
        rows: the left operand of the product.
        weight: the right one, as the product reads it.
        has_classes_first: whether the weight has a row for each class.
        bias: a number for each class, if there is one.
        scale: the product of the factors before the tanh.
        capping: the tanh, if there is one.
        cap: the product of the factors behind the tanh.
    """

    rows: SSAValue
    weight: SSAValue
    has_classes_first: bool
    bias: SSAValue | None
    scale: float = 1.0
    capping: Operation | None = None
    cap: float = 1.0

    def attributes(self) -> dict[str, AttrValue]:
        """The factors as attributes of an operation."""
        made: dict[str, AttrValue] = {} if self.scale == 1 else {"scale": self.scale}
        return made if self.capping is None else made | {"cap": self.cap}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """What is made from logits.

    Attributes:
        root: cross entropy with its gradient, or the nll_loss_forward behind a log softmax.
        probabilities: the log softmax, if there is one.
        sums: sums of the log-probabilities of each row, as label smoothing reads them.
        logsumexps: operations that make the logsumexp of each row.
    """

    root: Operation
    probabilities: Operation | None
    sums: list[Operation]
    logsumexps: list[Operation]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    """The backward pass.

    Attributes:
        losses: the gradient of each row's loss; or the nll_loss_backward that would spread it.
        sums, logsumexps: gradients of the sums and of the logsumexp, of one dimension or of two.
        first: its first operation.
        results: the operation that makes each gradient, by name.
        has_classes_first: whether the gradient of the weight has a row for each class.
    """

    losses: SSAValue | Operation
    sums: list[SSAValue]
    logsumexps: list[SSAValue]
    first: Operation
    results: dict[str, Operation]
    has_classes_first: bool


def fuse_linear_cross_entropy(module: ModuleOp) -> bool:
    """Fuses products with losses of labels and their gradients. Returns whether anything has changed."""
    if not any(op.name in (_SPARSE, _FORWARD) for op in body_ops(module)):
        return False
    changed = eliminate_dead_code(module)  # which would count as a reader
    changed |= fuse_each(module, (_SPARSE, _FORWARD), _fuse_training)
    changed |= fuse_each(module, (_FORWARD,), _fuse_loss)
    return changed


def _fuse_training(op: Operation) -> bool:
    """Fuses a loss with its gradient."""
    found = _loss_of(op)
    if found is None:
        return False
    loss, value = found
    readers = {loss.probabilities or loss.root, *loss.logsumexps, *_differences(value)}
    logits = _logits_of(value, readers) if _is_large(value) else None
    backward = _backward_of(loss, value, logits) if logits is not None else None
    if logits is None or backward is None or not _is_first(loss):
        return False
    rewriter = Rewriter(op)
    counts, labels = (None, op.operands[1]) if op.name == _SPARSE else counted_labels(rewriter, op)
    weight = logits.weight if logits.has_classes_first else swap_last(rewriter, logits.weight)
    labels = _as_int64(rewriter, labels)
    losses, spread, logsumexp = _emit_loss(rewriter, logits, weight, labels)
    for other in loss.logsumexps:
        Rewriter(other).replace([_as(rewriter, logsumexp, other)])
    (negated,) = rewriter.emit("cirh.Neg", [spread])
    for other in loss.sums:
        Rewriter(other).replace([_as(rewriter, negated, other)])
    rewriter_of_gradients = Rewriter(backward.first)
    if counts is None:
        op.results[0].replace_all_uses_with(losses)
    else:
        rewriter.replace(reduced(rewriter, op, counts, losses))
    _emit_gradients(rewriter_of_gradients, backward, logits, [logsumexp, logits.rows, weight, labels], counts)
    return True


def _emit_gradients(
    rewriter: Rewriter, backward: _Backward, logits: _Logits, saved: list[SSAValue], counts: SSAValue | None
) -> None:
    """Replaces the gradients. saved: the logsumexp, and the operands of the forward pass without the bias."""
    rows, dtype = types.info(saved[0])
    losses = backward.losses
    if isinstance(losses, Operation):
        assert counts is not None
        losses = row_gradients(rewriter, losses, counts)
    spread = _sum_of_rows(rewriter, backward.sums, rows, dtype)
    if backward.sums:
        (spread,) = rewriter.emit("cirh.Neg", [spread])
    logsumexp = _sum_of_rows(rewriter, backward.logsumexps, rows, dtype)
    bias = [] if logits.bias is None else [logits.bias]
    is_trained = "weight" in backward.results or "bias" in backward.results
    attributes = logits.attributes() | {"is_trained": is_trained, SEGMENTS: [1] * 7 + [len(bias)]}
    made = rewriter.emit("cirh.LinearCrossEntropyGrad", [losses, spread, logsumexp, *saved, *bias], attributes)
    for name, gradient in zip(("rows", "weight", "bias"), made, strict=False):
        if name in backward.results:
            last = Rewriter(backward.results[name])
            is_swapped = name == "weight" and not backward.has_classes_first
            last.replace([swap_last(last, gradient) if is_swapped else gradient])


def _sum_of_rows(rewriter: Rewriter, values: list[SSAValue], rows: tuple[int, ...], dtype: torch.dtype) -> SSAValue:
    """The sum of values of one number for each row; zeros if there are none."""
    total = None
    for value in values:
        row = value
        if types.shape(value) != rows:
            (row,) = rewriter.emit("cirh.Reshape", [value], types=[types.tensor_type(rows, dtype)])
        total = row if total is None else rewriter.emit("cirh.Add", [total, row])[0]
    return rewriter.splat(0.0, rows, dtype) if total is None else total


def _fuse_loss(op: Operation) -> bool:
    """Fuses a loss without a gradient."""
    probabilities = made_by(op.operands[0], "aten._log_softmax")
    if probabilities is None or len(op.operands) != 2:
        return False
    dims = attrs(probabilities)["dim"], len(types.shape(op.operands[0]))
    if dims not in ((1, 2), (-1, 2)) or len(list(probabilities.results[0].uses)) != 1:
        return False
    logits = _logits_of(probabilities.operands[0], {probabilities})
    if logits is None or not _is_large(probabilities.operands[0]):
        return False
    rewriter = Rewriter(op)
    counts, known = counted_labels(rewriter, op)
    weight = logits.weight if logits.has_classes_first else swap_last(rewriter, logits.weight)
    losses = _emit_loss(rewriter, logits, weight, _as_int64(rewriter, known))[0]
    rewriter.replace(reduced(rewriter, op, counts, losses))
    return True


def _emit_loss(rewriter: Rewriter, logits: _Logits, weight: SSAValue, labels: SSAValue) -> tuple[SSAValue, ...]:
    bias = [] if logits.bias is None else [logits.bias]
    attributes = logits.attributes() | {SEGMENTS: [1, 1, 1, len(bias)]}
    return rewriter.emit("cirh.LinearCrossEntropy", [logits.rows, weight, labels, *bias], attributes)


def _as_int64(rewriter: Rewriter, labels: SSAValue) -> SSAValue:
    if types.dtype(labels) is torch.int64:
        return labels
    return rewriter.emit("cirh.Cast", [labels], types=[types.tensor_type(types.shape(labels), torch.int64)])[0]


def _is_large(logits: SSAValue) -> bool:
    return types.nbytes(logits) >= LEAST_BYTES


def _as(rewriter: Rewriter, value: SSAValue, op: Operation) -> SSAValue:
    """A number for each row in the shape of an operation's result."""
    kind = types.tensor_type(*types.info(op.results[0]))
    return value if value.type == kind else rewriter.emit("cirh.Reshape", [value], types=[kind])[0]


# --- The pattern ------------------------------------------------------------------------------------------------------


def _loss_of(root: Operation) -> tuple[_Loss, SSAValue] | None:
    """The loss that ends with an operation, and its logits; None for a loss of another kind."""
    sums: list[Operation] = []
    if root.name == _SPARSE:
        value, probabilities = root.operands[0], None
        if attrs(root)["axis"] not in (1, -1):
            return None
    else:
        probabilities = made_by(root.operands[0], "aten._log_softmax")
        if probabilities is None or len(root.operands) != 2 or attrs(probabilities)["half_to_float"]:
            return None
        value = probabilities.operands[0]
        if attrs(probabilities)["dim"] not in (1, -1):
            return None
        for use in probabilities.results[0].uses:
            if _sums_rows(use.operation):
                sums.append(use.operation)
            elif use.operation is not root and use.operation.name not in _BACKWARD:
                return None
    if len(types.shape(value)) != 2:
        return None
    logsumexps = [use.operation for use in value.uses if _is_logsumexp(use.operation)]
    return _Loss(root=root, probabilities=probabilities, sums=sums, logsumexps=logsumexps), value


def _sums_rows(op: Operation) -> bool:
    return op.name == "cirh.Reduce" and attrs(op)["reduce_kind"] == "ADD" and attrs(op)["dimensions"] == [1]


def _is_logsumexp(op: Operation) -> bool:
    return op.name == "aten.logsumexp" and attrs(op)["dim"] in ([1], [-1])


def _differences(value: SSAValue) -> set[Operation]:
    """Logits minus the logsumexp of their rows, as the gradient of the logsumexp reads them."""
    found = set()
    for use in value.uses:
        op = use.operation
        if op.name == "cirh.Sub" and use.index == 0:
            source = _row_source(op.operands[1])
            view = made_by(source, "cirh.Reshape") if source is not None else None
            source = view.operands[0] if view is not None else source
            made = made_by(source, "aten.logsumexp") if source is not None else None
            if made is not None and made.operands[0] is value and _is_logsumexp(made):
                found.add(op)
    return found


def _row_source(value: SSAValue) -> SSAValue | None:
    """The source of a broadcast of one number for each row; None for other values."""
    op = made_by(value, "cirh.BroadcastInDim")
    if op is None:
        return None
    source, dims = op.operands[0], broadcast_dims(op)
    shape, rows = types.shape(source), types.shape(value)[0]
    return source if (shape, dims) in (((rows,), [0]), ((rows, 1), [0, 1])) else None


def _is_first(loss: _Loss) -> bool:
    """Whether all that reads sums and logsumexps comes behind the loss, so that they can be made there."""
    later, op = set(), loss.root.next_op
    while op is not None:
        later.add(op)
        op = op.next_op
    others = [*loss.sums, *loss.logsumexps]
    return all(use.operation in later for other in others for result in other.results for use in result.uses)


def _logits_of(value: SSAValue, readers: Collection[Operation]) -> _Logits | None:
    """The product that makes logits, which only `readers` read, behind views, casts from halves, factors and a tanh."""
    scale, cap, capping = 1.0, 1.0, None
    for _ in range(_MOST_STEPS):
        op = value.owner
        if not isinstance(op, Operation) or any(use.operation not in readers for use in value.uses):
            return None
        product = _product(op)
        if product is not None:
            return replace(product, scale=scale, capping=capping, cap=cap)
        if op.name == "cirh.Tanh" and capping is None:
            value, scale, cap, capping = op.operands[0], 1.0, scale, op
        else:
            step = _step(op)
            if step is None:
                return None
            value, factor = step
            scale *= factor
        readers = {op}
        made = value.owner
        if isinstance(made, Operation) and made.name == "cirh.Tanh":
            readers.update(use.operation for use in value.uses if _differentiates(use.operation, made))
    return None


def _differentiates(op: Operation, tanh: Operation) -> bool:
    """Whether an operation is the gradient of a tanh."""
    return op.name == "aten.tanh_backward" and op.operands[1] is tanh.results[0]


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


def _product(op: Operation) -> _Logits | None:
    """The logits that a product of two matrices makes."""
    if op.name == "cirh.MatMul" and not attrs(op).get("transpose_a"):
        rows, weight = op.operands
        first = bool(attrs(op).get("transpose_b"))
        return _Logits(rows=rows, weight=weight, has_classes_first=first, bias=None)
    if op.name == "aten.addmm" and attrs(op).get("alpha", 1) == attrs(op).get("beta", 1) == 1:
        bias, rows, weight = op.operands
        view = made_by(weight, "cirh.Transpose")
        if types.shape(bias) != types.shape(op.results[0])[1:] or len(types.shape(weight)) != 2:
            return None
        source = view.operands[0] if view is not None else weight
        return _Logits(rows=rows, weight=source, has_classes_first=view is not None, bias=bias)
    return None


def _backward_of(loss: _Loss, value: SSAValue, logits: _Logits) -> _Backward | None:
    """The backward pass of logits, if it alone reads what the loss made for it."""
    if loss.probabilities is None:
        uses = list(loss.root.results[1].uses)
    else:
        uses = [
            use for use in loss.probabilities.results[0].uses if use.operation.name == "aten._log_softmax_backward_data"
        ]
    if len(uses) != 1:
        return None
    total = uses[0].operation.results[0]
    while (op := _only_reader(total)) is not None and op.name == "cirh.Add":
        total = op.results[0]
    terms = _Terms(loss, value)
    if not terms.add(total) or terms.losses is None or terms.differences != _differences(value):
        return None
    scale, cap, is_capped = 1.0, 1.0, False
    for _ in range(_MOST_STEPS):
        found = list(_gradients(total, logits))
        if all(name is not None for name, _, _ in found):
            break
        op = found[0][1]
        if len(found) > 1 or op.operands[0] is not total:
            return None
        if logits.capping is not None and not is_capped and _differentiates(op, logits.capping):
            scale, cap, is_capped = 1.0, scale, True
        else:
            step = _step(op)
            if step is None:
                return None
            scale *= step[1]
        total = op.results[0]
    else:
        return None
    results = {name: op for name, op, _ in found if name is not None}
    block = loss.root.parent_block()
    pairs = ((scale, logits.scale), (cap, logits.cap))
    is_same = is_capped == (logits.capping is not None) and all(math.isclose(*pair, rel_tol=1e-6) for pair in pairs)
    if not found or len(results) < len(found) or not is_same or block is None:
        return None
    made = set(results.values())
    return _Backward(
        losses=terms.losses,
        sums=terms.sums,
        logsumexps=terms.logsumexps,
        first=next(op for op in block.ops if op in made),
        results=results,
        has_classes_first=next((first for name, _, first in found if name == "weight"), True),
    )


def _only_reader(value: SSAValue) -> Operation | None:
    uses = list(value.uses)
    return uses[0].operation if len(uses) == 1 else None


class _Terms:
    """The terms of the logits' gradient: what is multiplied by the gradients of losses, sums and logsumexps."""

    def __init__(self, loss: _Loss, value: SSAValue) -> None:
        self._loss = loss
        self._value = value
        self.losses: SSAValue | Operation | None = None
        self.sums: list[SSAValue] = []
        self.logsumexps: list[SSAValue] = []
        self.differences: set[Operation] = set()

    def add(self, value: SSAValue) -> bool:
        """Adds the terms of a sum. Returns False if one is of another kind."""
        op = value.owner
        if not isinstance(op, Operation):
            return False
        if op.name == "cirh.Add":
            return all(_only_reader(operand) is op and self.add(operand) for operand in op.operands)
        if op.name == "cirh.Mul":
            return any(self._of_rows(scaled, spread) for scaled, spread in commuted(op))
        probabilities = self._loss.probabilities
        is_softmax = op.name == "aten._log_softmax_backward_data" and probabilities is not None
        return is_softmax and op.operands[1] is probabilities.results[0] and self._ahead(op.operands[0], op)  # type: ignore[union-attr]

    def _of_rows(self, scaled: SSAValue, spread: SSAValue) -> bool:
        """Adds a term that is multiplied by one number for each row."""
        rows = _row_source(spread)
        if rows is None or len(list(scaled.uses)) != 1:
            return False
        if self._loss.probabilities is None and scaled is self._loss.root.results[1] and self.losses is None:
            self.losses = rows
            return types.shape(rows) == types.shape(spread)[:1]
        exponential = made_by(scaled, "cirh.Exp")
        difference = made_by(exponential.operands[0], "cirh.Sub") if exponential is not None else None
        if difference is None or difference not in _differences(self._value) or difference in self.differences:
            return False
        self.differences.add(difference)
        self.logsumexps.append(rows)
        return _only_reader(difference.results[0]) is exponential

    def _ahead(self, value: SSAValue, reader: Operation) -> bool:
        """Adds the terms of the gradient of the log-probabilities."""
        op = value.owner
        if not isinstance(op, Operation) or _only_reader(value) is not reader:
            return False
        if op.name == "cirh.Add":
            return all(self._ahead(operand, op) for operand in op.operands)
        root = self._loss.root
        if op.name == "aten.nll_loss_backward" and len(op.operands) == 4 and self.losses is None:
            self.losses = op
            said, again = attrs(root), attrs(op)
            same = all(said[name] == again[name] for name in ("reduction", "ignore_index"))
            return same and list(op.operands[1:]) == [*root.operands, root.results[1]]
        rows = _row_source(value)
        if rows is None:
            return False
        self.sums.append(rows)
        return True


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
