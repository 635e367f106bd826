"""Fuses attention that is written out into cirh.Attention, and its gradients into cirh.AttentionGrad.

The fused operations need not hold all scores in memory. If anything else reads the scores or their softmax, attention
stays written out. A query from which a mask hides all keys gives zeros, where softmax gives NaN.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.passes.canonicalise import canonicalise
from appliance.compiler.passes.dce import eliminate_dead_code
from appliance.compiler.passes.known_masks import KnownMasks, Mask, unbroadcast
from appliance.compiler.passes.matching import broadcast_dims, fuse_each, made_by, same_float
from appliance.compiler.passes.matrices import Product, swap_last
from appliance.compiler.passes.written_attention import Backward, Scores, Weights, backward_of, scores_of, weights_of
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue, attrs
from waferbox.cirh.dialect.operations import body_ops
from waferbox.cirh.table.lookup import SEGMENTS


def fuse_attention(module: ModuleOp) -> bool:
    """Fuses `dropout(softmax(mask(query @ key^T * scale))) @ value`. Returns whether anything has changed."""
    if not any(op.name == "cirh.Softmax" for op in body_ops(module)):
        return False
    changed = eliminate_dead_code(module)  # which would count as a reader
    if not fuse_each(module, ("cirh.Softmax",), partial(_fuse, KnownMasks())):
        return changed
    canonicalise(module)
    return True


def _fuse(known: KnownMasks, softmax: Operation) -> bool:
    weights = weights_of(softmax)
    if weights is None:
        return False
    for scores in scores_of(weights):
        backward = backward_of(scores, weights)
        if backward is None and (weights.around or weights.others):
            continue
        if not _fits(scores, weights.output) or not all(_is_kept(known, scores, mask) for mask in scores.masks):
            continue
        effects = [known.effect(mask) for mask in scores.masks]
        is_causal = len(effects) == 1 and effects[0] is not None and effects[0].is_causal
        masks = [] if is_causal else list(_terms(scores))
        if backward is None or backward.summed is None or _differentiated(masks, backward.summed) is not None:
            # Known masks hide no row (`_is_kept`), and a fill that hides one is minus infinity.
            unknown = zip(scores.masks, effects, strict=True)
            hides_rows = any(mask.fill is None and effect is None for mask, effect in unknown)
            _Replacement(weights, scores, masks, is_causal=is_causal, hides_rows=hides_rows, backward=backward).make()
            return True
    return False


def _fits(scores: Scores, output: Product) -> bool:
    """Whether keys and values have the same shape, and all tensors the same floating-point type."""
    query, key, value = scores.query, scores.key, output.right
    some = 0 not in (*types.shape(query.base), *types.shape(key.base))
    return some and key.size == value.size and same_float(query.base, key.base, value.base)


def _is_kept(known: KnownMasks, scores: Scores, mask: Mask) -> bool:
    """Whether the fused operation has the same effect as the mask."""
    if mask.fill is None and types.dtype(mask.value) is not types.dtype(scores.query.base):
        return False
    effect = known.effect(mask)
    if effect is not None:
        return not effect.hides_rows
    # A finite number that hides all keys of a query gives the mean of the values, unlike the fused operation.
    return mask.fill in (None, -math.inf)


# --- Masks as numbers to add ------------------------------------------------------------------------------------------


def _terms(scores: Scores) -> Iterator[Mask]:
    """The masks. One that adds up broadcasts to the shape of all scores is read as several."""
    for mask in scores.masks:
        stack = [mask.value]
        while stack:
            value = stack.pop()
            op = made_by(value, "cirh.Add") if mask.fill is None else None
            if op is not None and all(
                _is_broadcast(operand) or made_by(operand, "cirh.Add") for operand in op.operands
            ):
                stack += reversed(op.operands)
            else:
                yield Mask(value, mask.inner, mask.fill, mask.shows)


def _is_broadcast(value: SSAValue) -> bool:
    return made_by(value, "cirh.BroadcastInDim") is not None


def _shape(mask: Mask) -> tuple[int, ...]:
    """The shape of a mask before its broadcast, of four dimensions."""
    source = unbroadcast(mask.value)
    broadcast = made_by(mask.value, "cirh.BroadcastInDim")
    if broadcast is None:
        return types.shape(source)
    shape = [1] * 4
    for dim, size in zip(broadcast_dims(broadcast), types.shape(source), strict=True):
        shape[dim] = size
    return tuple(shape)


def _differentiated(masks: list[Mask], summed: frozenset[int]) -> int | None:
    """The number of a mask whose gradient is the sum of the scores' gradient over these dimensions."""
    for index, mask in enumerate(masks):
        sizes = zip(_shape(mask), types.shape(mask.value), strict=True)
        if mask.fill is None and {dim for dim, (size, whole) in enumerate(sizes) if size != whole} == summed:
            return index
    return None


# --- The replacement --------------------------------------------------------------------------------------------------


