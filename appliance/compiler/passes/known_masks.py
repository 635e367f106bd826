"""Masks of attention that are computed from constants alone: which scores they hide, known when the step is compiled.

Only what a mask computes counts, not how it is written. Large masks are computed a few rows at a time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from xdsl.ir import Block, Operation, SSAValue

from appliance.compiler.passes.matching import broadcast_dims
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.operations import Const
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.graph import extract
from waferbox.cirh.table.lookup import TORCH_ERRORS, build, spec

_MOST_OPERATIONS: Final = 32
# The most elements that are computed at once: those of sixteen masks of two thousand tokens.
_MOST_ELEMENTS: Final = 1 << 26
# The most elements of a mask that are computed for a module in all: those of one mask of 131,072 tokens.
_MOST_IN_PARTS: Final = 1 << 34
_PART: Final = 1 << 22


class KnownValues:
    """The values of a module that are computed from constants alone, computed here if that is little work."""

    def __init__(self) -> None:
        self._left = _MOST_ELEMENTS
        self._left_in_parts = _MOST_IN_PARTS
        self._found: dict[SSAValue, torch.Tensor | None] = {}

    def get(self, value: SSAValue) -> torch.Tensor | None:
        """The value; None if it depends on the step, or is too much work. The tensor is shared: do not change it."""
        if value not in self._found:
            self._found[value] = self._compute(value)
        return self._found[value]

    def _compute(self, value: SSAValue) -> torch.Tensor | None:
        needed = _needed(value)
        if needed is None:
            return None
        self._left -= sum(math.prod(types.shape(result)) for op in needed for result in op.results)
        block = value.owner.parent_block() if isinstance(value.owner, Operation) else None
        if self._left < 0 or block is None:
            return None
        try:
            return Kernel(extract([op for op in block.ops if op in needed], [], [value]))([])[0]
        except TORCH_ERRORS:
            # Such as an index out of range: the step itself will fail with it.
            return None

    def rows(self, value: SSAValue) -> Iterator[torch.Tensor | None]:
        """Yields a matrix as some rows at a time; None if it is not known."""
        count, columns = types.shape(value)
        self._left_in_parts -= count * columns
        if _needed(value) is None or self._left_in_parts < 0:
            yield None
            return
        step = max(1, _PART // max(columns, 1))
        for begin in range(0, count, step):
            yield self._part(value, slice(begin, begin + step), {})

    def _part(self, value: SSAValue, rows: slice, known: dict[SSAValue, torch.Tensor | None]) -> torch.Tensor | None:
        if value not in known:
            known[value] = self._part_of(value, rows, known)
        return known[value]

    def _part_of(self, value: SSAValue, rows: slice, known: dict[SSAValue, torch.Tensor | None]) -> torch.Tensor | None:
        op, shape = value.owner, types.shape(value)
        assert isinstance(op, Operation)
        if isinstance(op, Const):
            return op.value.tensor()[rows] if shape else op.value.tensor()
        if shape and spec(op.name).pointwise:
            operands = [self._part(operand, rows, known) for operand in op.operands]
            return build(op).function(*operands) if all(operand is not None for operand in operands) else None
        if shape and op.name == "cirh.BroadcastInDim":
            source = self.get(op.operands[0])
            if source is None:
                return None
            sizes = [1] * len(shape)
            for dim, size in zip(broadcast_dims(op), source.shape, strict=True):
                sizes[dim] = size
            return source.reshape(sizes).expand(shape)[rows]
        whole = self.get(value)
        return whole[rows] if whole is not None and shape else whole


def _needed(value: SSAValue) -> set[Operation] | None:
    """The operations that make a value from constants; None if it depends on the step, or they are too many."""
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
    return needed


# --- Masks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mask:
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

    def hides(self, value: torch.Tensor) -> torch.Tensor:
        """Where the value of the mask hides scores."""
        if self.fill is None:
            return value <= torch.finfo(value.dtype).min
        return ~value if self.shows else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a known mask does.

    Attributes:
        is_causal: whether it only hides later tokens from earlier ones, as many keys as queries.
        hides_rows: whether it hides all keys from some query.
    """

    is_causal: bool
    hides_rows: bool


class KnownMasks:
    """The effects of the masks of a module, each computed once."""

    def __init__(self) -> None:
        self._values = KnownValues()
        self._found: dict[tuple[SSAValue, bool, bool], Effect | None] = {}

    def effect(self, mask: Mask) -> Effect | None:
        """The effect of a mask; None if it depends on the step, or is too much work."""
        source = unbroadcast(mask.value)
        key = (source, mask.fill is None, mask.shows)
        if key not in self._found:
            self._found[key] = self._effect(mask, source)
        return self._found[key]

    def _effect(self, mask: Mask, source: SSAValue) -> Effect | None:
        *batch, queries, keys = types.shape(source)[-2:] if len(types.shape(source)) > 1 else (0, 0)
        is_matrix = len(types.shape(source)) == 2 and not batch
        whole = None if is_matrix else self._values.get(source)
        if not is_matrix and (whole is None or whole.dim() < 2):
            return None
        parts = self._values.rows(source) if is_matrix else iter([whole.flatten(0, -2)])  # type: ignore[union-attr]
        is_causal = queries == keys and math.prod(types.shape(source)) == queries * keys
        hides_rows, begin = False, 0
        for part in parts:
            if part is None:
                return None
            hidden = mask.hides(part)
            hides_rows = hides_rows or bool(hidden.all(-1).any())
            if is_causal:
                later = torch.arange(keys) > torch.arange(begin, begin + len(part)).unsqueeze(1)
                is_causal = torch.equal(hidden, later) and not (mask.fill is None and bool(part[~hidden].any()))
            begin += len(part)
        return Effect(is_causal=is_causal, hides_rows=hides_rows)


def unbroadcast(value: SSAValue) -> SSAValue:
    """The value before it was broadcast."""
    owner = value.owner
    return owner.operands[0] if isinstance(owner, Operation) and owner.name == "cirh.BroadcastInDim" else value
