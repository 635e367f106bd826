"""Sharding propagation: where every value of a step is when the batch is cut over the wafers.

The program means the global batch. Inputs are cut in dimension 0, state is replicated; rules carry that through. A
value that becomes partial is reduced where something needs it whole, at its source rather than further down; one that
is cut is gathered. Everything else (who does what work, what travels) follows from the result.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, SSAValue

from appliance.compiler.core.errors import CompileError, refuse
from appliance.compiler.passes.dce import eliminate_dead_code
from appliance.compiler.sharding.decompose import decompose
from appliance.compiler.sharding.parts import Gathers, Parts
from appliance.compiler.sharding.rules.pointwise import pointwise
from appliance.compiler.sharding.rules.rule import (
    ONE_WAFER,
    RULES,
    SUM,
    Decompose,
    Outcome,
    Placement,
    Query,
    R,
    sharded,
)
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.elements import can_be_sent
from waferbox.cirh.dialect.operations import Const, body_ops, func_of, return_of
from waferbox.cirh.modules.graph import Signature, signature
from waferbox.cirh.table.lookup import spec


@dataclass(frozen=True, slots=True)
class Sharding:
    """Placements of all values, what each operation wants, and which partial values are reduced."""

    num_parts: int
    batch_rows: int
    placements: Mapping[SSAValue, Placement]
    outcomes: Mapping[Operation, Outcome]
    reduced: frozenset[SSAValue]
    # Of those, gradients that each wafer rounds to half before they are reduced (`half_gradients`).
    rounded: frozenset[SSAValue]

    def used(self, value: SSAValue) -> Placement:
        """The placement in which a value is read."""
        return R if value in self.reduced else self.placements[value]


def propagate(module: ModuleOp, num_parts: int, rounded: Collection[SSAValue] = ()) -> Sharding:
    """Places every value; changes the module where an operation must be decomposed, or made for a part of the batch.

    Args:
        rounded: partial values in half, which are reduced as they are, though sums of rounded parts are not exact.

    Raises:
        CompileError: the batch cannot be cut, or an operation cannot work on a part of it.
    """
    rows = batch_rows(module, num_parts)
    reduced: set[SSAValue] = set()
    _check_wafers(module, num_parts)
    parts = Parts(module, num_parts, by_rule)
    gathers = Gathers(module, num_parts, parts.wafers)
    while True:
        attempt = _Attempt(module, num_parts, reduced, parts, gathers, rounded)
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
            for op, index, want in attempt.uncut:
                parts.cut(op, index, want)
            # Parts that were begun for what is cut now are read by nobody.
            eliminate_dead_code(module)
            reduced.clear()


def batch_rows(module: ModuleOp, num_parts: int) -> int:
    """The rows of the global batch: dimension 0 of all inputs. CompileError if it cannot be cut in so many parts.

    A batch whose inputs differ in dimension 0 is one row, which is never cut.
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
        raise CompileError(
            f"{name} has {others} rows, other inputs have {rows}; all tensors of a batch begin with the batch size, in "
            "which it is divided over wafers: use num_csx=1, where a batch need not be divided"
        )
    rows = 1 if len(sizes) > 1 else next(iter(sizes))
    if rows % num_parts:
        raise CompileError(
            f"a batch of {rows} samples cannot be divided evenly over num_csx={num_parts} wafers; "
            f"choose a batch size that is a multiple of {num_parts}, or another num_csx"
        )
    return rows


def _check_wafers(module: ModuleOp, num_parts: int) -> None:
    """An argument of wafer numbers, which a module has that was propagated before, is for as many wafers."""
    number = signature(module).wafers
    wanted = types.tensor_type((num_parts,), torch.int64)
    if number is not None and func_of(module).block.args[number].type != wanted:
        raise CompileError(f"the module's wafer numbers are not {types.type_text(wanted)}")


