"""The cut: which operations the wafers run, which MemoryX runs, and which values travel between them.

An operation that reads or makes a sharded or partial value is run by the wafers. An operation on replicated and reduced
values is run by MemoryX. If the wafers read its result, it is streamed to them like a weight, unless it costs next to
nothing (views, small values made from constants, small states and reduced values, and element-wise operations on
constants, whatever their size): then they compute it themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, SSAValue

from appliance.compiler.sharding.propagate import Sharding
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.operations import Const, body_ops, func_of, return_of
from waferbox.cirh.modules.graph import Signature, signature
from waferbox.cirh.table.lookup import spec

# Values of up to so many elements are computed by the wafers, if possible, instead of being streamed.
SMALL_ELEMENTS = 4096
VIEWS = frozenset({"cirh.Reshape", "cirh.BroadcastInDim", "cirh.Transpose", "aten.select.int", "aten.slice.Tensor"})
_TRIANGLES = frozenset({"aten.tril", "aten.triu"})


@dataclass(frozen=True, slots=True)
class Cut:
    """A step, divided between the wafers and MemoryX. Constants belong to neither: they are made where they are read.

    Attributes:
        module: the step.
        names: names of its inputs, states and outputs.
        sharding: the placement of each value.
        wafer_ops: operations that the wafers run, in order. An operation may be run by both.
        memoryx_ops: operations that MemoryX runs, in order.
        streamed: values that MemoryX sends to the wafers, in order of definition.
        new_states: by state, its next value.
        sunk: operations of the wafers that are repeated in each segment that reads their results.
    """

    module: ModuleOp
    names: Signature
    sharding: Sharding
    wafer_ops: tuple[Operation, ...]
    memoryx_ops: tuple[Operation, ...]
    streamed: tuple[SSAValue, ...]
    new_states: Mapping[SSAValue, SSAValue]
    sunk: frozenset[Operation]

    @property
    def parts(self) -> frozenset[SSAValue]:
        """Values that differ from one part of the batch to the next; all parts read the same of the others."""
        arguments = func_of(self.module).block.args
        made = {result for op in self.wafer_ops for result in op.results} - self.sharding.reduced
        given = {arguments[argument.argument] for argument in self.names.inputs}
        numbers = set() if self.names.wafers is None else {arguments[self.names.wafers]}
        return frozenset(made | given | numbers)

    @property
    def weights(self) -> frozenset[SSAValue]:
        """States of more than one number from which values that are streamed to the wafers are computed."""
        behind = {value for value in self.streamed if value not in self.sharding.reduced}
        for op in reversed(self.memoryx_ops):
            if any(result in behind for result in op.results):
                behind.update(operand for operand in op.operands if operand not in self.sharding.reduced)
        arguments = func_of(self.module).block.args
        states = {arguments[state.argument] for state in self.names.states}
        return frozenset(state for state in states & behind if num_elements(state) > 1)

    @property
    def outputs(self) -> list[tuple[str, SSAValue]]:
        """The outputs that the client gets: names and values."""
        results = return_of(self.module).operands
        return [(output.name, results[output.result]) for output in self.names.outputs]


def num_elements(value: SSAValue) -> int:
    """The number of elements of a tensor."""
    return prod(types.shape(value))


def is_constant(value: SSAValue) -> bool:
    """Whether a value is a Const."""
    return isinstance(value.owner, Const)


def make_cut(module: ModuleOp, sharding: Sharding) -> Cut:
    """Assigns every operation to the wafers, to MemoryX, or to both."""
    names = signature(module)
    arguments, results = func_of(module).block.args, return_of(module).operands
    new_states: dict[SSAValue, SSAValue] = {
        arguments[state.argument]: results[state.result]
        for state in names.states
        if state.result is not None and results[state.result] is not arguments[state.argument]
    }
    ops = [op for op in body_ops(module) if not isinstance(op, Const)]
    by_nature = {op for op in ops if touches_cut(op, sharding)}
    fixed = _fixed_ops(ops)
    on_wafers, in_memoryx = _sites(ops, by_nature, fixed, set(new_states.values()) | set(results), sharding)
    streamed = _streamed(module, ops, on_wafers, by_nature, sharding)
    return Cut(
        module=module,
        names=names,
        sharding=sharding,
        wafer_ops=tuple(op for op in ops if op in on_wafers),
        memoryx_ops=tuple(op for op in ops if op in in_memoryx),
        streamed=streamed,
        new_states=new_states,
        sunk=_sunk(ops, fixed, set(results), sharding),
    )


def _fixed_ops(ops: list[Operation]) -> set[Operation]:
    """Factories, views and element-wise operations that depend on constants alone, such as those that make a mask."""
    fixed: set[Operation] = set()
    for op in ops:
        is_cheap = op.name in VIEWS | _TRIANGLES or not op.operands or spec(op.name).pointwise
        made = (operand.owner for operand in op.operands)
        if is_cheap and not spec(op.name).random and all(isinstance(owner, Const) or owner in fixed for owner in made):
            fixed.add(op)
    return fixed


def _sunk(
    ops: list[Operation], fixed: set[Operation], results: set[SSAValue], sharding: Sharding
) -> frozenset[Operation]:
    """Operations that are cheaper to repeat in each segment than to keep their results in memory in between.

    These are views, operations on constants alone, and activations that are cast to a wider type, unless their results
    leave the wafer.
    """
    leaving = results | sharding.reduced
    return frozenset(
        op
        for op in ops
        if (op.name in VIEWS or op in fixed or _widens(op, sharding))
        and not any(result in leaving for result in op.results)
    )


def _widens(op: Operation, sharding: Sharding) -> bool:
    """Whether an operation casts a part of the batch to a wider type, which is exact."""
    wider = op.name == "cirh.Cast" and types.nbytes(op.operands[0]) < types.nbytes(op.results[0])
    return wider and sharding.placements[op.results[0]].is_sharded


def touches_cut(op: Operation, sharding: Sharding) -> bool:
    """Whether an operation reads or makes a part of the batch, or a partial value, so that only a wafer can run it."""
    outcome = sharding.outcomes[op]
    return any(placement.kind != "R" for placement in (*outcome.operands, *outcome.results))


def _sites(
    ops: list[Operation], by_nature: set[Operation], fixed: set[Operation], wanted: set[SSAValue], sharding: Sharding
) -> tuple[set[Operation], set[Operation]]:
    """The operations that the wafers run, and those that MemoryX runs. wanted: next values of states, and outputs."""
    light = _light_ops(ops, by_nature, sharding) | fixed
    on_wafers: set[Operation] = set(by_nature)
    in_memoryx: set[Operation] = set()
    # Backwards, so that the sites of all users of an operation are known. An operation without users gets no site.
    for op in reversed(ops):
        if op in by_nature:
            continue
        users = [use.operation for result in op.results for use in result.uses]
        if any(user in on_wafers for user in users):
            (on_wafers if op in light else in_memoryx).add(op)
        if any(user in in_memoryx for user in users) or any(result in wanted for result in op.results):
            in_memoryx.add(op)
    return on_wafers, in_memoryx


def _light_ops(ops: list[Operation], by_nature: set[Operation], sharding: Sharding) -> set[Operation]:
    """Replicated operations that the wafers may run themselves."""
    cheap_values: set[SSAValue] = set()

    def is_cheap(value: SSAValue) -> bool:
        if value in cheap_values or is_constant(value):
            return True
        small = num_elements(value) <= SMALL_ELEMENTS
        if isinstance(value.owner, Block):
            # A small state that the wafers read anyway is already there; a single number costs nothing to send.
            return num_elements(value) == 1 or (small and any(use.operation in by_nature for use in value.uses))
        return small and value in sharding.reduced

    light = set()
    for op in ops:
        if op in by_nature:
            continue
        if all(is_cheap(operand) for operand in op.operands):
            light.add(op)
            cheap_values.update(result for result in op.results if num_elements(result) <= SMALL_ELEMENTS)
        elif op.name in VIEWS:
            light.add(op)
    return light


def _streamed(
    module: ModuleOp, ops: list[Operation], on_wafers: set[Operation], by_nature: set[Operation], sharding: Sharding
) -> tuple[SSAValue, ...]:
    """Values that the wafers read and do not make: states, and results that only MemoryX computes."""
    names = signature(module)
    states = [func_of(module).block.args[state.argument] for state in names.states]
    made = [result for op in ops if op not in on_wafers for result in op.results]
    return tuple(value for value in (*states, *made) if any(use.operation in on_wafers for use in value.uses))