class _Replacement:
    """The fused operations of one attention, and what they are made from."""

    def __init__(
        self,
        weights: Weights,
        scores: Scores,
        masks: list[Mask],
        *,
        is_causal: bool,
        hides_rows: bool,
        backward: Backward | None,
    ) -> None:
        """hides_rows: whether a mask may hide all keys of a query by finite numbers."""
        self._weights = weights
        self._scores = scores
        self._masks = masks
        self._hides_rows = hides_rows
        self._backward = backward
        self._attributes: dict[str, AttrValue] = {"is_causal": is_causal, "scale": scores.scale}
        if weights.dropout is not None:
            self._attributes["dropout"] = attrs(weights.dropout)["scale"]
        self._shape = types.shape(weights.softmax.results[0])

    def make(self) -> None:
        """Inserts the fused operations, and makes all readers read their results."""
        scores, output, leading = self._scores, self._weights.output, self._shape[:2]
        rewriter = Rewriter(output.op)
        tensors = [matrix.shaped(rewriter, leading) for matrix in (scores.query, scores.key, output.right)]
        masks, kept = self._added(rewriter), self._kept(rewriter)
        made = rewriter.emit(
            "cirh.Attention",
            [*tensors, *masks, *kept],
            self._attributes | {SEGMENTS: [1, 1, 1, len(masks), len(kept)]},
        )
        rewriter.replace([_as(rewriter, made[0], output.op)])
        backward = self._backward
        if backward is None:
            return
        rewriter = Rewriter(backward.first)
        attributes = self._attributes | {SEGMENTS: [1] * 6 + [len(masks), len(kept)]}
        if backward.summed is not None:
            attributes["mask_grad"] = _differentiated(self._masks, backward.summed)  # type: ignore[assignment]
        if self._hides_rows:
            attributes["hides_rows"] = True
        operands = [backward.gradient.shaped(rewriter, leading), *tensors, *made, *masks, *kept]
        gradients = rewriter.emit("cirh.AttentionGrad", operands, attributes)
        for op, (number_of, is_transposed) in backward.results.items():
            rewriter = Rewriter(op)
            gradient = gradients[number_of]
            rewriter.replace([_as(rewriter, swap_last(rewriter, gradient) if is_transposed else gradient, op)])

    def _kept(self, rewriter: Rewriter) -> list[SSAValue]:
        """The weights that dropout keeps, if there is dropout."""
        if self._weights.dropout is None:
            return []
        kept = self._weights.dropout.operands[1]
        if types.shape(kept) == self._shape:
            return [kept]
        return list(rewriter.emit("cirh.Reshape", [kept], types=[types.tensor_type(self._shape, types.dtype(kept))]))

    def _added(self, rewriter: Rewriter) -> list[SSAValue]:
        """The masks as numbers to add, of four dimensions: their sum, if that is smaller than the scores."""
        dtype = types.dtype(self._scores.query.base)
        parts = [_of_four_dimensions(rewriter, mask, dtype) for mask in self._masks]
        shape = tuple(max(sizes) for sizes in zip(*(types.shape(part) for part in parts), strict=True))
        has_gradient = self._backward is not None and self._backward.summed is not None
        if len(parts) < 2 or self._weights.dropout is not None or has_gradient or shape == self._shape:
            return parts
        total, *others = (_spread(rewriter, part, shape) for part in parts)
        for other in others:
            (total,) = rewriter.emit("cirh.Add", [total, other])
        return [total]


def _as(rewriter: Rewriter, value: SSAValue, op: Operation) -> SSAValue:
    """The value in the shape of an operation's result."""
    kind = types.tensor_type(*types.info(op.results[0]))
    return value if value.type == kind else rewriter.emit("cirh.Reshape", [value], types=[kind])[0]


def _of_four_dimensions(rewriter: Rewriter, mask: Mask, dtype: torch.dtype) -> SSAValue:
    """The mask before its broadcast, as numbers to add."""
    numbers, shape = _numbers(rewriter, mask, dtype), _shape(mask)
    if types.shape(numbers) == shape:
        return numbers
    return rewriter.emit("cirh.Reshape", [numbers], types=[types.tensor_type(shape, dtype)])[0]


def _numbers(rewriter: Rewriter, mask: Mask, dtype: torch.dtype) -> SSAValue:
    """The mask, before its broadcast, as numbers to add."""
    source = unbroadcast(mask.value)
    if mask.fill is None:
        return source
    shape = types.shape(source)
    hidden, shown = rewriter.splat(-math.inf, shape, dtype), rewriter.splat(0.0, shape, dtype)
    return rewriter.emit("cirh.Select", [source, shown, hidden] if mask.shows else [source, hidden, shown])[0]


def _spread(rewriter: Rewriter, value: SSAValue, shape: tuple[int, ...]) -> SSAValue:
    if types.shape(value) == shape:
        return value
    kind = types.tensor_type(shape, types.dtype(value))
    return rewriter.emit("cirh.BroadcastInDim", [value], {"broadcast_dimensions": [0, 1, 2, 3]}, types=[kind])[0]
