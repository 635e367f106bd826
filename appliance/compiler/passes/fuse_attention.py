"""Fuses attention that is written out into cirh.Attention, and its gradients into cirh.AttentionGrad.

The fused operations need not hold all scores in memory. If anything else reads the scores or their softmax, such as
dropout, attention stays written out. A query from which a mask hides all keys gives zeros, where softmax gives NaN.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.passes.canonicalise import canonicalise
from appliance.compiler.passes.dce import eliminate_dead_code
from appliance.compiler.passes.known_masks import KnownMasks, Mask, unbroadcast
from appliance.compiler.passes.matching import broadcast_dims, commuted, fuse_each, made_by, number, same_float
from appliance.compiler.passes.matrices import Matrix, Product, Reader, matrix_of, product_by, readers, swap_last
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue, attrs
from waferbox.cirh.dialect.operations import body_ops
from waferbox.cirh.table.lookup import SEGMENTS

# The most masks and factors between the scores and their softmax.
_MOST_STEPS: Final = 6
_QUERY, _KEY, _VALUE = range(3)

# --- The pattern ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scores:
    """The operand of softmax: `query @ key^T`, with factors and masks.

    Attributes:
        product: the product.
        scale: the product of the factors.
        masks: the masks, which are applied behind the factors.
    """

    product: Product
    scale: float
    masks: tuple[Mask, ...]

    @property
    def query(self) -> Matrix:
        return self.product.left

    @property
    def key(self) -> Matrix:
        return self.product.right.transposed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    """The backward pass.

    Attributes:
        gradient: the gradient of the output.
        first: its first operation.
        results: by operation, which gradient it makes, and whether transposed.
    """

    gradient: Matrix
    first: Operation
    results: Mapping[Operation, tuple[int, bool]]


def fuse_attention(module: ModuleOp) -> bool:
    """Fuses `softmax(mask(query @ key^T * scale)) @ value`. Returns whether there was any."""
    if not any(op.name == "cirh.Softmax" for op in body_ops(module)):
        return False
    eliminate_dead_code(module)  # which would count as a reader
    changed = fuse_each(module, ("cirh.Softmax",), partial(_fuse, KnownMasks()))
    if changed:
        canonicalise(module)
    return changed


def _fuse(known: KnownMasks, softmax: Operation) -> bool:
    weights = softmax.results[0]
    shape = types.shape(weights)
    if len(shape) != 4 or 0 in shape or attrs(softmax).get("axis", 3) != 3:
        return False
    users = list(readers(weights))
    outputs = [product for user in users if (product := _output(user, weights)) is not None]
    if len(outputs) != 1:
        return False
    for scores in _scores(softmax.operands[0]):
        backward = _backward(scores, outputs[0], weights, users)
        if backward is None and len(users) > 1:
            continue
        if _fits(scores, outputs[0]) and all(_is_kept(known, scores, mask) for mask in scores.masks):
            effects = [known.effect(mask) for mask in scores.masks]
            is_causal = len(effects) == 1 and effects[0] is not None and effects[0].is_causal
            _replace(scores, outputs[0], backward, shape[:2], is_causal)
            return True
    return False


def _output(user: Reader, weights: SSAValue) -> Product | None:
    product = product_by(user.op)
    return product if product is not None and product.left == Matrix(weights) else None


def _scores(
    value: SSAValue, scale: float = 1.0, masks: tuple[Mask, ...] = (), steps: int = _MOST_STEPS
) -> Iterator[_Scores]:
    """The ways to read a value as scores with masks and factors that nothing else reads."""
    matrix = matrix_of(value)
    product = product_by(matrix.base.owner)
    if product is not None and not matrix.swapped and len(list(readers(matrix.base))) == 1:
        yield _Scores(product, scale, masks)
    op = made_by(value, "cirh.Add", "cirh.Select", "cirh.Mul", "cirh.Div")
    if op is None or not steps or len(list(value.uses)) > 1:
        return
    factored = _factor(op)
    if factored is not None:
        inner, factor = factored
        yield from _scores(inner, scale * factor, masks, steps - 1)
    elif scale == 1:  # a mask within a factor would have to be scaled
        for inner, mask in _masks(op):
            yield from _scores(inner, scale, (*masks, mask), steps - 1)


def _factor(op: Operation) -> tuple[SSAValue, float] | None:
    """The operand that an operation multiplies by a number, and the number."""
    if op.name == "cirh.Mul":
        for value, constant in commuted(op):
            factor = number(constant)
            if factor is not None and math.isfinite(factor):
                return value, factor
    if op.name == "cirh.Div":
        divisor = number(op.operands[1])
        if divisor is not None and divisor != 0 and math.isfinite(divisor):
            return op.operands[0], 1 / divisor
    return None


def _masks(op: Operation) -> Iterator[tuple[SSAValue, Mask]]:
    """The ways to read an operation as one that masks scores."""
    if op.name == "cirh.Add":
        for value, added in commuted(op):
            yield value, Mask(added, op)
    elif op.name == "cirh.Select":
        condition, filled, value = op.operands
        for shows in (False, True):
            fill = number(filled)
            if fill is not None and fill in (-math.inf, torch.finfo(types.dtype(filled)).min):
                yield value, Mask(condition, op, fill, shows)
            filled, value = value, filled


def _backward(scores: _Scores, output: Product, weights: SSAValue, users: list[Reader]) -> _Backward | None:
    """The backward pass, if all other readers of the weights belong to it."""
    behind = [user.op for user in users if user.op.name == "aten._softmax_backward_data" and user.index == 1]
    if len(behind) != 1 or attrs(behind[0])["dim"] not in (3, -1) or behind[0].operands[1] is not weights:
        return None
    made = matrix_of(behind[0].operands[0])
    product = product_by(made.base.owner)
    if product is None or made.swapped or len(list(readers(made.base))) != 1:
        return None
    if product.right != output.right.transposed:
        return None
    gradient, of_weights = product.left, Matrix(weights)
    known: dict[tuple[Matrix, Matrix], tuple[int, bool]] = {
        (of_weights.transposed, gradient): (_VALUE, False),
        (gradient.transposed, of_weights): (_VALUE, True),
    }
    first = [product.op, *(user.op for user in users if user.op not in (output.op, behind[0]))]
    changed = _gradient_of_product(behind[0].results[0], scores)
    if changed is None:
        return None
    of_scores = Matrix(changed)
    known[of_scores, scores.key] = _QUERY, False
    known[scores.key.transposed, of_scores.transposed] = _QUERY, True
    known[of_scores.transposed, scores.query] = _KEY, False
    known[scores.query.transposed, of_scores] = _KEY, True
    results = {}
    for op in (*first[1:], *(user.op for user in readers(changed))):
        found = product_by(op)
        result = known.get((found.left, found.right)) if found is not None else None
        if result is None:
            return None
        results[op] = result
    block = product.op.parent_block()
    assert block is not None
    return _Backward(gradient=gradient, first=next(op for op in block.ops if op in first), results=results)


def _gradient_of_product(value: SSAValue, scores: _Scores) -> SSAValue | None:
    """The gradient of the scores before masks and factors; None if it is made otherwise. value: that behind them."""
    scale = 1.0
    conditions = {(_identity(mask.value), mask.shows) for mask in scores.masks if mask.fill is not None}
    while len(uses := list(value.uses)) == 1:
        op = uses[0].operation
        factored = _factor(op) if op.name in ("cirh.Mul", "cirh.Div") else None
        if factored is not None and factored[0] is value:
            scale *= factored[1]
        elif op.name == "cirh.Select" and uses[0].index > 0:
            shows = uses[0].index == 1
            if (_identity(op.operands[0]), shows) not in conditions or number(op.operands[2 if shows else 1]) != 0:
                return None
        else:
            break
        value = op.results[0]
    return value if math.isclose(scale, scores.scale, rel_tol=1e-6) else None


def _identity(value: SSAValue) -> tuple[SSAValue, tuple[int, ...]]:
    """What a value is, even if it was broadcast twice: the source, and where its dimensions go."""
    op = made_by(value, "cirh.BroadcastInDim")
    return (value, ()) if op is None else (op.operands[0], tuple(broadcast_dims(op)))


def _fits(scores: _Scores, output: Product) -> bool:
    """Whether keys and values have the same shape, and all tensors the same floating-point type."""
    query, key, value = scores.query, scores.key, output.right
    some = 0 not in (*types.shape(query.base), *types.shape(key.base))
    return some and key.size == value.size and same_float(query.base, key.base, value.base)


def _is_kept(known: KnownMasks, scores: _Scores, mask: Mask) -> bool:
    """Whether the fused operation has the same effect as the mask."""
    if mask.fill is None and types.dtype(mask.value) is not types.dtype(scores.query.base):
        return False
    effect = known.effect(mask)
    if effect is not None:
        return not effect.hides_rows
    # A finite number that hides all keys of a query gives the mean of the values, unlike the fused operation.
    return mask.fill in (None, -math.inf)


# --- The replacement --------------------------------------------------------------------------------------------------


def _replace(
    scores: _Scores, output: Product, backward: _Backward | None, leading: tuple[int, ...], is_causal: bool
) -> None:
    rewriter = Rewriter(output.op)
    tensors = [matrix.shaped(rewriter, leading) for matrix in (scores.query, scores.key, output.right)]
    masks = [] if is_causal or not scores.masks else [_added(rewriter, scores)]
    attributes: dict[str, AttrValue] = {"is_causal": is_causal, "scale": scores.scale}
    made = rewriter.emit("cirh.Attention", [*tensors, *masks], attributes | _segments(3, masks))
    rewriter.replace([_as(rewriter, made[0], output.op)])
    if backward is None:
        return
    rewriter = Rewriter(backward.first)
    operands = [backward.gradient.shaped(rewriter, leading), *tensors, *made, *masks]
    gradients = rewriter.emit("cirh.AttentionGrad", operands, attributes | _segments(6, masks))
    for op, (number_of, is_transposed) in backward.results.items():
        rewriter = Rewriter(op)
        gradient = gradients[number_of]
        rewriter.replace([_as(rewriter, swap_last(rewriter, gradient) if is_transposed else gradient, op)])


def _segments(count: int, masks: list[SSAValue]) -> dict[str, AttrValue]:
    return {} if masks else {SEGMENTS: [1] * count + [0]}


def _as(rewriter: Rewriter, value: SSAValue, op: Operation) -> SSAValue:
    """The value in the shape of an operation's result."""
    kind = types.tensor_type(*types.info(op.results[0]))
    return value if value.type == kind else rewriter.emit("cirh.Reshape", [value], types=[kind])[0]


