"""Makes a part of a replicated value (`Parts`), and the whole of a sharded one (`Gathers`).

A value that is broadcast to the batch, and values computed from it, have the same elements for every sample, so a wafer
can make its part without its number. The sharding rules give the parts of the operands from which an operation makes
the needed part. Two cases need the number of the wafer: random numbers, which a wafer draws at the positions of its
samples, and a slice of a value that can only be made whole.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Attribute, Block, Operation, OpResult, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.sharding.rules.rule import Decompose, Mixes, Outcome, Placement, Query, R
from appliance.compiler.sharding.rules.shape import reshaped_dim
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import SplatAttr, attribute, attrs
from waferbox.cirh.dialect.operations import Const, func_of
from waferbox.cirh.modules.graph import add_wafers, signature
from waferbox.cirh.table.lookup import SEGMENTS, site_of, spec

# The longest chain of operations that is copied for a part: bounds the search, which tries several ways for each.
_DEEPEST: Final = 32


class Parts:
    """Copies of operations that make parts, each inserted behind the operation that makes the whole."""

    def __init__(self, module: ModuleOp, num_parts: int, by_rule: Callable[[Query], Outcome]) -> None:
        """by_rule: applies the sharding rule of an operation."""
        self._module = module
        self._num_parts = num_parts
        self._by_rule = by_rule
        self._made: dict[tuple[SSAValue, Placement], SSAValue] = {}
        self.outcomes: dict[Operation, Outcome] = {}

    def part(
        self, value: SSAValue, want: Placement, is_replicated: Callable[[SSAValue], bool], depth: int = 0
    ) -> SSAValue | None:
        """Makes a part of a replicated value.

        Args:
            value: the whole value.
            want: the placement of the part.
            is_replicated: whether a value is replicated.
            depth: number of operations between the part that was asked for and this one.

        Returns:
            A value whose local version on a wafer is the part; None if only slicing the whole gives it.
        """
        owner = value.owner
        if isinstance(owner, Const):
            # A part of a constant of equal elements is made where it is read (`Localiser`).
            return value if isinstance(owner.value, SplatAttr) else None
        if isinstance(owner, Block) or depth > _DEEPEST or not is_replicated(value):
            return None
        made = self._made.get((value, want))
        # Dead code elimination may have removed the part since.
        if made is None or made.owner.parent_block() is None:
            self._made.pop((value, want), None)
            if spec(owner.name).random:
                self._made[value, want] = self._drawn(owner, want)
                return self._made[value, want]
            for outcome in self._ways(owner, _index(value), want):
                operands = []
                for operand, wanted in zip(owner.operands, outcome.operands, strict=True):
                    part = self.part(operand, wanted, is_replicated, depth + 1) if wanted.is_sharded else operand
                    if part is None:
                        break
                    operands.append(part)
                else:
                    copy = self.copy(owner, operands)
                    self.outcomes[copy] = outcome
                    self._made.update(
                        ((whole, placement), made)
                        for whole, placement, made in zip(owner.results, outcome.results, copy.results, strict=True)
                    )
                    break
        return self._made.get((value, want))

    def slice(self, value: SSAValue, want: Placement, rewriter: Rewriter) -> SSAValue:
        """The part of a whole value that each wafer slices out by its number."""
        shape, dtype = types.info(value)
        block = shape[want.dim] // (want.outer * self._num_parts)
        # The parts become a dimension of their own, from which each wafer picks the element of its number.
        split = (*shape[: want.dim], want.outer, self._num_parts, block, *shape[want.dim + 1 :])
        (blocks,) = rewriter.emit("cirh.Reshape", [value], types=[types.tensor_type(split, dtype)])
        (picked,) = rewriter.emit("aten.index_select", [blocks, self.wafers()], {"dim": want.dim + 1})
        return rewriter.emit("cirh.Reshape", [picked], types=[types.tensor_type(shape, dtype)])[0]

    def _drawn(self, op: Operation, want: Placement) -> SSAValue:
        """A copy of a random operation with which each wafer draws only its own part of the same numbers."""
        *segments, _ = site_of(op).segments
        more = {"part": attribute([want.dim, want.outer, self._num_parts]), SEGMENTS: attribute([*segments, 1])}
        return self.copy(op, [*op.operands, self.wafers()], more).results[0]

    def wafers(self) -> SSAValue:
        """The argument that holds the numbers of all parts; its local version is the number of the wafer's own."""
        known = signature(self._module).wafers
        return add_wafers(self._module, self._num_parts) if known is None else func_of(self._module).block.args[known]

    def copy(self, op: Operation, operands: list[SSAValue], more: Mapping[str, Attribute] | None = None) -> Operation:
        """Inserts a copy of an operation behind it. more: attributes that the copy has besides or instead."""
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
        """Outcomes of the operation that have the needed part as a result, from whole operands and parts of them."""
        for index, placement in self._starts(op, result, want):
            if placement is None:
                yield Outcome(operands=[R] * len(op.operands), results=[want])
                continue
            placements = [placement if i == index else R for i in range(len(op.operands))]
            try:
                outcome = self._by_rule(Query(op, placements, self._num_parts))
            except (Mixes, Decompose):
                continue
            # A partial operand would need a reduction, which costs more than slicing the whole value.
            whole_or_part = not any(wanted.is_partial for wanted in outcome.operands)
            if whole_or_part and outcome.results[result] == want:
                yield outcome

    def _starts(self, op: Operation, result: int, want: Placement) -> Iterator[tuple[int, Placement | None]]:
        """Operands with the placements that may lead to the needed one; None: the operand may stay whole."""
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


