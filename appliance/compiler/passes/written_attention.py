"""Attention as programs write it out: products, factors, masks, softmax and dropout, and their gradients."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from xdsl.ir import Operation, SSAValue

from appliance.compiler.passes.known_masks import Mask, unbroadcast
from appliance.compiler.passes.matching import broadcast_dims, commuted, made_by, number
from appliance.compiler.passes.matrices import Matrix, Product, Reader, matrix_of, product_by, readers
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import attrs

# The most masks and factors between the scores and their softmax.
_MOST_STEPS: Final = 6
_DROPOUT: Final = "aten.native_dropout_backward"  # the forward pass does the same: a product with what is kept
# The gradients of attention, in the order of the operation's results.
QUERY, KEY, VALUE, MASK = range(4)


# --- Forward ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scores:
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
class Weights:
    """The result of softmax, dropout, and their readers.

    Attributes:
        scores: the operand of softmax.
        softmax: the operation that makes its result: softmax, or the choice of zeros where all keys are hidden.
        largest: the operation that finds the largest score of each query, for that choice.
        dropout: the dropout of the weights, if there is one.
        around: readers of the softmax, but for dropout. Without dropout these are the readers of the weights.
        output: the product of the weights and the values.
        others: the readers of the weights but for the output.
    """

    scores: SSAValue
    softmax: Operation
    largest: Operation | None
    dropout: Operation | None
    around: tuple[Reader, ...]
    output: Product
    others: tuple[Reader, ...]

    @property
    def used(self) -> SSAValue:
        """The weights that the values are multiplied by."""
        return (self.dropout or self.softmax).results[0]


def weights_of(softmax: Operation) -> Weights | None:
    """The weights of a softmax over the keys of each head, if they are multiplied by values once."""
    shape = types.shape(softmax.results[0])
    if len(shape) != 4 or 0 in shape or attrs(softmax).get("axis", 3) != 3:
        return None
    scores, largest = softmax.operands[0], None
    chosen = _choice_of_zeros(softmax)
    if chosen is not None:
        softmax, largest = chosen
    around = list(readers(softmax.results[0]))
    drops = [reader for reader in around if reader.op.name == _DROPOUT and reader.index == 0 and not reader.swapped]
    if len(drops) > 1:
        return None
    dropout = drops[0].op if drops else None
    used = (dropout or softmax).results[0]
    of_used = list(readers(used))
    outputs = [product for user in of_used if (product := _output(user, used)) is not None]
    if len(outputs) != 1:
        return None
    return Weights(
        scores=scores,
        softmax=softmax,
        largest=largest,
        dropout=dropout,
        around=tuple(reader for reader in around if reader.op is not dropout and reader.op is not outputs[0].op),
        output=outputs[0],
        others=tuple(reader for reader in of_used if reader.op is not outputs[0].op),
    )


def _choice_of_zeros(softmax: Operation) -> tuple[Operation, Operation] | None:
    """The operation that puts zeros where all scores of a query are -inf, and the one that finds the largest scores."""
    uses = list(softmax.results[0].uses)
    choice = uses[0].operation if len(uses) == 1 else None
    if choice is None or choice.name != "cirh.Select" or uses[0].index != 2 or number(choice.operands[1]) != 0:
        return None
    hidden = made_by(unbroadcast(choice.operands[0]), "cirh.Compare")
    if hidden is None or attrs(hidden)["comparison_direction"] != "EQ" or number(hidden.operands[1]) != -math.inf:
        return None
    largest = made_by(hidden.operands[0], "cirh.Reduce")
    if largest is None or largest.operands[0] is not softmax.operands[0] or len(list(largest.results[0].uses)) != 1:
        return None
    is_largest = attrs(largest)["reduce_kind"] == "MAX" and attrs(largest)["dimensions"] == [3]
    return (choice, largest) if is_largest else None


def _output(user: Reader, weights: SSAValue) -> Product | None:
    product = product_by(user.op)
    return product if product is not None and product.left == matrix_of(weights) else None


def scores_of(weights: Weights) -> Iterator[Scores]:
    """The ways to read the operand of softmax as scores with masks and factors that nothing else reads."""
    return _scores(weights.scores, weights.largest)


def _scores(
    value: SSAValue,
    largest: Operation | None,
    scale: float = 1.0,
    masks: tuple[Mask, ...] = (),
    steps: int = _MOST_STEPS,
) -> Iterator[Scores]:
    """As `scores_of`. `largest` may read the value, too."""
    matrix = matrix_of(value)
    product = product_by(matrix.base.owner)
    others = [reader for reader in readers(matrix.base) if reader.op is not largest]
    if product is not None and not matrix.swapped and len(others) == 1:
        yield Scores(product, scale, masks)
    op = made_by(value, "cirh.Add", "cirh.Select", "cirh.Mul", "cirh.Div")
    if op is None or not steps or len([use for use in value.uses if use.operation is not largest]) > 1:
        return
    factored = _factor(op)
    if factored is not None:
        inner, factor = factored
        yield from _scores(inner, None, scale * factor, masks, steps - 1)
    elif scale == 1:  # a mask within a factor would have to be scaled
        for inner, mask in _masks(op):
            yield from _scores(inner, None, scale, (*masks, mask), steps - 1)


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


# --- Backward ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """The backward pass.

    Attributes:
        gradient: the gradient of the output.
        first: its first operation.
        results: by operation, which gradient it makes, and whether transposed.
        summed: the dimensions over which the gradient of a mask is summed; None: no mask has a gradient.
    """

    gradient: Matrix
    first: Operation
    results: Mapping[Operation, tuple[int, bool]]
    summed: frozenset[int] | None


def backward_of(scores: Scores, weights: Weights) -> Backward | None:
    """The backward pass, if all other readers of the weights belong to it."""
    behind = [user.op for user in weights.around if user.op.name == "aten._softmax_backward_data" and user.index == 1]
    softmax = weights.softmax.results[0]
    if len(behind) != 1 or attrs(behind[0])["dim"] not in (3, -1) or behind[0].operands[1] is not softmax:
        return None
    incoming = _before_dropout(behind[0].operands[0], weights.dropout)
    if incoming is None:
        return None
    made = matrix_of(incoming)
    product = product_by(made.base.owner)
    if product is None or made.swapped or len(list(readers(made.base))) != 1:
        return None
    if product.right != weights.output.right.transposed:
        return None
    gradient, of_weights = product.left, matrix_of(weights.used)
    known: dict[tuple[Matrix, Matrix], tuple[int, bool]] = {
        (of_weights.transposed, gradient): (VALUE, False),
        (gradient.transposed, of_weights): (VALUE, True),
    }
    first = [product.op, *(user.op for user in weights.others if user.op is not behind[0])]
    if weights.dropout is not None and len(weights.around) > 1:
        return None
    found = _gradient_of_product(behind[0].results[0], scores)
    if found is None:
        return None
    changed, sums = found
    of_scores = matrix_of(changed)
    known[of_scores, scores.key] = QUERY, False
    known[scores.key.transposed, of_scores.transposed] = QUERY, True
    known[of_scores.transposed, scores.query] = KEY, False
    known[scores.query.transposed, of_scores] = KEY, True
    results: dict[Operation, tuple[int, bool]] = dict.fromkeys(sums, (MASK, False))
    for op in (*first[1:], *(user.op for user in readers(changed) if user.op not in sums)):
        computed = product_by(op)
        result = known.get((computed.left, computed.right)) if computed is not None else None
        if result is None:
            return None
        results[op] = result
    summed = {frozenset(_summed_dims(op)) for op in sums}
    block = product.op.parent_block()
    if len(summed) > 1 or block is None:
        return None
    return Backward(
        gradient=gradient,
        first=next(op for op in block.ops if op in first),
        results=results,
        summed=summed.pop() if summed else None,
    )


def _before_dropout(value: SSAValue, dropout: Operation | None) -> SSAValue | None:
    """The gradient of the weights that dropout left, from that of all weights; None if it is made otherwise."""
    if dropout is None:
        return value
    op = made_by(value, _DROPOUT)
    same = op is not None and op.operands[1] is dropout.operands[1] and attrs(op)["scale"] == attrs(dropout)["scale"]
    return op.operands[0] if op is not None and same and len(list(value.uses)) == 1 else None


def _gradient_of_product(value: SSAValue, scores: Scores) -> tuple[SSAValue, list[Operation]] | None:
    """The gradient of the scores before masks and factors, and the sums that make gradients of masks.

    value: the gradient behind masks and factors. None if it is used otherwise.
    """
    scale = 1.0
    sums: list[Operation] = []
    conditions = {(_identity(mask.value), mask.shows) for mask in scores.masks if mask.fill is not None}
    while True:
        uses = list(value.uses)
        found = [use.operation for use in uses if _is_sum(use.operation)]
        if found and scale != 1:
            return None
        sums += found
        uses = [use for use in uses if use.operation not in found]
        if len(uses) != 1:
            break
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
    return (value, sums) if math.isclose(scale, scores.scale, rel_tol=1e-6) else None


def _is_sum(op: Operation) -> bool:
    return op.name == "cirh.Reduce" and attrs(op)["reduce_kind"] == "ADD"


def _summed_dims(op: Operation) -> list[int]:
    """The dimensions over which scores are summed, but for those of one element."""
    shape = types.shape(op.operands[0])
    dims: list[int] = attrs(op)["dimensions"]  # type: ignore[assignment]
    return [dim for dim in dims if shape[dim] != 1]


def _identity(value: SSAValue) -> tuple[SSAValue, tuple[int, ...]]:
    """What a value is, even if it was broadcast twice: the source, and where its dimensions go."""
    op = made_by(value, "cirh.BroadcastInDim")
    return (value, ()) if op is None else (op.operands[0], tuple(broadcast_dims(op)))
