"""Computes a kernel in slices of a row: blocks of its first dimension behind the samples, one after the other.

A long row, such as one of 131,072 tokens, has intermediate values for which a wafer has no room. Most operations of a
layer are independent along its tokens: products with weights, norms, activation functions. The sharding rules, which
divide a batch over wafers, say which: here they divide the tokens, over time.

Operations that can be divided form regions, in which a slice goes through all operations before the next slice does. So
the values inside a region exist for one slice only. Between the regions are operations that need all tokens, such as
attention. Values that these read are joined. Sums over tokens, such as gradients of weights, are added slice by slice.
The result is an ordinary kernel: it cuts, computes and joins slices by operations of CIRH.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.errors import refuse
from appliance.compiler.partition.shared_keys import share_keys
from appliance.compiler.passes.dce import eliminate_dead_code
from appliance.compiler.sharding.propagate import by_rule
from appliance.compiler.sharding.rules.rule import SUM, Decompose, Mixes, Outcome, Placement, Query, R, sharded
from appliance.compiler.sharding.rules.shape import reshaped_dim
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue, SplatAttr, attrs, dense
from waferbox.cirh.dialect.operations import Const, body_ops, func_of, return_of
from waferbox.cirh.dialect.spec import Typed
from waferbox.cirh.execution.memory_reuse import let_reuse_memory, reuses_memory
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.table.lookup import spec

# Sums of halves are not exact enough to be added to in each slice.
_EXACT_BYTES: Final = 4
# These need no memory of their own, so their results are made from whole operands where they are needed whole.
_MOVES: Final = frozenset({"cirh.Reshape", "cirh.BroadcastInDim", "cirh.Transpose"})
# These take too long to be repeated in a later region.
_SLOW: Final = frozenset(
    [f"cirh.{name}" for name in ("MatMul", "DotGeneral", "Attention", "AttentionGrad", "LinearCrossEntropyGrad")]
    + [f"aten.{name}" for name in ("addmm", "baddbmm", "bmm", "convolution", "convolution_backward", "mm")]
)


def compute_in_slices(
    module: ModuleOp, rows: Mapping[int, int], most: int, *, attends: bool = False
) -> ModuleOp | None:
    """Makes a kernel that computes in slices what another computes at once, up to the order of additions.

    Args:
        module: the other kernel. It changes if causal attention is divided.
        rows: by number of an argument that has rows of the batch in its first dimension, how many.
        most: the most slices of a row; of fewer that divide its tokens, the largest number is taken.
        attends: whether causal attention is divided, too, along its queries; heads then share their keys.

    Returns:
        The kernel; None if no operation can be divided so.
    """
    if attends:
        share_keys(module)
    found: dict[SSAValue, tuple[int, Placement]] = {}
    for index, count in rows.items():
        argument = func_of(module).block.args[index]
        # Others, such as the number of a part of the batch, are no rows.
        if types.nbytes(argument) and types.shape(argument)[0] % count == 0:
            found[argument] = _tokens(argument, count)
    nbytes: Counter[int] = Counter()
    for value, (tokens, _) in found.items():
        nbytes[tokens] += types.nbytes(value)
    tokens = max(nbytes, key=lambda number: nbytes[number], default=1)
    num_slices = next((count for count in range(most, 1, -1) if tokens % count == 0), 1)
    if num_slices == 1:
        return None
    cut = {value: placement for value, (number, placement) in found.items() if number == tokens}
    stages = _Stages(module, cut, num_slices, attends=attends)
    if not stages.outcomes:
        return None
    made = _Builder(module, stages, num_slices).build()
    if reuses_memory(module):
        let_reuse_memory(made)
    return made


def _tokens(value: SSAValue, rows: int) -> tuple[int, Placement]:
    """The tokens of a row, and the placement in which they are cut: behind the rows, or in one dimension with them."""
    first, *rest = types.shape(value)
    return (first // rows, sharded(0, rows)) if first > rows or not rest else (rest[0], sharded(1))


# --- Stages -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Reader:
    """An operation that reads a value: its stage, and the placement that it needs."""

    stage: int
    want: Placement


class _Stages:
    """The stages of a kernel: even ones compute all tokens at once, odd ones are regions.

    An operation is in the latest stage that needs no more memory between the stages. One that takes little time may be
    in several regions, instead of being kept from the first to the last.

    Attributes:
        stages: by stage, its operations in order.
        outcomes: the placements of each operation of the regions.
        placements: by value, its placement where it is made; or, of a value that is made whole, the one in which it is
            offered to the regions.
        sums: by value that is a sum over slices of queries, and has rows of tokens: the placement in which it is
            offered to later regions.
        readers: by value, its readers.
    """

    def __init__(self, module: ModuleOp, cut: Mapping[SSAValue, Placement], num_slices: int, *, attends: bool) -> None:
        self._num_slices = num_slices
        self._attends = attends
        self._ops = [op for op in body_ops(module) if not isinstance(op, Const)]
        self._returned = set(return_of(module).operands)
        self._cut = cut
        self._undivided: set[Operation] = set()
        self._earliest: dict[Operation, int] = {}
        self.outcomes: dict[Operation, Outcome] = {}
        self.placements: dict[SSAValue, Placement] = {}
        self.sums: dict[SSAValue, Placement] = {}
        while not (self._place() and self._find_earliest()):
            pass
        self._kept_bytes = self._find_kept_bytes()
        self.readers: dict[SSAValue, list[_Reader]] = defaultdict(list)
        self.stages = self._find_stages()

    def wants(self, op: Operation) -> Sequence[Placement]:
        """The placements of an operation's operands."""
        outcome = self.outcomes.get(op)
        return [R] * len(op.operands) if outcome is None else outcome.operands

    # --- Which operations are divided

    def _place(self) -> bool:
        """Places all values. Returns whether no operation turned out to be undivided."""
        self.outcomes.clear()
        self.sums.clear()
        self.placements = dict(self._cut)
        for op in self._ops:
            outcome = None if op in self._undivided else self._outcome(op)
            if outcome is not None:
                self.outcomes[op] = outcome
                self.placements.update(zip(op.results, outcome.results, strict=True))
                if outcome.position:
                    self.sums.update((v, p) for v, p in self._offered(op) if self.placements[v] == SUM)
            else:
                self.placements.update(self._offered(op))
        self._divide_wanted()
        # Sums in half precision may only lead to sums in float32.
        read_whole = {
            operand
            for op in self._ops
            for operand, want in zip(op.operands, self.wants(op), strict=True)
            if not want.is_partial
        }
        inexact = {
            op
            for op in self.outcomes
            for result in op.results
            if self.placements[result].is_partial
            and types.dtype(result).itemsize < _EXACT_BYTES
            and (result in read_whole or result in self._returned)
        }
        self._undivided |= inexact
        return not inexact

    def _outcome(self, op: Operation) -> Outcome | None:
        """The placements of an operation that is divided; None if it is not."""
        have = [self.sums.get(operand, self.placements.get(operand, R)) for operand in op.operands]
        if spec(op.name).random or all(placement == R for placement in have):
            return None
        outcome = self._by_rule(op, have)
        if outcome is None:
            # The tokens of one operand may be independent if the others have all of theirs, as queries of attention.
            first = next((index for index, placement in enumerate(have) if placement.is_sharded), None)
            outcome = self._by_rule(op, [have[i] if i == first else R for i in range(len(have))])
        if outcome is None:
            return None
        is_divided = all(placement.is_sharded or placement == SUM for placement in outcome.results)
        # A value that is cut differently, or a part of a sum that is not there, cannot be had.
        can_be_had = all(
            want in (R, placement) or (placement == R and self._can_be_cut(operand, want))
            for operand, placement, want in zip(op.operands, have, outcome.operands, strict=True)
        )
        return outcome if is_divided and can_be_had else None

    def _can_be_cut(self, value: SSAValue, placement: Placement) -> bool:
        if not placement.is_sharded:
            return False
        return types.shape(value)[placement.dim] % (placement.outer * self._num_slices) == 0

    def _by_rule(self, op: Operation, have: Sequence[Placement]) -> Outcome | None:
        """The outcome by the rule of an operation; None if its rule does not hold."""
        try:
            return by_rule(Query(op, have, self._num_slices, over_time=self._attends))
        except (Mixes, Decompose):
            return None

    def _divide_wanted(self) -> None:
        """Divides operations on values without tokens, of which the regions read slices.

        A mask of all scores, for example, is computed from the positions of tokens.
        """
        wanted: dict[SSAValue, set[Placement]] = defaultdict(set)
        for op in reversed(self._ops):
            if op not in self.outcomes and len(op.results) == 1 and len(wanted[op.results[0]]) == 1:
                outcome = self._outcome_of_wanted(op, *wanted[op.results[0]])
                if outcome is not None:
                    self.outcomes[op] = outcome
                    self.placements[op.results[0]] = outcome.results[0]
            for operand, want in zip(op.operands, self.wants(op), strict=True):
                if want.is_sharded and operand not in self.placements:
                    wanted[operand].add(want)

    def _outcome_of_wanted(self, op: Operation, want: Placement) -> Outcome | None:
        """The placements of an operation on whole values of whose result slices are wanted; None if it has no such."""
        (result,) = op.results
        if op in self._undivided or spec(op.name).random or any(operand in self.placements for operand in op.operands):
            return None
        shape = types.shape(result)
        needs: list[Placement | None] = [want if types.shape(operand) == shape else R for operand in op.operands]
        if op.name == "cirh.Reshape":
            needs = [reshaped_dim(want, shape, types.shape(op.operands[0]), self._num_slices)]
        given = [need for need in needs if need is not None]
        outcome = self._by_rule(op, given) if len(given) == len(needs) and any(p.is_sharded for p in given) else None
        is_wanted = outcome is not None and list(outcome.operands) == given and outcome.results[0] == want
        return outcome if is_wanted else None

    def _offered(self, op: Operation) -> Iterator[tuple[SSAValue, Placement]]:
        """The results of an operation that is not divided, whose readers may be: they have the shape of a cut operand.

        Attention needs all tokens, but each of its results has rows of them.
        """
        for result in op.results:
            for operand in op.operands:
                placement = self.placements.get(operand, R)
                if placement.is_sharded and types.shape(operand) == types.shape(result):
                    yield result, placement
                    break

    # --- Stages

    def _find_earliest(self) -> bool:
        """Finds the earliest stage of each operation. Returns whether no operation turned out to be undivided."""
        self._earliest.clear()
        for op in self._ops:
            stage = 1 if op in self.outcomes else 0
            for operand, want in zip(op.operands, self.wants(op), strict=True):
                maker = operand.owner
                if isinstance(maker, Operation) and not isinstance(maker, Const):
                    first = self._earliest[maker] + (0 if self._in_place(maker, op, operand, want) else 1)
                    stage = max(stage, first + (first - stage) % 2)
            self._earliest[op] = stage
        # A sum whose parts are read by another region would have to be kept for each slice.
        apart = {
            op
            for op in self.outcomes
            for operand, want in zip(op.operands, self.wants(op), strict=True)
            if want.is_partial and self._earliest[_maker(operand)] != self._earliest[op]
        }
        self._undivided |= apart
        return not apart

    def _in_place(self, maker: Operation, reader: Operation, value: SSAValue, want: Placement) -> bool:
        """Whether a value can be read in the stage in which it is made."""
        if maker not in self.outcomes or reader not in self.outcomes:
            return maker not in self.outcomes and reader not in self.outcomes
        return want == self.placements[value]

    def _find_stages(self) -> dict[int, list[Operation]]:
        stages: dict[int, list[Operation]] = defaultdict(list)
        for op in reversed(self._ops):
            for stage in self._stages_of(op):
                stages[stage].append(op)
                for operand, want in zip(op.operands, self.wants(op), strict=True):
                    self.readers[operand].append(_Reader(stage, want))
        return {stage: ops[::-1] for stage, ops in sorted(stages.items())}

    def _stages_of(self, op: Operation) -> list[int]:
        """The stages of an operation whose readers have theirs."""
        limits = sorted({self._latest(op, value, reader) for value in op.results for reader in self.readers[value]})
        outcome = self.outcomes.get(op)
        placements = [] if outcome is None else [*outcome.operands, *outcome.results]
        if any(value in self._returned for value in op.results) or any(p.is_partial for p in placements):
            return [self._earliest[op]]
        if not limits:
            return []
        first, *later = limits
        stages = [first if self._is_lighter(op, first) else self._earliest[op]]
        if outcome is not None and op.name not in _SLOW and not self._is_read_whole(op):
            stages += [stage for stage in later if self._is_lighter(op, stage)]
        return stages

    def _latest(self, op: Operation, value: SSAValue, reader: _Reader) -> int:
        """The latest stage of an operation for a reader of its result."""
        stage = reader.stage
        if op in self.outcomes:
            return stage if stage % 2 and reader.want == self.placements[value] else stage - 2 + (stage + 1) % 2
        return stage - stage % 2

    def _is_read_whole(self, op: Operation) -> bool:
        return any(reader.want == R for value in op.results for reader in self.readers[value])

    def _is_lighter(self, op: Operation, stage: int) -> bool:
        """Whether it takes no more memory to keep what the operation reads until a stage than what it makes."""
        kept = sum(
            self._kept_bytes[operand]
            for operand in dict.fromkeys(op.operands)
            if operand in self._kept_bytes
            and self._earliest[_maker(operand)] < stage
            and not any(reader.stage >= stage for reader in self.readers[operand])
        )
        return kept <= sum(map(types.nbytes, op.results))

    def _find_kept_bytes(self) -> dict[SSAValue, int]:
        """By value, the bytes kept for a reader in a later stage: its own, or those from which it is made again."""
        kept: dict[SSAValue, int] = {}
        for op in self._ops:
            needed = sum(kept.get(operand, 0) for operand in dict.fromkeys(op.operands))
            is_repeated = op.name in _MOVES or (op in self.outcomes and op.name not in _SLOW)
            for value in op.results:
                kept[value] = min(needed, types.nbytes(value)) if is_repeated else types.nbytes(value)
        return kept


