"""Sharding propagation: the placement of each value of a step when the batch is divided over the wafers.

The program is written for the global batch. Inputs are sharded in dimension 0, states are replicated, and a rule for
each operation derives the placements of its results. A partial value is reduced if an operation needs it whole, as near
to its source as possible; a sharded value is gathered. The division of work and all messages follow from the result.

No rule need hold: then operands are gathered, the operation is computed whole, and its results are cut again where they
have rows of the batch. So what compiles for one wafer compiles for several.

Propagation repeats passes over the module (`_Attempt`) until nothing changes, since decisions depend on later
operations: whether a partial value must be reduced is known only at its reader, and once it is reduced the placements
of everything behind it change.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.errors import BatchError, CompileError, refuse
from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.passes.dce import eliminate_dead_code
from appliance.compiler.sharding.decompose import decompose
from appliance.compiler.sharding.parts import Gathers, Parts
from appliance.compiler.sharding.rules.pointwise import pointwise
from appliance.compiler.sharding.rules.rule import (
    ONE_WAFER,
    RULES,
    SUM,
    Decompose,
    Mixes,
    Outcome,
    Placement,
    Query,
    R,
    sharded,
)
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.elements import can_be_sent
from waferbox.cirh.dialect.operations import Const, body_ops, func_of, return_of
from waferbox.cirh.modules.graph import signature
from waferbox.cirh.table.lookup import spec


@dataclass(frozen=True, slots=True)
class Sharding:
    """The result of sharding propagation.

    Attributes:
        num_parts: parts of the batch, over wafers and micro-batches.
        batch_rows: rows of the global batch.
        placements: by value, its placement where it is made.
        outcomes: by operation, the placements that it needs and makes.
        reduced: partial values that are reduced.
        rounded: reduced values that each wafer rounds to half precision first: see `partition/precision.py`.
    """

    num_parts: int
    batch_rows: int
    placements: Mapping[SSAValue, Placement]
    outcomes: Mapping[Operation, Outcome]
    reduced: frozenset[SSAValue]
    rounded: frozenset[SSAValue]

    def used(self, value: SSAValue) -> Placement:
        """The placement in which a value is read: replicated after its reduction."""
        return R if value in self.reduced else self.placements[value]


def propagate(module: ModuleOp, num_parts: int, rounded: Collection[SSAValue] = ()) -> Sharding:
    """Places every value. Changes the module where an operation must be decomposed, or made for a part of the batch.

    Args:
        module: the step.
        num_parts: number of parts of the batch.
        rounded: partial values in half precision that are reduced as they are, although sums of rounded parts are not
            exact.

    Raises:
        CompileError: the batch cannot be divided.
    """
    rows = batch_rows(module, num_parts)
    reduced: set[SSAValue] = set()
    _check_wafers(module, num_parts)
    parts = Parts(module, num_parts, by_rule)
    gathers = Gathers(module, num_parts, parts)
    rules = _Rules()
    while True:
        attempt = _Attempt(module, num_parts, reduced, parts, gathers, rounded, rules)
        if attempt.run() and not attempt.hoist():
            if not attempt.uncut:
                return Sharding(
                    num_parts,
                    rows,
                    attempt.placements,
                    attempt.outcomes,
                    frozenset(reduced),
                    frozenset(reduced.intersection(rounded)),
                )
            # Only now is it certain that these operands cannot be made in parts: an earlier attempt might still have
            # moved a reduction. Slicing the whole value always works, but costs the whole value on each wafer.
            for op, index, want in attempt.uncut:
                op.operands[index] = parts.slice(op.operands[index], want, Rewriter(op))
            # Parts that were made on the way to a value that is sliced now have no readers.
            eliminate_dead_code(module)
            reduced.clear()


def batch_rows(module: ModuleOp, num_parts: int) -> int:
    """The rows of the global batch: dimension 0 of all inputs.

    A batch whose inputs differ in dimension 0 counts as one row, which is never divided.

    Raises:
        CompileError: the batch cannot be divided into so many parts.
    """
    arguments = func_of(module).block.args
    sizes: dict[int, str] = {}
    for argument in signature(module).inputs:
        shape, dtype = types.info(arguments[argument.argument])
        if not can_be_sent(dtype):
            raise CompileError(
                f"{argument.name} is a tensor of {dtype}, which cannot be sent to a wafer; convert it in the input_fn, "
                "as in x.to(torch.int32)"
            )
        if not shape:
            raise CompileError(f"{argument.name} has no dimensions; every tensor of a batch begins with the batch size")
        sizes.setdefault(shape[0], argument.name)
    if not sizes:
        raise CompileError("the step has no input; it must use the batch that the executor gives it")
    if len(sizes) > 1 and num_parts > 1:
        (rows, _), (others, name), *_ = sizes.items()
        raise BatchError(
            f"{name} has {others} rows, other inputs have {rows}; all tensors of a batch begin with the batch size, in "
            "which it is divided over wafers: use num_csx=1, where a batch need not be divided"
        )
    rows = 1 if len(sizes) > 1 else next(iter(sizes))
    if rows % num_parts:
        raise BatchError(
            f"a batch of {rows} samples cannot be divided evenly over num_csx={num_parts} wafers; "
            f"choose a batch size that is a multiple of {num_parts}, or another num_csx"
        )
    return rows


def _check_wafers(module: ModuleOp, num_parts: int) -> None:
    """Checks the argument of wafer numbers, which the module has if it was propagated before, for this many parts."""
    number = signature(module).wafers
    wanted = types.tensor_type((num_parts,), torch.int64)
    if number is not None and func_of(module).block.args[number].type != wanted:
        raise CompileError(f"the module's wafer numbers are not {types.type_text(wanted)}")


class _Rules:
    """Applies sharding rules. Most operations have the same operands and placements in each pass over the module."""

    def __init__(self) -> None:
        self._last: dict[Operation, tuple[tuple[SSAValue, ...], list[Placement], Outcome]] = {}

    def outcome(self, query: Query) -> Outcome:
        """The outcome by the rule of an operation; raises as `by_rule`."""
        operands, placements = tuple(query.operands), list(query.placements)
        last = self._last.get(query.op)
        if last is not None and last[:2] == (operands, placements):
            return last[2]
        outcome = by_rule(query)
        self._last[query.op] = operands, placements, outcome
        return outcome


class _Attempt:
    """One pass over the operations, with the reduced values that earlier passes found."""

    def __init__(
        self,
        module: ModuleOp,
        num_parts: int,
        reduced: set[SSAValue],
        parts: Parts,
        gathers: Gathers,
        rounded: Collection[SSAValue],
        rules: _Rules,
    ) -> None:
        self._module = module
        self._rules = rules
        self._rounded = rounded
        self._num_parts = num_parts
        self._reduced = reduced
        self._parts = parts
        self._gathers = gathers
        self._needed: set[SSAValue] = set()  # the reduced values that an operation reads whole
        self._without_rule: dict[Operation, str] = {}  # operations whose rule does not hold, and why
        self.uncut: list[tuple[Operation, int, Placement]] = []  # whole operands of which a part is needed
        self.placements: dict[SSAValue, Placement] = {}
        self.outcomes: dict[Operation, Outcome] = {}

    def run(self) -> bool:
        """Places all values. Returns whether the module and the set of reduced values stayed the same."""
        before = set(self._reduced)
        self._place_arguments()
        whole = True
        # A stack, so that the operations of a decomposition are placed next, before those that read their results.
        waiting = body_ops(self._module)[::-1]
        while waiting:
            op = waiting.pop()
            if isinstance(op, Const):
                self.placements[op.results[0]] = R
                continue
            operands = list(op.operands)
            have = [self._used(operand) for operand in operands]
            query = Query(op, have, self._num_parts)
            try:
                outcome = self._outcome(query)
            except Decompose:
                try:
                    waiting += decompose(op)[::-1]
                except Mixes as reason:
                    outcome = self._gathering(query, reason)
                else:
                    whole = False
                    continue
            same = True
            for index, want in enumerate(outcome.operands):
                if have[index] != want or operands[index] in self._reduced:
                    same = self._need(op, index, want) and same
            self.outcomes[op] = outcome
            self.placements.update(zip(op.results, outcome.results, strict=True))
            if op in self._without_rule and not same:
                waiting += self._cut_again(op, have)[::-1]
            whole = whole and same
        if not whole:
            # A value that is now read in parts may no longer be read whole, and the values of a decomposed operation
            # are gone. So the reduced values are found again from none, which is cheap.
            eliminate_dead_code(self._module)
            self._reduced.clear()
            return False
        if not self._finish():
            self._reduced.clear()
            return False
        # A value that an earlier attempt reduced may be read only in parts now, or may not be partial any more.
        self._reduced &= {value for value in self._needed if self._is_partial(value)}
        return self._reduced == before

    def _place_arguments(self) -> None:
        named = signature(self._module)
        inputs = {argument.argument for argument in named.inputs} | {named.wafers}
        for index, argument in enumerate(func_of(self._module).block.args):
            # The numbers of the parts are sharded like an input: each wafer has its own.
            self.placements[argument] = sharded(0) if index in inputs else R

    def hoist(self) -> bool:
        """Moves each reduction up to the value that became partial first. Returns whether any moved.

        Two readers of a partial value, behind different linear operations, then share one reduction. A sum of several
        partial values (tied weights) is itself the first: it has no single source. A reduction stays if moving it would
        send more bytes, or would move it before a cast to float32: halves would be added, and their sum rounded.
        """
        before = set(self._reduced)
        sources: dict[SSAValue, SSAValue] = {}
        for op in self.outcomes:
            for value in op.results:
                if not self.placements[value].is_partial:
                    continue
                parents = [operand for operand in op.operands if self._used(operand).is_partial]
                light = all(types.nbytes(parent) <= types.nbytes(value) for parent in parents)
                exact = op.name != "cirh.Cast" or self._num_parts == 1
                found = {sources[parent] for parent in parents} if light and exact else set()
                sources[value] = found.pop() if len(found) == 1 else value
        for reduced in before:
            self._reduced.discard(reduced)
            self._reduced.add(sources.get(reduced, reduced))
        return self._reduced != before

    def _used(self, value: SSAValue) -> Placement:
        return R if value in self._reduced else self.placements[value]

    def _is_replicated(self, value: SSAValue) -> bool:
        # Values that this attempt has added to the module have no placement yet.
        return value not in self._reduced and self.placements.get(value) == R

    def _is_partial(self, value: SSAValue) -> bool:
        # With one part a sharded value is whole, and a shard reads it as a reduction of one part.
        return self.placements[value].is_partial or (self._num_parts == 1 and self.placements[value].is_sharded)

    def _outcome(self, query: Query) -> Outcome:
        op = query.op
        known = self._parts.outcomes.get(op)
        if known is not None:
            return known
        # The cast back to float32 must read the sum, not the parts: it would pass a partial sum through.
        if self._rounded and any(operand in self._rounded for operand in op.operands):
            return query.replicated()
        # The rule for casts refuses to round parts of a sum, which is what a script with half gradients wants.
        if op.name == "cirh.Cast" and op.results[0] in self._rounded:
            return Outcome(operands=query.placements, results=query.placements)
        if self._num_parts > 1:
            try:
                return self._rules.outcome(query)
            except Mixes as reason:
                return self._gathering(query, reason)
        try:
            outcome = self._rules.outcome(query)
        except (Mixes, Decompose):
            return _on_one_wafer(query)
        # With all samples on one wafer nothing needs to be gathered, so a rule that does is not followed.
        fits = zip(query.placements, outcome.operands, strict=True)
        return outcome if all(have.is_sharded <= (have == want) for have, want in fits) else _on_one_wafer(query)

    def _gathering(self, query: Query, reason: Mixes) -> Outcome:
        """The outcome of an operation whose rule refuses the placements: one operand is gathered, else all are."""
        self._without_rule[query.op] = str(reason)
        cut = [index for index, placement in enumerate(query.placements) if placement != R]
        # The fewest bytes first. With one operand whole, the others may stay cut, and so may the results.
        for gathered in sorted(cut, key=lambda index: self._gathered_bytes(query.operands[index])):
            placements = [R if index == gathered else have for index, have in enumerate(query.placements)]
            try:
                return by_rule(Query(query.op, placements, self._num_parts))
            except (Mixes, Decompose):
                continue
        return query.replicated()

    def _gathered_bytes(self, value: SSAValue) -> int:
        return types.nbytes(self._gathers.origin(value, self._used)[0])

    def _cut_again(self, op: Operation, cuts: Sequence[Placement]) -> list[Operation]:
        """Cuts whole results of an operation whose operands were cut and gathered, where they have rows of the batch.

        A result has rows of the batch if it has the shape of such an operand, but for the number of rows. Without this,
        all that is computed from the result would be computed whole, too. Returns the new operations, in order.
        """
        made: list[Operation] = []
        for result in op.results:
            if self.placements[result].is_sharded:
                continue
            for operand, cut in zip(op.operands, cuts, strict=True):
                rows = _rows_like(result, operand, cut, self._num_parts) if cut.is_sharded else None
                if rows is not None:
                    made += self._gathers.cut(result, rows)
                    break
        self._place_arguments()  # of which there may be one more now: the numbers of the parts
        return made

    def _need(self, op: Operation, index: int, want: Placement) -> bool:
        """Makes an operand available in a placement. Returns False if the operation now reads another value."""
        value = op.operands[index]
        have = self._used(value)
        if have == R and want.is_sharded and self._num_parts > 1:
            part = self._parts.part(value, want, self._is_replicated)
            if part is not None:
                op.operands[index] = part
                return part is value
            # A later attempt may make it from parts, when a reduction has moved up; otherwise it is sliced in the end.
            self.uncut.append((op, index, want))
            if value in self._reduced:
                self._needed.add(value)
            return True
        if not want.is_partial and (have.is_partial or value in self._reduced):
            self._reduced.add(value)
            self._needed.add(value)
        elif have.is_sharded and have != want and self._num_parts > 1:
            # If another part of it is needed, that is cut from the whole.
            why = self._without_rule.get(op, f"{op.name} needs all samples")
            op.operands[index] = self._gathers.whole(value, self._used, op, why)
            return False
        elif have != want and not (have == R and want.is_sharded):
            raise refuse(op, f"needs an operand that is {want}, but it is {have}", ONE_WAFER)
        return True

    def _finish(self) -> bool:
        """Reduces partial results, and gathers sharded states. Returns False if the module has changed."""
        end = return_of(self._module)
        states = {state.result: state.name for state in signature(self._module).states}
        same = True
        for index, value in enumerate(end.operands):
            placement = self._used(value)
            if placement.is_sharded and index in states and self._num_parts > 1:
                line = value.owner if isinstance(value.owner, Operation) else end
                why = f"{states[index]} keeps all samples"
                end.operands[index] = self._gathers.whole(value, self._used, line, why)
                same = False
            # With one part, a sharded state is whole.
            elif placement.is_partial or value in self._reduced or (placement.is_sharded and index in states):
                self._reduced.add(value)
                self._needed.add(value)
        return same


def _rows_like(result: SSAValue, operand: SSAValue, cut: Placement, num_parts: int) -> Placement | None:
    """The placement of a result in the rows of an operand; None if it has no such rows, or they cannot be divided."""
    shape, others = types.shape(result), types.shape(operand)
    if shape == others:
        return cut
    alike = len(shape) == len(others) and all(
        a == b for dim, (a, b) in enumerate(zip(shape, others, strict=True)) if dim != cut.dim
    )
    return sharded(cut.dim) if alike and shape[cut.dim] and shape[cut.dim] % num_parts == 0 else None


def by_rule(query: Query) -> Outcome:
    """The outcome by the rule of an operation.

    Raises:
        Mixes: it has no rule and reads a part of the batch, or its rule does not hold for the placements.
        Decompose: it must be decomposed first.
    """
    rule = RULES.get(query.op.name)
    if rule is None and spec(query.op.name).pointwise:
        rule = pointwise
    if rule is not None:
        return rule(query)
    if query.sharded:
        raise query.mixes("has no sharding rule")
    return query.replicated()


def _on_one_wafer(query: Query) -> Outcome:
    """The outcome on one wafer, which has all samples: it may do what the rules refuse, such as mixing samples."""
    needs = [placement if placement.is_sharded else R for placement in query.placements]
    results = [sharded(0) if types.shape(result) else SUM for result in query.op.results]
    return Outcome(operands=needs, results=results)