def _added(rewriter: Rewriter, scores: _Scores) -> SSAValue:
    """The masks as one tensor that is added to the scores, of four dimensions."""
    dtype = types.dtype(scores.query.base)
    parts = [_of_four_dimensions(rewriter, mask.value, _numbers(rewriter, mask, dtype)) for mask in scores.masks]
    shape = tuple(max(sizes) for sizes in zip(*(types.shape(part) for part in parts), strict=True))
    total, *others = (_spread(rewriter, part, shape) for part in parts)
    for other in others:
        (total,) = rewriter.emit("cirh.Add", [total, other])
    return total


def _numbers(rewriter: Rewriter, mask: Mask, dtype: torch.dtype) -> SSAValue:
    """The mask, before its broadcast, as numbers to add."""
    source = unbroadcast(mask.value)
    if mask.fill is None:
        return source
    shape = types.shape(source)
    hidden, shown = rewriter.splat(-math.inf, shape, dtype), rewriter.splat(0.0, shape, dtype)
    return rewriter.emit("cirh.Select", [source, shown, hidden] if mask.shows else [source, hidden, shown])[0]


def _of_four_dimensions(rewriter: Rewriter, value: SSAValue, source: SSAValue) -> SSAValue:
    """The source of a broadcast, with dimensions of one element for those that it lacks."""
    broadcast = made_by(value, "cirh.BroadcastInDim")
    if broadcast is None or len(types.shape(source)) == 4:
        return source
    shape = [1] * 4
    for dim, size in zip(broadcast_dims(broadcast), types.shape(source), strict=True):
        shape[dim] = size
    return rewriter.emit("cirh.Reshape", [source], types=[types.tensor_type(shape, types.dtype(source))])[0]


def _spread(rewriter: Rewriter, value: SSAValue, shape: tuple[int, ...]) -> SSAValue:
    if types.shape(value) == shape:
        return value
    kind = types.tensor_type(shape, types.dtype(value))
    return rewriter.emit("cirh.BroadcastInDim", [value], {"broadcast_dimensions": [0, 1, 2, 3]}, types=[kind])[0]
