"""Decides when a shard may overwrite a state: after the last read of its old value.

Its readers are operations of the shard, messages that are still to be sent, and the wafers: on the same host they read
large weights in the shard's memory. A reduction, which each wafer sends after its last read, shows that all have read.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.errors import CompileError
from appliance.compiler.memoryx_schedule.reads import Reads
from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.groups import Bundle
from appliance.compiler.partition.shards import Sharing
from waferbox.cirh.dialect.operations import func_of
from waferbox.links.frame import INLINE_BYTES
from wsc.v1 import plan_pb2

_WAY_OUT = "make it depend on the step's loss or gradients, or do it in a step that has an output"


@dataclass(slots=True, eq=False)
class Event:
    """A message of a shard, sent as soon as its values have been computed.

    Attributes:
        bundle: the group.
        position: the segment run before which the wafers wait for it, if it has weights.
        sent: whether the program has sent it.
    """

    bundle: Bundle
    position: int = 0
    sent: bool = False


class Commits:
    """The states of one shard, and whether their next values may be written yet."""

    def __init__(
        self,
        cut: Cut,
        sharing: Sharing,
        shard: int,
        reads: Reads,
        loads: Sequence[Event],
        others: Sequence[Event],
        last_read: Mapping[SSAValue, int],
    ) -> None:
        """Connects the states with their readers.

        Args:
            cut: the step.
            sharing: the states of each shard.
            shard: number of the shard.
            reads: the readers of each value on the shard.
            loads: messages of weights, which the wafers may read in the shard's memory.
            others: messages that are copied when they are sent.
            last_read: by value, the last segment run of the wafers that reads it.
        """
        self._cut = cut
        self._reads = reads
        self._loads = loads
        self._large = {value for event in loads if event.bundle.nbytes > INLINE_BYTES for value in event.bundle.values}
        # By value: the number of messages with it that are still to be sent.
        self._unsent = Counter(value for event in (*loads, *others) for value in event.bundle.values)
        self._unsent_loads = Counter(value for event in loads for value in event.bundle.values)
        self._last_read = last_read
        self._states = set(sharing.states[shard])
        self._updates: dict[SSAValue, list[SSAValue]] = {}
        for state in sharing.states[shard]:
            if state in cut.new_states:
                self._updates.setdefault(cut.new_states[state], []).append(state)
        self._late: list[tuple[SSAValue, SSAValue]] = []
        self.released = -1  # the last segment run that all wafers are known to have finished
        self.wait_for_wafers = True  # whether an update waits for the wafers' reads

    def leaves(self, value: SSAValue) -> bool:
        """Whether a value is a state's next value, or still to be sent: it is needed even if no operation reads it."""
        return value in self._updates or self._is_to_be_sent(value)

    def may_run(self, op: Operation) -> bool:
        """Whether an operation may be run now: an update waits until the wafers have read the states it overwrites."""
        if not self.wait_for_wafers:
            return True
        return all(self._is_released(state) for value in op.results for state in self._updates.get(value, ()))

    def sent(self, event: Event) -> None:
        """Registers a message that the program sends."""
        event.sent = True
        self._unsent.subtract(event.bundle.values)
        if event.bundle.group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
            self._unsent_loads.subtract(event.bundle.values)

    def received(self, values: Sequence[SSAValue]) -> None:
        """Registers received values: those that are states' next values are copied at the end."""
        self._late += [(value, state) for value in values for state in self._updates.get(value, ())]

    def in_place(self, value: SSAValue, todo: Collection[Operation]) -> SSAValue | None:
        """The state that an operation may overwrite with a result; None if there is none, or its old value is read.

        todo: operations that are still to be run.
        """
        states = self._updates.get(value, [])
        chosen = next((state for state in states if self._is_released(state) and self._is_dead(state, todo)), None)
        self._late += [(value, state) for state in states if state is not chosen]
        return chosen

    def at_the_end(self) -> list[tuple[SSAValue, SSAValue]]:
        """The values that are copied to states after everything else, with the states.

        Raises:
            CompileError: the wafers may still read one of the states then.
        """
        for _, state in self._late:
            if not self._is_released(state):
                raise CompileError(f"{self._name(state)} is replaced while the wafers may still read it; {_WAY_OUT}")
        return self._late

    def check_computed(self) -> None:
        """Checks that the wafers have read all computed weights in this step: the next one writes the same buffers.

        Raises:
            CompileError: the wafers may still read one.
        """
        for event in self._loads:
            if event.bundle.nbytes <= INLINE_BYTES:
                continue
            for value in event.bundle.values:
                if value not in self._states and self._last_read.get(value, -1) > self.released:
                    raise CompileError(
                        f"a value computed for the wafers is overwritten while they may read it; {_WAY_OUT}"
                    )

    def _is_to_be_sent(self, value: SSAValue) -> bool:
        return self._unsent[value] > 0

    def _is_released(self, state: SSAValue) -> bool:
        if self._unsent_loads[state]:
            return False
        return state not in self._large or self._last_read.get(state, -1) <= self.released

    def _is_dead(self, state: SSAValue, todo: Collection[Operation]) -> bool:
        aliases = self._reads.aliases(state)
        if any(reader in todo for alias in aliases for reader in self._reads.readers(alias)):
            return False
        return not any(self._is_to_be_sent(alias) or alias in self._updates for alias in aliases)

    def _name(self, state: SSAValue) -> str:
        arguments = func_of(self._cut.module).block.args
        return next(named.name for named in self._cut.names.states if arguments[named.argument] is state)
