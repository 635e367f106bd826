"""Divides MemoryX's work over its shards.

Operations that share tensors, other than single numbers, form a component: a weight, its optimizer state and their
update. Components are found by this connection, not by names. A component with states lies on one shard. Each shard
that needs single numbers, or values computed from them alone, computes them itself: this is deterministic, so all
copies have the same bits. A number that a component makes, such as the norm of a gradient, is sent to the other shards
that read it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.target import Target
from appliance.compiler.partition.cut import Cut, is_constant, num_elements
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.operations import func_of
from waferbox.placement import place_on_shards


@dataclass(frozen=True, slots=True)
class Sharing:
    """The states and operations of each MemoryX shard.

    Attributes:
        num_shards: number of shards.
        component: by operation, its component; operations without one are free.
        ops: by shard, its operations.
        states: by shard, its states.
        replicated: single numbers, which several shards may keep; shard 0 has the copy that is read back.
        home: the shard of each state of a component, and of each value that a component makes.
        sunk: operations that are repeated where their results are read: broadcasts of single numbers, and casts of
            gradients that travelled in half precision.
        new_states: by state, its next value.
    """

    num_shards: int
    component: Mapping[Operation, int]
    ops: tuple[frozenset[Operation], ...]
    states: tuple[tuple[SSAValue, ...], ...]
    replicated: frozenset[SSAValue]
    home: Mapping[SSAValue, int]
    sunk: frozenset[Operation]
    new_states: Mapping[SSAValue, SSAValue]

    def reads(self, shard: int, value: SSAValue) -> bool:
        """Whether a shard reads a value, in an operation or as the next value of a state that it keeps."""
        if any(use.operation in self.ops[shard] for use in value.uses):
            return True
        return any(self.new_states.get(state) is value for state in self.states[shard])

    def source(self, value: SSAValue) -> int:
        """The shard from which a value is sent."""
        return self.home.get(value, 0)


def divide(cut: Cut, target: Target) -> Sharing:
    """Assigns components to shards, largest first, and finds the free operations that each shard needs.

    Raises:
        CompileError: states of one component lie on different shards since an earlier execution.
    """
    arguments = func_of(cut.module).block.args
    states: dict[SSAValue, str] = {arguments[state.argument]: state.name for state in cut.names.states}
    leaving = {*cut.new_states.values(), *cut.streamed, *(value for _, value in cut.outputs)}
    # A broadcast number would join all components that read it into one, so each reader repeats the broadcast.
    sunk = frozenset(
        op
        for op in cut.memoryx_ops
        if op.results[0] not in leaving
        and (_spreads_number(op) or (op.name == "cirh.Cast" and op.operands[0] in cut.sharding.rounded))
    )
    roots = _Union()
    ops = [op for op in cut.memoryx_ops if op not in sunk]
    for op in ops:
        tensors = [value for value in (*op.operands, *op.results) if _joins(value, sunk)]
        for value in tensors[1:]:
            roots.join(tensors[0], value)
    # A state and its next value lie on one shard, so that the update can write over the state.
    for argument, value in cut.new_states.items():
        if num_elements(argument) > 1:
            roots.join(argument, value)
    owned = {roots.find(state) for state in states if num_elements(state) > 1}
    shard_of = _place(states, roots, target)
    home: dict[SSAValue, int] = {state: shard_of[roots.find(state)] for state in states if num_elements(state) > 1}
    component: dict[Operation, int] = {}
    numbers = {root: number for number, root in enumerate(owned_in_order(states, roots))}
    for op in ops:
        root = next((roots.find(v) for v in (*op.operands, *op.results) if _joins(v, sunk)), None)
        if root in owned:
            assert root is not None
            component[op] = numbers[root]
            home.update(dict.fromkeys(op.results, shard_of[root]))
    by_shard, kept = _needs(cut, ops, component, home, states, target.num_shards, sunk)
    return Sharing(
        num_shards=target.num_shards,
        component=component,
        ops=tuple(frozenset(found) for found in by_shard),
        states=tuple(tuple(state for state in states if state in found) for found in kept),
        replicated=frozenset(state for state in states if num_elements(state) == 1),
        home=home,
        sunk=sunk,
        new_states=cut.new_states,
    )


def owned_in_order(states: Mapping[SSAValue, str], roots: "_Union") -> list[SSAValue]:
    """The components with state, in the order of their first states."""
    return list(dict.fromkeys(roots.find(state) for state in states if num_elements(state) > 1))


def _spreads_number(op: Operation) -> bool:
    return op.name == "cirh.BroadcastInDim" and num_elements(op.operands[0]) == 1 and num_elements(op.results[0]) > 1


def _joins(value: SSAValue, sunk: frozenset[Operation]) -> bool:
    if num_elements(value) == 1 or is_constant(value):
        return False
    return value.owner not in sunk or not (isinstance(value.owner, Operation) and _spreads_number(value.owner))


def _place(states: Mapping[SSAValue, str], roots: "_Union", target: Target) -> dict[SSAValue, int]:
    """The shard of each component: where its states lie already, else the shard with the fewest bytes."""
    nbytes: dict[SSAValue, int] = {}
    pinned: dict[SSAValue, int] = {}
    for state, name in states.items():
        if num_elements(state) == 1:
            continue
        root = roots.find(state)
        nbytes[root] = nbytes.get(root, 0) + types.nbytes(state)
        shard = target.pinned_shards.get(name)
        if shard is not None and pinned.setdefault(root, shard) != shard:
            raise CompileError(
                f"{name} lies on shard {shard} and is now updated together with state on shard {pinned[root]}; "
                "use max_wgt_servers=1, or a new process for this step"
            )
    return place_on_shards(nbytes, target.num_shards, pinned)


def _needs(
    cut: Cut,
    ops: list[Operation],
    component: Mapping[Operation, int],
    home: Mapping[SSAValue, int],
    states: Mapping[SSAValue, str],
    num_shards: int,
    sunk: frozenset[Operation],
) -> tuple[list[set[Operation]], list[set[SSAValue]]]:
    """Operations and states by shard: those of its components, and all free ones that they need.

    A shard that keeps a copy of a free state also computes its updates, so that all copies stay the same.
    """
    update_of = dict(cut.new_states)
    free = set(ops) - component.keys()
    by_shard: list[set[Operation]] = [set() for _ in range(num_shards)]
    kept: list[set[SSAValue]] = [set() for _ in range(num_shards)]
    for shard in range(num_shards):
        wanted: list[SSAValue] = [state for state in states if num_elements(state) > 1 and home[state] == shard]
        if shard == 0:
            wanted += [state for state in states if num_elements(state) == 1]
            # Outputs of other shards' components are sent to shard 0 by an exchange.
            wanted += [value for _, value in cut.outputs if home.get(value, 0) == 0]
            wanted += [value for value in cut.streamed if value not in home]
        for op in ops:
            if op in component and home[op.results[0]] == shard:
                by_shard[shard].add(op)
                wanted += op.operands
        seen: set[SSAValue] = set()
        while wanted:
            value = wanted.pop()
            if value in seen or is_constant(value):
                continue
            seen.add(value)
            if value in states:
                if num_elements(value) > 1 and home[value] != shard:
                    raise AssertionError("a component's state is read on another shard")
                kept[shard].add(value)
                if value in update_of:
                    wanted.append(update_of[value])
                continue
            owner = value.owner
            if not isinstance(owner, Operation) or value in cut.sharding.reduced:
                continue
            # A value of another shard's component is computed there, and sent by an exchange.
            if owner in sunk or owner in free:
                by_shard[shard].add(owner)
                wanted += owner.operands
    return by_shard, kept


class _Union:
    """Union-find over values."""

    def __init__(self) -> None:
        self._parents: dict[SSAValue, SSAValue] = {}

    def find(self, value: SSAValue) -> SSAValue:
        root = value
        while (parent := self._parents.get(root, root)) is not root:
            root = parent
        while (parent := self._parents.get(value, value)) is not root:
            self._parents[value] = root
            value = parent
        return root

    def join(self, left: SSAValue, right: SSAValue) -> None:
        self._parents[self.find(right)] = self.find(left)


def order(ops: Iterable[Operation], cut: Cut) -> list[Operation]:
    """The operations in the order of the module."""
    chosen = set(ops)
    return [op for op in cut.memoryx_ops if op in chosen]
