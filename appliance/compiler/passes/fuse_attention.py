"""Fuses attention that is written out, and only in the forward pass, into cirh.Attention.

The fused operation need not hold all scores in memory. If a backward pass reads the scores or their softmax, attention
stays written out; torch's own attention is traced as one operation in each direction. A query from which a mask hides
all keys gives zeros, where softmax gives NaN.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.passes.canonicalise import permutation_of
from appliance.compiler.passes.matching import are_private, commuted, fuse_each, made_by, number, same_float
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue, attrs, dense
from waferbox.cirh.dialect.operations import Const
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.graph import extract
from waferbox.cirh.table.lookup import SEGMENTS, TORCH_ERRORS, spec

# --- Values that are the same in every step ---------------------------------------------------------------------------

_MOST_OPERATIONS: Final = 32
# The most elements that are computed for a module: those of sixteen masks of two thousand tokens.
_MOST_ELEMENTS: Final = 1 << 26


class KnownValues:
    """The values of a module that are computed from constants alone, computed here if that is little work."""

    def __init__(self) -> None:
        self._left = _MOST_ELEMENTS
        self._found: dict[SSAValue, torch.Tensor | None] = {}

    def get(self, value: SSAValue) -> torch.Tensor | None:
        """The value; None if it depends on the step, or is too much work. The tensor is shared: do not change it."""
        if value not in self._found:
            self._found[value] = self._compute(value)
        return self._found[value]

    def _compute(self, value: SSAValue) -> torch.Tensor | None:
        needed: set[Operation] = set()
        stack = [value]
        while stack:
            owner = stack.pop().owner
            if isinstance(owner, Block) or len(needed) > _MOST_OPERATIONS:
                return None
            if not isinstance(owner, Const) and spec(owner.name).random:
                return None
            if owner not in needed:
                needed.add(owner)
                stack.extend(owner.operands)
        self._left -= sum(math.prod(types.shape(result)) for op in needed for result in op.results)
        block = value.owner.parent_block() if isinstance(value.owner, Operation) else None
        if self._left < 0 or block is None:
            return None
        try:
            return Kernel(extract([op for op in block.ops if op in needed], [], [value]))([])[0]
        except TORCH_ERRORS:
            # Such as an index out of range: the step itself will fail with it.
            return None


# --- The pattern ------------------------------------------------------------------------------------------------------

_SWAP_LAST = [0, 1, 3, 2]


@dataclass(frozen=True, slots=True)
class _Product:
    """left @ right, for matrices of each batch and head.

    Attributes:
        left: left operand.
        right: right operand.
        by_rows: whether the right operand's last dimension is the one that is summed over.
        inner: operations of the product.
        merging: the operation that joins batch and heads of the left operand, if there is one.
    """

    left: SSAValue
    right: SSAValue
    by_rows: bool
    inner: list[Operation]
    merging: list[Operation]


@dataclass(frozen=True, slots=True)
class _Mask:
    """A mask that is added to the scores, or a condition under which a number replaces them.

    Attributes:
        value: the mask, or the condition.
        inner: the operation that applies it.
        fill: the number that replaces scores; None: the mask is added.
        shows: whether the condition is true for the scores that stay.
    """

    value: SSAValue
    inner: Operation
    fill: float | None = None
    shows: bool = False


def fuse_attention(module: ModuleOp) -> bool:
    """Fuses `softmax(mask(query @ key^T * scale)) @ value`. Returns whether there was any."""
    return fuse_each(module, ("cirh.Reshape", "cirh.DotGeneral"), partial(_fuse, KnownValues()))


def _fuse(known: KnownValues, root: Operation) -> bool:
    output = _product(root)
    weights = made_by(output.left, "cirh.Softmax") if output is not None else None
    if output is None or output.by_rows or weights is None or attrs(weights).get("axis", 3) != 3:
        return False
    for masked, mask in _masks(weights.operands[0]):
        scores, scale, scaling = _scaled(masked)
        product = _product(scores) if scores is not None else None
        if product is None:
            continue
        masking = [mask.inner] if mask is not None else []
        inner = [*output.inner, *output.merging, weights, *masking, *scaling, *product.inner]
        if not are_private([op for op in inner if op is not root], root):
            continue
        if not _fits(product, output) or (mask is not None and not _is_kept(known, mask, types.dtype(product.left))):
            continue
        rewriter = Rewriter(root)
        keys = product.right if product.by_rows else _swapped(rewriter, product.right)
        tensors = [product.left, keys, output.right]
        tokens = types.shape(product.left)[2], types.shape(keys)[2]
        causal = mask is not None and _is_causal(known, mask, tokens)
        if mask is not None and not causal:
            tensors.append(_added(rewriter, mask, types.dtype(product.left)))
        attributes: dict[str, AttrValue] = {"is_causal": causal, "scale": scale}
        if len(tensors) == 3:
            attributes[SEGMENTS] = [1, 1, 1, 0]
        rewriter.replace(rewriter.emit("cirh.Attention", tensors, attributes)[:1])
        return True
    return False


def _fits(product: _Product, output: _Product) -> bool:
    """Whether keys and values have the same shape, and all tensors the same floating-point type."""
    keys, values = types.shape(product.right), types.shape(output.right)
    if not product.by_rows:
        keys = (*keys[:2], keys[3], keys[2])
    some = 0 not in (*types.shape(product.left), *keys)
    return some and keys == values and same_float(product.left, product.right, output.right)


def _is_kept(known: KnownValues, mask: _Mask, dtype: torch.dtype) -> bool:
    """Whether the fused operation has the same effect as the mask."""
    if mask.fill is None and types.dtype(mask.value) is not dtype:
        return False
    value = known.get(_unbroadcast(mask.value))
    if value is not None:
        return not bool(_hides(value, mask).all(-1).any())
    # A finite number that hides all keys of a query gives the mean of the values, unlike the fused operation.
    return mask.fill in (None, -math.inf)


def _product(op: Operation) -> _Product | None:
    if op.name == "cirh.DotGeneral":
        attributes = attrs(op)
        left, right = op.operands
        batched = attributes["lhs_batching_dimensions"] == attributes["rhs_batching_dimensions"] == [0, 1]
        summed = (attributes["lhs_contracting_dimensions"], attributes["rhs_contracting_dimensions"])
        if batched and summed in (([3], [2]), ([3], [3])) and len(types.shape(left)) == len(types.shape(right)) == 4:
            return _Product(left, right, summed == ([3], [3]), [op], [])
        return None
    bmm = made_by(op.operands[0], "aten.bmm") if op.name == "cirh.Reshape" else None
    shape = types.shape(op.results[0])
    if bmm is None or len(shape) != 4:
        return None
    merging = [made_by(operand, "cirh.Reshape") for operand in bmm.operands]
    sources = [reshape.operands[0] for reshape in merging if reshape is not None]
    merged = [(*shape[:2], *types.shape(operand)[1:]) for operand in bmm.operands]
    if [types.shape(source) for source in sources] != merged or shape[2:] != types.shape(bmm.results[0])[1:]:
        return None
    return _Product(sources[0], sources[1], False, [op, bmm], [op for op in merging[:1] if op is not None])


def _masks(scores: SSAValue) -> Iterator[tuple[SSAValue, _Mask | None]]:
    """The ways to read the operand of softmax: as scores with a mask, or as scores alone."""
    op = made_by(scores, "cirh.Select", "cirh.Add")
    if op is not None and op.name == "cirh.Add":
        for value, added in commuted(op):
            yield value, _Mask(added, op)
    elif op is not None:
        condition, filled, value = op.operands
        for shows in (False, True):
            fill = number(filled)
            if fill is not None and fill in (-math.inf, torch.finfo(types.dtype(filled)).min):
                yield value, _Mask(condition, op, fill, shows)
            filled, value = value, filled
    yield scores, None


def _scaled(value: SSAValue) -> tuple[Operation | None, float, list[Operation]]:
    """The product that makes the scores, the factor that scales it, and the operations of the scaling."""
    op = made_by(value, "cirh.Mul", "cirh.Div")
    for scores, constant in commuted(op) if op is not None and op.name == "cirh.Mul" else ():
        factor = number(constant)
        if op is not None and factor is not None and math.isfinite(factor):
            return made_by(scores, "cirh.Reshape", "cirh.DotGeneral"), factor, [op]
    if op is not None and op.name == "cirh.Div":
        divisor = number(op.operands[1])
        if divisor is not None and divisor != 0 and math.isfinite(divisor):
            return made_by(op.operands[0], "cirh.Reshape", "cirh.DotGeneral"), 1 / divisor, [op]
    return made_by(value, "cirh.Reshape", "cirh.DotGeneral"), 1.0, []


def _swapped(rewriter: Rewriter, value: SSAValue) -> SSAValue:
    """The value with its last two dimensions exchanged: the source of a transpose, if it is one."""
    op = made_by(value, "cirh.Transpose")
    if op is not None and permutation_of(op) == _SWAP_LAST:
        return op.operands[0]
    permutation = rewriter.constant(dense(torch.tensor(_SWAP_LAST)))
    return rewriter.emit("cirh.Transpose", [value, permutation])[0]


def _unbroadcast(value: SSAValue) -> SSAValue:
    """The value before it was broadcast, if it had two or four dimensions."""
    op = made_by(value, "cirh.BroadcastInDim")
    small = op is not None and attrs(op)["broadcast_dimensions"] in ([2, 3], [0, 1, 2, 3])
    return op.operands[0] if op is not None and small else value


def _hides(value: torch.Tensor, mask: _Mask) -> torch.Tensor:
    if mask.fill is None:
        return value == -math.inf
    return ~value if mask.shows else value


def _is_causal(known: KnownValues, mask: _Mask, tokens: tuple[int, int]) -> bool:
    """Whether the mask only hides later tokens from earlier ones."""
    value = known.get(_unbroadcast(mask.value))
    if value is None or tokens[0] != tokens[1] or value.numel() != tokens[0] * tokens[1]:
        return False
    hidden = _hides(value, mask)
    if mask.fill is None and bool(value[~hidden].any()):
        return False
    return torch.equal(hidden.reshape(tokens), torch.ones(tokens, dtype=torch.bool).triu(1))


def _added(rewriter: Rewriter, mask: _Mask, dtype: torch.dtype) -> SSAValue:
    """The mask as a tensor that is added to the scores."""
    source = _unbroadcast(mask.value)
    if mask.fill is None:
        return source
    shape = types.shape(source)
    hidden, shown = rewriter.splat(-math.inf, shape, dtype), rewriter.splat(0.0, shape, dtype)
    return rewriter.emit("cirh.Select", [source, shown, hidden] if mask.shows else [source, hidden, shown])[0]
