"""Replicated values of which a wafer needs the part that belongs to its samples: made anew, at the size of a part.

A number that is broadcast to the batch, and what is computed from such, has the same elements for every sample, so that
a wafer can make its part without knowing which one it is. The rules say of which parts of its operands an operation
makes the part that is wanted. Random numbers differ: a wafer draws those at the places of its samples, for which it
must know its number. So it must to cut its part out of a value of which nothing but the whole can be made.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Attribute, Block, Operation, OpResult, SSAValue

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.sharding.rules.rule import Decompose, Outcome, Placement, Query, R
from appliance.compiler.sharding.rules.shape import reshaped_dim
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import SplatAttr, attribute, attrs
from waferbox.cirh.dialect.operations import Const, func_of
from waferbox.cirh.modules.graph import add_wafers, signature
from waferbox.cirh.table.lookup import SEGMENTS, site_of, spec

# How many operations may be made anew for one part.
_DEEPEST: Final = 32


class Parts:
    """Operations that make parts, each behind the one that makes the whole."""

    def __init__(self, module: ModuleOp, num_parts: int, by_rule: Callable[[Query], Outcome]) -> None:
        self._module = module
        self._num_parts = num_parts
        self._by_rule = by_rule
        self._made: dict[tuple[SSAValue, Placement], SSAValue] = {}
        self.outcomes: dict[Operation, Outcome] = {}

    def part(
        self, value: SSAValue, want: Placement, is_replicated: Callable[[SSAValue], bool], depth: int = 0
    ) -> SSAValue | None:
        """The value whose wafer-sized version is the wanted part; None if only a slice would be it.

        is_replicated: whether a value is computed from replicated ones alone.
        """
        owner = value.owner
        if isinstance(owner, Const):
            # Of a constant of one value, a part is made where it is read.
            return value if isinstance(owner.value, SplatAttr) else None
        if isinstance(owner, Block) or depth > _DEEPEST or not is_replicated(value):
            return None
        made = self._made.get((value, want))
        # What nothing reads any more was dropped.
        if made is None or made.owner.parent_block() is None:
            self._made.pop((value, want), None)
            if spec(owner.name).random:
                self._made[value, want] = self._drawn(owner, want)
                return self._made[value, want]
            for outcome in self._ways(owner, _index(value), want):
                operands = []
                for operand, wanted in zip(owner.operands, outcome.wants, strict=True):
                    part = self.part(operand, wanted, is_replicated, depth + 1) if wanted.is_sharded else operand
                    if part is None:
                        break
                    operands.append(part)
                else:
                    copy = self._copy(owner, operands)
                    self.outcomes[copy] = outcome
                    self._made.update(
                        ((whole, placement), made)
                        for whole, placement, made in zip(owner.results, outcome.results, copy.results, strict=True)
                    )
                    break
        return self._made.get((value, want))

    def cut(self, op: Operation, index: int, want: Placement) -> None:
        """Makes an operand that is whole to be the wanted part: every wafer cuts it out of the whole value."""
        value, rewriter = op.operands[index], Rewriter(op)
        shape, dtype = types.info(value)
        block = shape[want.dim] // (want.outer * self._num_parts)
        split = (*shape[: want.dim], want.outer, self._num_parts, block, *shape[want.dim + 1 :])
        (blocks,) = rewriter.emit("cirh.Reshape", [value], types=[types.tensor_type(split, dtype)])
        (picked,) = rewriter.emit("aten.index_select", [blocks, self.wafers()], {"dim": want.dim + 1})
        (op.operands[index],) = rewriter.emit("cirh.Reshape", [picked], types=[types.tensor_type(shape, dtype)])

    def _drawn(self, op: Operation, want: Placement) -> SSAValue:
        """The same random numbers, of which each wafer draws its own."""
        *segments, _ = site_of(op).segments
        more = {"part": attribute([want.dim, want.outer, self._num_parts]), SEGMENTS: attribute([*segments, 1])}
        return self._copy(op, [*op.operands, self.wafers()], more).results[0]

    def wafers(self) -> SSAValue:
        """The argument that holds the numbers of all wafers, of which each has its own."""
        known = signature(self._module).wafers
        return add_wafers(self._module, self._num_parts) if known is None else func_of(self._module).block.args[known]

    def _copy(self, op: Operation, operands: list[SSAValue], more: Mapping[str, Attribute] | None = None) -> Operation:
        copy = type(op).create(
            operands=operands,
            result_types=[result.type for result in op.results],
            attributes={**op.attributes, **(more or {})},
            location=op.location,
        )
        block = op.parent_block()
        assert block is not None
        block.insert_op_after(copy, op)
        return copy

    def _ways(self, op: Operation, result: int, want: Placement) -> Iterator[Outcome]:
        """Outcomes of the operation with the wanted part as a result, from replicated operands and parts of them."""
        for index, placement in self._starts(op, result, want):
            if placement is None:
                yield Outcome(wants=[R] * len(op.operands), results=[want])
                continue
            placements = [placement if i == index else R for i in range(len(op.operands))]
            try:
                outcome = self._by_rule(Query(op, placements, self._num_parts))
            except (CompileError, Decompose):
                continue
            whole_or_part = not any(wanted.is_partial for wanted in outcome.wants)
            if whole_or_part and outcome.results[result] == want:
                yield outcome

    def _starts(self, op: Operation, result: int, want: Placement) -> Iterator[tuple[int, Placement | None]]:
        """Operands with the cuts that might lead to the wanted one; None: the operand may stay whole."""
        if op.name == "cirh.BroadcastInDim":
            dims = attrs(op)["broadcast_dimensions"]
            assert isinstance(dims, list)
            if want.dim not in dims or types.shape(op.operands[0])[dims.index(want.dim)] == 1:
                yield 0, None
                return
        for index, operand in enumerate(op.operands):
            shape = types.shape(operand)
            if op.name == "cirh.Reshape":
                moved = reshaped_dim(want, types.shape(op.results[result]), shape, self._num_parts)
                if moved is not None:
                    yield index, moved
                continue
            for dim, size in enumerate(shape):
                if size % (want.outer * self._num_parts) == 0:
                    yield index, want.at(dim)


def _index(value: SSAValue) -> int:
    assert isinstance(value, OpResult)
    return value.index


# --- All-gather: every wafer gets the whole of a value of which it has a part -----------------------------------------
#
# Each wafer writes its part into zeros of the size of the whole, at the place that its number says. The sum of these is
# the whole: SwarmX adds them up and sends the sum back, as it does with every partial value. Zeros change no number.


class Gathers:
    """Whole values, each made behind the one that is cut, and once for all who read it."""

    def __init__(self, module: ModuleOp, num_parts: int, wafers: Callable[[], SSAValue]) -> None:
        """wafers: gives the argument of wafer numbers."""
        self._module = module
        self._num_parts = num_parts
        self._wafers = wafers
        self._made: dict[tuple[SSAValue, Placement], SSAValue] = {}

    def whole(self, value: SSAValue, cut: Placement, reader: Operation) -> SSAValue:
        """The value that is partial, and whole when it is reduced. `reader` is the first that asked for it."""
        made = self._made.get((value, cut))
        # What nothing reads any more was dropped.
        if made is None or made.owner.parent_block() is None:
            made = self._made[value, cut] = self._make(value, cut, reader)
        return made

    def _make(self, value: SSAValue, cut: Placement, reader: Operation) -> SSAValue:
        owner = value.owner
        behind = func_of(self._module).block.first_op if isinstance(owner, Block) else owner.next_op
        assert behind is not None, "a value is read by something"
        rewriter = Rewriter(behind, reader.location)
        shape, dtype = types.info(value)
        block = shape[cut.dim] // (cut.outer * self._num_parts)
        apart = (*shape[: cut.dim], cut.outer, self._num_parts, block, *shape[cut.dim + 1 :])
        (parts,) = rewriter.emit("cirh.Reshape", [value], types=[types.tensor_type(apart, dtype)])
        zeros = rewriter.splat(0, apart, dtype)
        (placed,) = rewriter.emit("aten.index_add", [zeros, self._wafers(), parts], {"dim": cut.dim + 1})
        return rewriter.emit("cirh.Reshape", [placed], types=[types.tensor_type(shape, dtype)])[0]
