"""Lets heads of attention share keys and values, instead of reading a copy for each head.

Models repeat the keys and values of grouped query attention for the heads that share them, and add the gradients of the
copies. The operations of CIRH take fewer keys than queries (`waferbox/cirh/calls/attention_parts.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.passes.dce import eliminate_dead_code
from appliance.compiler.passes.matching import broadcast_dims, made_by
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import attrs
from waferbox.cirh.dialect.operations import body_ops

_HEADS: Final = 1  # the dimension of heads
_COPIES: Final = 2  # the dimension of the copies of a head, before it is joined with that of heads
_ROUNDINGS: Final = ("cirh.RoundCb16", "cirh.Cast")


def share_keys(module: ModuleOp) -> bool:
    """Removes copies of keys and values, in place. Returns whether there were any.

    The gradients of copies are added before they are rounded.
    """
    changed = False
    for op in body_ops(module):
        if op.name in ("cirh.Attention", "cirh.AttentionGrad"):
            changed = _share(op) or changed
    if changed:
        eliminate_dead_code(module)
    return changed


def _share(op: Operation) -> bool:
    is_gradient = op.name == "cirh.AttentionGrad"
    first = 1 if is_gradient else 0
    if len(op.operands) != (6 if is_gradient else 3):
        return False  # with masks or dropout, each head has keys of its own
    sources = [_source(op.operands[first + 1]), _source(op.operands[first + 2])]
    sums = [_sum_of_copies(op.results[1]), _sum_of_copies(op.results[2])] if is_gradient else []
    key, value = sources
    if key is None or value is None or key.heads != value.heads or None in sums:
        return False
    rewriter = Rewriter(op)
    operands = list(op.operands)
    operands[first + 1 : first + 3] = key.emit(rewriter), value.emit(rewriter)
    results = rewriter.emit(op.name, operands, attrs(op))
    if not is_gradient:
        rewriter.replace(results)
        return True
    op.results[0].replace_all_uses_with(results[0])
    for found, gradient in zip(sums, results[1:], strict=True):
        assert found is not None
        found.replace(gradient)
    return True


@dataclass(frozen=True, slots=True)
class _Source:
    """The keys or values of which copies are made: a value with the elements of (batch, heads, tokens, features)."""

    value: SSAValue
    shape: tuple[int, ...]

    @property
    def heads(self) -> int:
        return self.shape[_HEADS]

    def emit(self, rewriter: Rewriter) -> SSAValue:
        if types.shape(self.value) == self.shape:
            return self.value
        type = types.tensor_type(self.shape, types.dtype(self.value))
        return rewriter.emit("cirh.Reshape", [self.value], types=[type])[0]


def _source(copies: SSAValue) -> _Source | None:
    """The keys or values of which a value has copies, those of a head one after the other; None for other values."""
    joined = made_by(copies, "cirh.Reshape")
    spread = made_by(joined.operands[0], "cirh.BroadcastInDim") if joined is not None else None
    if spread is None or not _joins_copies(types.shape(spread.results[0]), types.shape(copies)):
        return None
    (source,) = spread.operands
    batch, heads, _, *others = types.shape(spread.results[0])
    sizes = dict(zip(broadcast_dims(spread), types.shape(source), strict=True))
    is_copied_alone = sizes.get(_COPIES, 1) == 1 and [sizes.get(dim, 1) for dim in (0, 1, 3, 4)] == [
        batch,
        heads,
        *others,
    ]
    return _Source(source, (batch, heads, *others)) if is_copied_alone else None


def _joins_copies(split: Sequence[int], joined: Sequence[int]) -> bool:
    """Whether a reshape joins the dimension of copies with that of heads."""
    return len(split) == 5 and [split[0], split[_HEADS] * split[_COPIES], *split[3:]] == list(joined)


@dataclass(frozen=True, slots=True)
class _Sum:
    """The sum of the gradients of copies: the operation that adds, and roundings before it."""

    op: Operation
    roundings: Sequence[Operation]

    def replace(self, gradient: SSAValue) -> None:
        """Makes the readers of the sum read the gradient of what was copied, which is rounded in the same way."""
        rewriter = Rewriter(self.op)
        shape = types.shape(gradient)
        for each in self.roundings:
            type = types.tensor_type(shape, types.dtype(each.results[0]))
            typed = [type] if each.name == "cirh.Cast" else None
            (gradient,) = rewriter.emit(each.name, [gradient], attrs(each), types=typed)
        result = self.op.results[0]
        if types.shape(result) != shape:
            type = types.tensor_type(types.shape(result), types.dtype(gradient))
            (gradient,) = rewriter.emit("cirh.Reshape", [gradient], types=[type])
        rewriter.replace([gradient])


def _sum_of_copies(gradient: SSAValue) -> _Sum | None:
    """The sum of the gradients of copies that a value has; None if they are used otherwise."""
    roundings: list[Operation] = []
    is_split = False
    value = gradient
    while len(uses := list(value.uses)) == 1:
        op = uses[0].operation
        if op.name in _ROUNDINGS:
            roundings.append(op)
        elif op.name == "cirh.Reshape" and not is_split:
            is_split = _joins_copies(types.shape(op.results[0]), types.shape(value))
            if not is_split:
                return None
        elif op.name == "cirh.Reduce" and is_split:
            adds_copies = attrs(op)["dimensions"] == [_COPIES] and attrs(op)["reduce_kind"] == "ADD"
            return _Sum(op, roundings) if adds_copies else None
        else:
            return None
        value = op.results[0]
    return None
