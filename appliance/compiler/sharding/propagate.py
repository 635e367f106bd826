"""Sharding propagation: where every value of a step is when the batch is cut over the wafers.

The program means the global batch. Inputs are cut in dimension 0, state is replicated; rules carry that through. A
value that becomes partial is reduced where something needs it whole, at its source rather than further down. Everything
else (who does what work, what travels) follows from the result.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, SSAValue

from appliance.compiler.errors import CompileError, refuse

# The rules register themselves.
from appliance.compiler.sharding import (
    rules_network,  # noqa: F401
    rules_reduction,  # noqa: F401
    rules_shape,  # noqa: F401
)
from appliance.compiler.sharding.decompose import decompose
from appliance.compiler.sharding.placement import Placement, R, sharded
from appliance.compiler.sharding.rule import ONE_WAFER, RULES, Decompose, Outcome, Query
from appliance.compiler.sharding.rules_pointwise import pointwise
from cirh import types
from cirh.graph import Signature, body_ops, func_of, signature
from cirh.operations import Const, return_of
from cirh.table import spec


@dataclass(frozen=True, slots=True)
class Sharding:
    """Placements of all values, what each operation wants, and which partial values are reduced."""

    num_csx: int
    batch_rows: int
    placements: Mapping[SSAValue, Placement]
    outcomes: Mapping[Operation, Outcome]
    reduced: frozenset[SSAValue]

    def used(self, value: SSAValue) -> Placement:
        """The placement in which a value is read."""
        return R if value in self.reduced else self.placements[value]


def propagate(module: ModuleOp, num_csx: int) -> Sharding:
    """Places every value; changes the module where an operation must be decomposed.

    Raises:
        CompileError: the batch cannot be cut, or an operation cannot work on a part of it.
    """
    rows = _batch_rows(module, num_csx)
    reduced: set[SSAValue] = set()
    while True:
        attempt = _Attempt(module, num_csx, reduced)
        if attempt.run() and not attempt.hoist():
            return Sharding(num_csx, rows, attempt.placements, attempt.outcomes, frozenset(reduced))


def _batch_rows(module: ModuleOp, num_csx: int) -> int:
    """The rows of the global batch: dimension 0 of all inputs."""
    arguments = func_of(module).block.args
    rows = None
    for argument in signature(module).inputs:
        shape = types.shape(arguments[argument.argument])
        if not shape:
            raise CompileError(f"{argument.name} has no dimensions; every tensor of a batch begins with the batch size")
        if rows is not None and shape[0] != rows:
            raise CompileError(
                f"{argument.name} has {shape[0]} rows, other inputs have {rows}; "
                "all tensors of a batch begin with the batch size"
            )
        rows = shape[0]
    if rows is None:
        raise CompileError("the step has no input; it must use the batch that the executor gives it")
    if rows % num_csx:
        raise CompileError(
            f"a batch of {rows} samples cannot be divided evenly over num_csx={num_csx} wafers; "
            f"choose a batch size that is a multiple of {num_csx}, or another num_csx"
        )
    return rows


class _Attempt:
    """One pass over the operations, with what is known to be reduced from the passes before."""

    def __init__(self, module: ModuleOp, num_csx: int, reduced: set[SSAValue]) -> None:
        self._module = module
        self._num_csx = num_csx
        self._reduced = reduced
        self.placements: dict[SSAValue, Placement] = {}
        self.outcomes: dict[Operation, Outcome] = {}

    def run(self) -> bool:
        """Whether nothing new had to be reduced or decomposed."""
        before = len(self._reduced)
        named = signature(self._module)
        inputs = {argument.argument for argument in named.inputs}
        for index, argument in enumerate(func_of(self._module).block.args):
            self.placements[argument] = sharded(0) if index in inputs else R
        for op in body_ops(self._module):
            if isinstance(op, Const):
                self.placements[op.results[0]] = R
                continue
            placements = [self._used(operand) for operand in op.operands]
            try:
                outcome = self._outcome(op, placements)
            except Decompose:
                decompose(op)
                # Values of the erased operation must not stay in the set: it is small, and cheap to find anew.
                self._reduced.clear()
                return False
            for operand, want in zip(op.operands, outcome.wants, strict=True):
                self._need(op, operand, want)
            self.outcomes[op] = outcome
            self.placements.update(zip(op.results, outcome.results, strict=True))
        self._finish(named)
        return len(self._reduced) == before

    def hoist(self) -> bool:
        """Moves reductions up to the one value that became partial first; True if any moved.

        Two uses of a partial value, behind different linear operations, are then one reduction. Sums of several partial
        values (tied weights) stay below their addition, and nothing moves if more bytes would travel.
        """
        before = set(self._reduced)
        sources: dict[SSAValue, set[SSAValue]] = {}
        for op in self.outcomes:
            for value in op.results:
                if not self.placements[value].is_partial:
                    continue
                parents = [operand for operand in op.operands if self._used(operand).is_partial]
                same = parents and all(types.info(parent) == types.info(value) for parent in parents)
                sources[value] = set().union(*(sources[parent] for parent in parents)) if same else {value}
        for reduced in before:
            if len(sources.get(reduced, ())) == 1:
                self._reduced.discard(reduced)
                self._reduced |= sources[reduced]
        return self._reduced != before

    def _used(self, value: SSAValue) -> Placement:
        return R if value in self._reduced else self.placements[value]

    def _outcome(self, op: Operation, placements: list[Placement]) -> Outcome:
        query = Query(op, placements, self._num_csx)
        rule = RULES.get(op.name)
        if rule is None and spec(op.name).pointwise:
            rule = pointwise
        if rule is not None:
            return rule(query)
        if query.sharded:
            raise refuse(op, "has no sharding rule", ONE_WAFER)
        return query.replicated()

    def _need(self, op: Operation, value: SSAValue, want: Placement) -> None:
        have = self._used(value)
        if have == want or (have == R and want.is_sharded):
            return
        if have.is_partial and not want.is_partial:
            self._reduced.add(value)
            return
        raise refuse(op, f"needs an operand that is {want}, but it is {have}", ONE_WAFER)

    def _finish(self, named: Signature) -> None:
        """Partial results are reduced; state must not depend on single samples."""
        results = return_of(self._module).operands
        states = {state.result: state.name for state in named.states if state.result is not None}
        for index, value in enumerate(results):
            placement = self._used(value)
            if placement.is_partial:
                self._reduced.add(value)
            if placement.is_sharded and index in states:
                owner = value.owner
                why = f"the state {states[index]} would hold a value for each sample of the batch"
                if isinstance(owner, Block):
                    raise CompileError(f"{why}; reduce it over the batch first")
                raise refuse(owner, f"makes what {why}", "reduce it over the batch first")