# --- Gathering --------------------------------------------------------------------------------------------------------
#
# Each wafer writes its part into zeros of the full size, at the position of its number. The sum of these is the whole
# value, so an all-gather is a reduction like any other and needs no message of its own. Adding zeros is exact.

# Operations that move or repeat the elements of their first operand.
_MOVES: Final = frozenset({"cirh.Reshape", "cirh.BroadcastInDim", "cirh.Transpose", "cirh.Cast"})
# An annotation of the operation that places the rows: the reason for which they are gathered.
GATHERED: Final = "wafer.gathered"


class Gathers:
    """Whole values of sharded ones, each made once, behind the sharded value; and parts of values that are whole."""

    def __init__(self, module: ModuleOp, num_parts: int, parts: Parts) -> None:
        self._module = module
        self._num_parts = num_parts
        self._parts = parts
        self._made: dict[tuple[SSAValue, Placement], SSAValue] = {}

    def cut(self, value: SSAValue, want: Placement) -> list[Operation]:
        """Makes all readers of a whole value read a part of it. Returns the new operations, in order.

        For readers that need the value whole, `whole` returns it.
        """
        owner = value.owner
        assert isinstance(owner, Operation) and owner.next_op is not None
        rewriter = Rewriter(owner.next_op, owner.location)
        part = self._parts.slice(value, want, rewriter)
        value.replace_uses_with_if(part, lambda use: use.operation not in rewriter.made)
        self._made[part, want] = value
        return rewriter.made

    def origin(self, value: SSAValue, used: Callable[[SSAValue], Placement]) -> tuple[SSAValue, list[Operation]]:
        """Returns the smallest sharded value of which only elements are moved or repeated to make this one; and how.

        For example the labels of the batch, which are broadcast to a matrix.

        Args:
            value: the sharded value.
            used: the placement in which a value is read.
        """
        origin = value
        moves: list[Operation] = []
        found: list[Operation] = []
        while isinstance(op := value.owner, Operation) and op.name in _MOVES and used(op.operands[0]).is_sharded:
            value = op.operands[0]
            found.append(op)
            if types.nbytes(value) < types.nbytes(origin):
                origin, moves = value, found[::-1]
        return origin, moves

    def whole(self, value: SSAValue, used: Callable[[SSAValue], Placement], reader: Operation, why: str) -> SSAValue:
        """Returns a partial value whose reduction is the whole value; or the whole value itself, if it was cut.

        Args:
            value: the sharded value.
            used: the placement in which a value is read.
            reader: an operation that reads it, for its location.
            why: the reason for which the reader needs the whole.
        """
        origin, moves = self.origin(value, used)
        made = self._kept(origin, used(origin))
        if made is None:
            made = self._made[origin, used(origin)] = self._make(origin, used(origin), reader, why)
        for op in moves:
            (result,) = op.results
            moved = self._kept(result, used(result))
            if moved is None:
                (moved,) = self._parts.copy(op, [made, *op.operands[1:]]).results
                self._made[result, used(result)] = moved
            made = moved
        return made

    def _kept(self, value: SSAValue, cut: Placement) -> SSAValue | None:
        """What was made of a value, unless dead code elimination has removed it since."""
        made = self._made.get((value, cut))
        return made if made is not None and made.owner.parent_block() is not None else None

    def _make(self, value: SSAValue, cut: Placement, reader: Operation, why: str) -> SSAValue:
        owner = value.owner
        behind = func_of(self._module).block.first_op if isinstance(owner, Block) else owner.next_op
        assert behind is not None, "a value is read by something"
        rewriter = Rewriter(behind, reader.location)
        shape, dtype = types.info(value)
        block = shape[cut.dim] // (cut.outer * self._num_parts)
        apart = (*shape[: cut.dim], cut.outer, self._num_parts, block, *shape[cut.dim + 1 :])
        (parts,) = rewriter.emit("cirh.Reshape", [value], types=[types.tensor_type(apart, dtype)])
        zeros = rewriter.splat(0, apart, dtype)
        (placed,) = rewriter.emit("aten.index_add", [zeros, self._parts.wafers(), parts], {"dim": cut.dim + 1})
        rewriter.made[-1].attributes[GATHERED] = StringAttr(why)
        return rewriter.emit("cirh.Reshape", [placed], types=[types.tensor_type(shape, dtype)])[0]