def _maker(value: SSAValue) -> Operation:
    assert isinstance(value.owner, Operation)
    return value.owner


# --- The kernel -------------------------------------------------------------------------------------------------------


class _Builder:
    """Builds the kernel of some stages. Used once."""

    def __init__(self, module: ModuleOp, stages: _Stages, num_slices: int) -> None:
        self._module = module
        self._stages = stages
        self._num_slices = num_slices
        self._builder = GraphBuilder()
        self._first = {op: stage for stage, ops in reversed(stages.stages.items()) for op in ops}
        self._joined = self._find_joined()
        self._whole: dict[SSAValue, SSAValue] = {}
        self._slices: dict[SSAValue, list[SSAValue]] = defaultdict(list)  # of values that another stage reads

    def build(self) -> ModuleOp:
        for argument in func_of(self._module).block.args:
            self._whole[argument] = self._builder.argument(types.tensor_type(*types.info(argument)))
        for stage, ops in self._stages.stages.items():
            if stage % 2:
                self._region(stage, ops)
            else:
                for op in ops:
                    self._compute_whole(op)
        results = [self._at_once(value) for value in return_of(self._module).operands]
        module = self._builder.finish([(value, None) for value in results])
        eliminate_dead_code(module)
        return module

    def _find_joined(self) -> set[SSAValue]:
        """Values of the regions that are needed whole, by themselves or as the origin of moved elements."""
        joined = set()
        returned = return_of(self._module).operands
        for value in dict.fromkeys((*self._stages.readers, *returned)):
            if value in returned or any(reader.want == R for reader in self._stages.readers[value]):
                while (move := self._move_of(value)) is not None:
                    value = move.operands[0]
                if value.owner in self._stages.outcomes:
                    joined.add(value)
        return joined

    def _move_of(self, value: SSAValue) -> Operation | None:
        """The operation of a region that makes a value by moving elements alone; None if another one makes it."""
        op = value.owner
        if not isinstance(op, Operation) or op not in self._stages.outcomes or op.name not in _MOVES:
            return None
        return op if types.nbytes(op.operands[0]) <= types.nbytes(value) else None

    # --- Stages

    def _region(self, stage: int, ops: Sequence[Operation]) -> None:
        first = [op for op in ops if self._first[op] == stage]
        kept = {value for op in first for value in op.results if value in self._joined or self._is_read_later(value)}
        for number in range(self._num_slices):
            # The values of this slice, by the value in the module and its placement.
            local: dict[tuple[SSAValue, Placement], SSAValue] = {}
            for op in ops:
                outcome = self._stages.outcomes[op]
                operands = [
                    self._at_once(operand) if want == R else self._slice(operand, want, number, local)
                    for operand, want in zip(op.operands, outcome.operands, strict=True)
                ]
                results = self._copy(op, operands, outcome, number)
                for value, placement, result in zip(op.results, outcome.results, results, strict=True):
                    local[value, placement] = result
                    if value in kept and placement.is_partial:
                        total = self._whole.get(value)
                        self._whole[value] = result if total is None else self._sum(total, result)
                    elif value in kept:
                        self._slices[value].append(result)
        for value in [value for op in first for value in op.results if value in self._joined and value in self._slices]:
            self._whole[value] = self._join(self._slices.pop(value), self._stages.placements[value])

    def _sum(self, total: SSAValue, part: SSAValue) -> SSAValue:
        """A sum with a further part. A product is added while it is made, so that it needs no memory of its own."""
        product = part.owner
        if isinstance(product, Operation) and product.name == "cirh.MatMul":
            factors = [self._factor(product, index) for index in (0, 1)]
            return self._emit("aten.addmm", [total, *factors], {"alpha": 1, "beta": 1})
        return self._emit("cirh.Add", [total, part])

    def _factor(self, product: Operation, index: int) -> SSAValue:
        """A factor of a product, in the order in which it is multiplied."""
        value = product.operands[index]
        if not attrs(product).get("transpose_b" if index else "transpose_a", False):
            return value
        permutation = self._builder.constant(dense(torch.tensor([1, 0])))
        return self._emit("cirh.Transpose", [value, permutation])

    def _is_read_later(self, value: SSAValue) -> bool:
        """Whether a region that does not make a value itself reads slices of it."""
        made = [stage for stage, ops in self._stages.stages.items() if value.owner in ops]
        return any(reader.want != R and reader.stage not in made for reader in self._stages.readers[value])

    def _compute_whole(self, op: Operation) -> None:
        results = self._copy(op, [self._at_once(operand) for operand in op.operands], None)
        self._whole.update(zip(op.results, results, strict=True))

    # --- Values

    def _at_once(self, value: SSAValue) -> SSAValue:
        """A value of all tokens."""
        if isinstance(value.owner, Const):
            return self._builder.constant(value.owner.value)
        if value not in self._whole:
            move = self._move_of(value)
            assert move is not None, "values that are needed whole are joined"
            self._compute_whole(move)
        return self._whole[value]

    def _slice(
        self, value: SSAValue, want: Placement, number: int, local: dict[tuple[SSAValue, Placement], SSAValue]
    ) -> SSAValue:
        """The slice of a value with this number."""
        if (value, want) not in local:
            local[value, want] = self._cut(value, want, number, local)
        return local[value, want]

    def _cut(
        self, value: SSAValue, want: Placement, number: int, local: dict[tuple[SSAValue, Placement], SSAValue]
    ) -> SSAValue:
        owner, shape = value.owner, types.shape(value)
        size = shape[want.dim] // (want.outer * self._num_slices)
        if isinstance(owner, Const) and isinstance(owner.value, SplatAttr):
            return self._builder.splat(owner.value.value, self._local_shape(value, want), types.dtype(value))
        if value in self._slices and self._stages.placements[value] == want:
            return self._slices[value][number]
        if isinstance(owner, Operation) and owner.name == "cirh.BroadcastInDim" and owner not in self._stages.outcomes:
            return self._broadcast(owner, want, number, local)
        whole = self._at_once(value)
        if want.outer == 1:
            return self._cut_dimension(whole, want.dim, number * size, size)
        blocks = (*shape[: want.dim], want.outer, shape[want.dim] // want.outer, *shape[want.dim + 1 :])
        cut = self._cut_dimension(self._reshape(whole, blocks), want.dim + 1, number * size, size)
        return self._reshape(cut, self._local_shape(value, want))

    def _broadcast(
        self, op: Operation, want: Placement, number: int, local: dict[tuple[SSAValue, Placement], SSAValue]
    ) -> SSAValue:
        """A slice of a value that is broadcast, which is made of its operand."""
        (operand,), (result,) = op.operands, op.results
        dims = attrs(op)["broadcast_dimensions"]
        assert isinstance(dims, list)
        sources = [dim for dim, target in enumerate(dims) if target == want.dim and types.shape(operand)[dim] > 1]
        cut = self._slice(operand, want.at(sources[0]), number, local) if sources else self._at_once(operand)
        type = types.tensor_type(self._local_shape(result, want), types.dtype(result))
        return self._builder.op(op.name, [cut], attrs(op), op.location, types=[type])[0]

    def _cut_dimension(self, value: SSAValue, dim: int, start: int, size: int) -> SSAValue:
        place = {"dim": dim, "start": start, "end": start + size, "step": 1}
        return self._emit("aten.slice.Tensor", [value], place)

    def _join(self, slices: Sequence[SSAValue], cut: Placement) -> SSAValue:
        if cut.outer == 1:
            return self._emit("cirh.Concat", slices, {"axis": cut.dim})
        shape = types.shape(slices[0])
        before, size, behind = shape[: cut.dim], shape[cut.dim], shape[cut.dim + 1 :]
        blocks = [self._reshape(value, (*before, cut.outer, size // cut.outer, *behind)) for value in slices]
        joined = self._emit("cirh.Concat", blocks, {"axis": cut.dim + 1})
        return self._reshape(joined, (*before, size * self._num_slices, *behind))

    # --- Operations

    def _copy(
        self, op: Operation, operands: Sequence[SSAValue], outcome: Outcome | None, number: int = 0
    ) -> tuple[SSAValue, ...]:
        """Adds an operation with other operands. outcome: the placements of slice `number`; None: for all tokens."""
        placements = [R] * len(op.results) if outcome is None else outcome.results
        given = [
            types.tensor_type(self._local_shape(value, placement), types.dtype(value))
            for value, placement in zip(op.results, placements, strict=True)
        ]
        attributes: dict[str, AttrValue] = {**attrs(op), **({} if outcome is None else outcome.attributes)}
        if outcome is not None and outcome.position:
            cut = outcome.results[0]
            attributes[outcome.position] = number * types.shape(given[0])[cut.dim]
        typed = spec(op.name).typed is not Typed.NEVER
        results = self._builder.op(op.name, operands, attributes, op.location, types=given if typed else None)
        for result, expected in zip(results, given, strict=True):
            if result.type != expected:
                made, wanted = types.type_text(result), types.type_text(expected)
                raise refuse(op, f"makes {made} of a slice instead of {wanted}", "use shorter rows")
        return results

    def _emit(
        self, name: str, operands: Sequence[SSAValue], attributes: Mapping[str, AttrValue] | None = None
    ) -> SSAValue:
        return self._builder.op(name, operands, attributes)[0]

    def _reshape(self, value: SSAValue, shape: Sequence[int]) -> SSAValue:
        return self._builder.op("cirh.Reshape", [value], types=[types.tensor_type(shape, types.dtype(value))])[0]

    def _local_shape(self, value: SSAValue, placement: Placement) -> tuple[int, ...]:
        return placement.local_shape(types.shape(value), self._num_slices)
