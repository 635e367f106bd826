"""Masks of attention that are computed from constants alone: which scores they hide, known when the step is compiled.

Only what a mask computes counts, not how it is written. A mask of the distance between query and key is computed once
for each distance; other masks are computed a few rows at a time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from xdsl.ir import Block, Operation, SSAValue

from appliance.compiler.passes.matching import broadcast_dims
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import SplatAttr
from waferbox.cirh.dialect.operations import Const
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.graph import extract
from waferbox.cirh.table.lookup import TORCH_ERRORS, build, spec

_MOST_OPERATIONS: Final = 32
# The most elements that are computed at once: those of sixteen masks of two thousand tokens.
_MOST_ELEMENTS: Final = 1 << 26
# The most elements of masks that are computed in parts, for a module in all: those of a mask of 32,768 tokens.
_MOST_IN_PARTS: Final = 1 << 30
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


# --- Distances --------------------------------------------------------------------------------------------------------

# Sums and differences of whole numbers up to this are exact in float32.
_EXACT: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class _Progression:
    """A matrix of whole numbers that grow by `step` along one dimension: start, start + step, ..."""

    dim: int
    start: int
    step: int


class Diagonals:
    """Matrices whose elements depend on row minus column alone."""

    def __init__(self, values: KnownValues) -> None:
        self._values = values
        self._found: dict[SSAValue, torch.Tensor | _Progression | None] = {}

    def get(self, value: SSAValue) -> torch.Tensor | None:
        """The elements for row - column = 1 - columns, ..., rows - 1; None for another matrix, or an unknown one."""
        found = self._get(value)
        return found if isinstance(found, torch.Tensor) else None

    def _get(self, value: SSAValue) -> torch.Tensor | _Progression | None:
        if value not in self._found:
            self._found[value] = self._compute(value)
        return self._found[value]

    def _compute(self, value: SSAValue) -> torch.Tensor | _Progression | None:
        op, shape = value.owner, types.shape(value)
        if not isinstance(op, Operation) or len(shape) != 2 or 0 in shape:
            return None
        if isinstance(op, Const):
            constant = op.value
            return constant.scalar().expand(sum(shape) - 1) if isinstance(constant, SplatAttr) else None
        if op.name == "cirh.BroadcastInDim":
            return self._progression(op)
        if not spec(op.name).pointwise:
            return None
        operands = [self._get(operand) for operand in op.operands]
        match operands:
            case [_Progression() as one, _Progression() as other]:
                return _difference(op, one, other, shape)
        if all(isinstance(operand, torch.Tensor) for operand in operands):
            made: torch.Tensor = build(op).function(*operands)
            return made
        return None

    def _progression(self, op: Operation) -> _Progression | None:
        spread = [dim for dim, size in zip(broadcast_dims(op), types.shape(op.operands[0]), strict=True) if size != 1]
        source = self._values.get(op.operands[0]) if len(spread) == 1 else None
        if source is None or source.dtype is torch.bool:
            return None
        numbers = source.flatten()
        whole = numbers.to(torch.int64)
        start, step = int(whole[0]), int(whole[1] - whole[0])
        if not torch.equal(whole.to(numbers.dtype), numbers) or max(abs(start), abs(int(whole[-1]))) >= _EXACT:
            return None
        line = start + step * torch.arange(len(whole))
        return _Progression(spread[0], start, step) if torch.equal(whole, line) else None


def _difference(op: Operation, one: _Progression, other: _Progression, shape: tuple[int, ...]) -> torch.Tensor | None:
    """An operation on a number for each row and one for each column, if only their difference counts."""
    sign = 1 if op.name in ("cirh.Sub", "cirh.Compare") else -1 if op.name == "cirh.Add" else 0
    if not sign or {one.dim, other.dim} != {0, 1} or one.step != sign * other.step:
        return None
    dtype = types.dtype(op.operands[0])
    if dtype not in (torch.float32, torch.float64, torch.int32, torch.int64):
        return None
    distances = torch.arange(1 - shape[1], shape[0])
    numbers = one.start + (one.step if one.dim == 0 else -one.step) * distances
    made: torch.Tensor = build(op).function(numbers.to(dtype), torch.full_like(distances, other.start).to(dtype))
    return made


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
        self._diagonals = Diagonals(self._values)
        self._found: dict[tuple[SSAValue, bool, bool], Effect | None] = {}

    def effect(self, mask: Mask) -> Effect | None:
        """The effect of a mask; None if it depends on the step, or is too much work."""
        source = unbroadcast(mask.value)
        key = (source, mask.fill is None, mask.shows)
        if key not in self._found:
            self._found[key] = self._effect(mask, source)
        return self._found[key]

    def _effect(self, mask: Mask, source: SSAValue) -> Effect | None:
        diagonals = self._diagonals.get(source)
        if diagonals is not None:
            return _effect_of_diagonals(mask, diagonals, types.shape(source))
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


def _effect_of_diagonals(mask: Mask, diagonals: torch.Tensor, shape: tuple[int, ...]) -> Effect:
    queries, keys = shape
    hidden = mask.hides(diagonals)
    later = torch.arange(1 - keys, queries) < 0
    is_causal = queries == keys and torch.equal(hidden, later)
    # The keys of a query are `keys` diagonals in a row, and the last one is that of its first key.
    shown = torch.cat([torch.zeros(1, dtype=torch.int64), (~hidden).cumsum(0)])
    return Effect(
        is_causal=is_causal and not (mask.fill is None and bool(diagonals[~hidden].any())),
        hides_rows=bool((shown[keys:] == shown[:-keys]).any()),
    )


def unbroadcast(value: SSAValue) -> SSAValue:
    """The value before it was broadcast."""
    owner = value.owner
    return owner.operands[0] if isinstance(owner, Operation) and owner.name == "cirh.BroadcastInDim" else value