class _Attempt:
    """One pass over the operations, with what is known to be reduced from the passes before."""

    def __init__(
        self,
        module: ModuleOp,
        num_parts: int,
        reduced: set[SSAValue],
        parts: Parts,
        gathers: Gathers,
        rounded: Collection[SSAValue],
    ) -> None:
        self._module = module
        self._rounded = rounded
        self._num_parts = num_parts
        self._reduced = reduced
        self._parts = parts
        self._gathers = gathers
        self._needed: set[SSAValue] = set()  # of the reduced values, those that something reads whole
        self.uncut: list[tuple[Operation, int, Placement]] = []  # operands of which a part is wanted, and are whole
        self.placements: dict[SSAValue, Placement] = {}
        self.outcomes: dict[Operation, Outcome] = {}

    def run(self) -> bool:
        """Whether nothing new had to be reduced, gathered, decomposed, or made for a part of the batch."""
        before = set(self._reduced)
        named = signature(self._module)
        inputs = {argument.argument for argument in named.inputs} | {named.wafers}
        for index, argument in enumerate(func_of(self._module).block.args):
            self.placements[argument] = sharded(0) if index in inputs else R
        whole = True
        waiting = body_ops(self._module)[::-1]
        while waiting:
            op = waiting.pop()
            if isinstance(op, Const):
                self.placements[op.results[0]] = R
                continue
            try:
                outcome = self._outcome(op)
            except Decompose:
                waiting += decompose(op)[::-1]
                whole = False
                continue
            for index, want in enumerate(outcome.wants):
                whole = self._need(op, index, want) and whole
            self.outcomes[op] = outcome
            self.placements.update(zip(op.results, outcome.results, strict=True))
        if not whole:
            # Values that are now read in parts may not be read whole any more, and those of an operation that was
            # decomposed are gone. The set is small, and cheap to find anew.
            eliminate_dead_code(self._module)
            self._reduced.clear()
            return False
        self._finish(named)
        self._reduced &= {value for value in self._needed if self._is_partial(value)}
        return self._reduced == before

    def hoist(self) -> bool:
        """Moves reductions up to the one value that became partial first; True if any moved.

        Two uses of a partial value, behind different linear operations, are then one reduction. Of a sum of several
        partial values (tied weights) the sum is the first. Nothing moves if more bytes would travel, or if halves
        would be added up, and their sum rounded, that are cast to float32 first.
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
        # What is gathered since this attempt began has no placement yet.
        return value not in self._reduced and self.placements.get(value) == R

    def _is_partial(self, value: SSAValue) -> bool:
        return self.placements[value].is_partial or (self._num_parts == 1 and self.placements[value].is_sharded)

    def _outcome(self, op: Operation) -> Outcome:
        known = self._parts.outcomes.get(op)
        if known is not None:
            return known
        query = Query(op, [self._used(operand) for operand in op.operands], self._num_parts)
        if any(operand in self._rounded for operand in op.operands):
            return query.replicated()
        if op.name == "cirh.Cast" and op.results[0] in self._rounded:
            return Outcome(wants=query.placements, results=query.placements)
        if self._num_parts > 1:
            return by_rule(query)
        try:
            outcome = by_rule(query)
        except (CompileError, Decompose):
            return _on_one_wafer(query)
        fits = zip(query.placements, outcome.wants, strict=True)
        return outcome if all(have.is_sharded <= (have == want) for have, want in fits) else _on_one_wafer(query)

    def _need(self, op: Operation, index: int, want: Placement) -> bool:
        """Sees to it that an operand can be had as wanted. False if the operation reads another value instead."""
        value = op.operands[index]
        have = self._used(value)
        if have == R and want.is_sharded and self._num_parts > 1:
            part = self._parts.part(value, want, self._is_replicated)
            if part is not None:
                op.operands[index] = part
                return part is value
            # It may be made of parts yet, when a reduction has moved up; otherwise it is cut in the end.
            self.uncut.append((op, index, want))
            if value in self._reduced:
                self._needed.add(value)
            return True
        if not want.is_partial and (have.is_partial or value in self._reduced):
            self._reduced.add(value)
            self._needed.add(value)
        elif have.is_sharded and want == R and self._num_parts > 1:
            op.operands[index] = self._gathers.whole(value, have, op)
            return False
        elif have != want and not (have == R and want.is_sharded):
            raise refuse(op, f"needs an operand that is {want}, but it is {have}", ONE_WAFER)
        return True

    def _finish(self, named: Signature) -> None:
        """Partial results are reduced; state must not depend on single samples."""
        results = return_of(self._module).operands
        states = {state.result: state.name for state in named.states if state.result is not None}
        for index, value in enumerate(results):
            placement = self._used(value)
            if placement.is_partial or value in self._reduced:
                self._reduced.add(value)
                self._needed.add(value)
            if placement.is_sharded and index in states:
                if self._num_parts == 1:
                    # The one part is all there is.
                    self._reduced.add(value)
                    self._needed.add(value)
                    continue
                owner = value.owner
                why = f"the state {states[index]} would hold a value for each sample of the batch"
                if isinstance(owner, Block):
                    raise CompileError(f"{why}; reduce it over the batch first")
                raise refuse(owner, f"makes what {why}", "reduce it over the batch first")


def by_rule(query: Query) -> Outcome:
    """What the rule of an operation says. CompileError if there is none and the operation has part of the batch."""
    rule = RULES.get(query.op.name)
    if rule is None and spec(query.op.name).pointwise:
        rule = pointwise
    if rule is not None:
        return rule(query)
    if query.sharded:
        raise refuse(query.op, "has no sharding rule", ONE_WAFER)
    return query.replicated()


def _on_one_wafer(query: Query) -> Outcome:
    """One wafer has all samples, so that anything may be done with them: the rules need not allow it."""
    wants = [placement if placement.is_sharded else R for placement in query.placements]
    results = [sharded(0) if types.shape(result) else SUM for result in query.op.results]
    return Outcome(wants=wants, results=results)
