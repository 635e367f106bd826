"""Makes the programs of MemoryX's shards: send weights, receive reduced gradients, update states as early as possible.

Messages have an order that all roles share, so roles with one thread each cannot wait for one another in a circle. Work
is done as early as possible between the messages.
"""

from bisect import bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass

from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.target import Target
from appliance.compiler.memoryx_schedule.commits import Commits, Event
from appliance.compiler.memoryx_schedule.memory_plan import keep_late_gradients
from appliance.compiler.memoryx_schedule.reads import Frontier, Reads, ready_batches
from appliance.compiler.partition.cut import Cut, num_elements
from appliance.compiler.partition.groups import Bundle, KernelTable, Numbers
from appliance.compiler.partition.layers import inputs_of
from appliance.compiler.partition.shards import Sharing, order
from appliance.compiler.wafer_schedule.schedule import WaferSchedule, add_drops
from appliance.compiler.wafer_schedule.streams import Departure
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.operations import func_of
from waferbox.cirh.modules.graph import extract
from waferbox.cirh.modules.sources import sources_of
from waferbox.cirh.text.printer import print_module
from waferbox.runtime.schedule import WEIGHTS_AHEAD
from wsc.v1 import plan_pb2


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Groups of values that one shard makes and others read, in the order in which all shards send and receive them."""

    bundles: Sequence[Bundle]

    def from_shard(self, shard: int) -> list[Bundle]:
        return [bundle for bundle in self.bundles if bundle.group.source_shard == shard]

    def to_shard(self, shard: int) -> list[Bundle]:
        return [bundle for bundle in self.bundles if shard in bundle.group.shards]


def find_exchanges(cut: Cut, sharing: Sharing, numbers: Numbers) -> Exchanges:
    """Finds the values that shards exchange: numbers that other shards read, and outputs that shard 0 lacks.

    They are grouped by source, destinations and depth, which is the number of exchanges that a value depends on, one
    after the other. A value from which a streamed one is made travels alone, as the wafers may wait for it.
    """
    outputs = {value for _, value in cut.outputs}
    urgent = _behind_streamed(cut)
    depth: dict[SSAValue, int] = {}
    found: dict[tuple[int, int, tuple[int, ...], int], Bundle] = {}
    sent: set[SSAValue] = set()

    def offer(value: SSAValue) -> None:
        home = sharing.home.get(value)
        if home is None or value in cut.sharding.reduced:
            return
        others = [shard for shard in range(sharing.num_shards) if shard != home]
        readers = [
            shard
            for shard in others
            if (num_elements(value) == 1 and sharing.reads(shard, value)) or (shard == 0 and value in outputs)
        ]
        if not readers:
            return
        sent.add(value)
        key = (depth.get(value, 0), home, tuple(readers), numbers.value(value) if value in urgent else 0)
        if key not in found:
            kind = plan_pb2.GROUP_KIND_EXCHANGE
            found[key] = Bundle(plan_pb2.Group(id=numbers.group(), kind=kind, source_shard=home, shards=readers))
        found[key].add(numbers, value, types.tensor_type(types.shape(value), types.dtype(value)))

    for states in sharing.states:
        for state in states:
            if state in outputs and state not in sent:
                offer(state)
    for op in cut.memoryx_ops:
        mine = sharing.home.get(op.results[0])
        level = 0
        for operand in op.operands:
            crosses = operand in sent and sharing.home.get(operand) != mine
            level = max(level, depth.get(operand, 0) + crosses)
        for value in op.results:
            depth[value] = level
            offer(value)
    return Exchanges([found[key] for key in sorted(found)])


def _behind_streamed(cut: Cut) -> set[SSAValue]:
    """The streamed values, and all values from which they are made."""
    behind = set(cut.streamed)
    for op in reversed(cut.memoryx_ops):
        if any(result in behind for result in op.results):
            behind.update(op.operands)
    return behind


def find_output(cut: Cut, numbers: Numbers) -> Bundle | None:
    """The group of outputs that shard 0 sends to the client; None if there are none."""
    bundle = Bundle(plan_pb2.Group(kind=plan_pb2.GROUP_KIND_OUTPUT))
    for _, value in cut.outputs:
        if value not in cut.sharding.reduced and not cut.sharding.used(value).is_sharded and value not in bundle.values:
            bundle.add(numbers, value, types.tensor_type(types.shape(value), types.dtype(value)))
    if not bundle.values:
        return None
    bundle.group.id = numbers.group()
    return bundle


# --- The program of a shard -------------------------------------------------------------------------------------------


class ShardScheduler:
    """Makes the program of one shard. Used once."""

    def __init__(
        self,
        cut: Cut,
        sharing: Sharing,
        wafer: WaferSchedule,
        exchanges: Exchanges,
        output: Bundle | None,
        target: Target,
        numbers: Numbers,
        shard: int,
    ) -> None:
        self._cut = cut
        self._sharing = sharing
        self._wafer = wafer
        self._target = target
        self._numbers = numbers
        self._shard = shard
        self._plan = plan_pb2.MemoryXPlan(shard=shard)
        self._kernels = KernelTable()
        self._groups: dict[int, plan_pb2.Group] = {}
        self._available: set[SSAValue] = set(sharing.states[shard])
        self._todo = dict.fromkeys(order((op for op in sharing.ops[shard] if op not in sharing.sunk), cut))
        self._reads = Reads(sharing, shard, list(self._todo))
        self._frontier = Frontier(self._todo, self._reads)
        self._frontier.add(self._available)
        self._loads = [
            Event(load.bundle, load.position) for load in wafer.loads if load.bundle.group.source_shard == shard
        ]
        self._num_sent = 0  # of the loads, which are sent in order
        # Whether gradients are received in the loop: then it is from the last of a round to the last of the next.
        self._adds_in_loop = any(d.position in wafer.loop and shard in d.bundle.group.shards for d in wafer.departures)
        outputs = [output] if output is not None and shard == 0 else []
        self._others = [Event(bundle) for bundle in (*exchanges.from_shard(shard), *outputs)]
        self._exchange_inputs = exchanges.to_shard(shard)
        self._commits = Commits(cut, sharing, shard, self._reads, self._loads, self._others, wafer.last_read)

    def schedule(self) -> plan_pb2.MemoryXPlan:
        """Makes the program.

        Raises:
            CompileError: there is no order in which it can be run.
        """
        receives = [d for d in self._wafer.departures if self._shard in d.bundle.group.shards]
        for departure in receives:
            if self._adds_in_loop:
                self._reach(departure.position)
            # The wafers cannot send this group before they have the weights of all segments up to it.
            self._send_loads(departure.position + self._target.prefetch_layers, needed=departure.position)
            if departure.is_last:
                self._run_ready()
            if departure.adds_to in self._groups:
                self._add(departure)
            else:
                self._receive(departure.bundle, is_complete=departure.is_last)
            self._commits.released = departure.position
            if departure.is_last:
                self._run_ready()
        self._send_loads(len(self._wafer.work), needed=len(self._wafer.work))
        self._run_ready()
        while self._exchange_inputs:
            self._receive(self._exchange_inputs.pop(0))
            self._run_ready()
        # The remaining updates would wait for a message that the wafers do not send. `at_the_end` refuses them if the
        # wafers may still read a state that they replace.
        self._commits.wait_for_wafers = False
        self._run_ready()
        if self._num_sent < len(self._loads):
            raise CompileError(
                "the wafers would wait for a value that MemoryX cannot make while they wait; use max_wgt_servers=1"
            )
        assert not self._todo, f"shard {self._shard} cannot compute {next(iter(self._todo)).name}"
        assert all(event.sent for event in self._others), "an exchange or an output is nowhere"
        for value, state in self._commits.at_the_end():
            commit = self._plan.instructions.add().commit
            commit.value, commit.state = self._numbers.value(value), self._numbers.value(state)
        self._commits.check_computed()
        self._finish()
        return self._plan

    def _reach(self, position: int) -> None:
        """Begins and ends the loop where the program reaches that of the wafers."""
        reached, loop = len(self._plan.instructions), self._plan.loop
        if self._wafer.loop and position >= self._wafer.loop.start and not loop.times:
            loop.begin, loop.times = reached, self._wafer.plan.loop.times
        if loop.times and position >= self._wafer.loop.stop and not loop.end:
            loop.end = reached

    def _receive(self, bundle: Bundle, *, is_complete: bool = True) -> None:
        """Receives a group. is_complete: whether its values are; otherwise other groups will be added to them."""
        self._groups[bundle.id] = bundle.group
        self._plan.instructions.add().receive.group = bundle.id
        if is_complete:
            self._complete(bundle)

    def _add(self, departure: Departure) -> None:
        """Receives the gradients of a later round, and adds them to those of the first."""
        bundle = departure.bundle
        self._groups[bundle.id] = bundle.group
        receive = self._plan.instructions.add().receive
        receive.group, receive.adds_to = bundle.id, departure.adds_to
        if departure.is_last:
            self._complete(bundle)

    def _complete(self, bundle: Bundle) -> None:
        self._available.update(bundle.values)
        self._frontier.add(bundle.values)
        self._commits.received(bundle.values)

    def _send(self, event: Event) -> None:
        self._commits.sent(event)
        self._groups[event.bundle.id] = event.bundle.group
        self._plan.instructions.add().send.group = event.bundle.id

    def _send_loads(self, up_to: int, *, needed: int) -> None:
        """Sends weights in the order in which the wafers wait for them, after computing them.

        Args:
            up_to: the last segment run whose weights are sent, if they can be.
            needed: the last segment run whose weights must be sent: without them the wafers send nothing more to this
                shard. At most WEIGHTS_AHEAD groups beyond these are sent: a shard that waits for a full window to empty
                would not release the gradients for whose buffers the wafers wait.
        """
        ahead = self._num_sent - bisect_right(self._loads, needed, hi=self._num_sent, key=lambda event: event.position)
        while self._num_sent < len(self._loads):
            event = self._loads[self._num_sent]
            if event.position > up_to or (event.position > needed and ahead >= WEIGHTS_AHEAD):
                return
            ahead += event.position > needed
            self._compute(event.bundle.values)
            if event.position <= needed and not self._available.issuperset(event.bundle.values):
                self._receive_for(event.bundle.values)
            if not self._available.issuperset(event.bundle.values):
                return  # depends on a reduction that has not been received yet
            if not self._adds_in_loop:
                self._reach(event.position)
            self._send(event)
            self._num_sent += 1

    def _receive_for(self, values: Sequence[SSAValue]) -> None:
        """Receives what these values need from other shards."""
        # Sends everything that the other shards may need first: two shards must not wait for each other.
        self._run_ready()
        behind = self._behind(values)
        for bundle in list(self._exchange_inputs):
            if any(value in behind for value in bundle.values):
                self._exchange_inputs.remove(bundle)
                self._receive(bundle)
                self._run_ready()

    def _compute(self, values: Sequence[SSAValue]) -> None:
        """Runs the operations that these values need, as far as possible now."""
        if not self._available.issuperset(values):
            self._run_ready({value.owner for value in self._behind(values) if isinstance(value.owner, Operation)})

    def _behind(self, values: Sequence[SSAValue]) -> set[SSAValue]:
        """These values and all values from which they are made on this shard, without those that are available."""
        behind: set[SSAValue] = set()
        stack = [value for value in values if value not in self._available]
        while stack:
            value = stack.pop()
            if value in behind:
                continue
            behind.add(value)
            if isinstance(value.owner, Operation) and value.owner in self._sharing.ops[self._shard]:
                stack.extend(operand for operand in value.owner.operands if operand not in self._available)
        return behind

    def _run_ready(self, within: Set[Operation] | None = None) -> None:
        """Runs everything that can be run, in few kernels; sends exchanges and outputs as they are complete.

        within: the operations that are run; None: all.

        Outputs are not left for the end of the step: their receiver takes a core, which the next step's weights need.
        """
        while True:
            batches = ready_batches(
                self._frontier, self._reads, self._available, self._commits.may_run, self._commits.leaves, within
            )
            if not batches:
                break
            for batch in batches:
                self._run(batch)
        for event in self._others:
            if not event.sent and self._available.issuperset(event.bundle.values):
                self._send(event)

    def _run(self, ops: list[Operation]) -> None:
        chosen = set(ops)
        for op in ops:
            del self._todo[op]
        self._frontier.remove(ops)
        with_sunk = self._reads.with_repeated(ops)
        made = [result for op in ops for result in op.results]
        inputs = inputs_of(with_sunk)
        # Values that only this kernel reads are no outputs, so that a loop needs no memory for them.
        outputs = [
            value
            for value in made
            if self._commits.leaves(value) or any(reader not in chosen for reader in self._reads.readers(value))
        ]
        run = self._plan.instructions.add().run
        text = print_module(extract(with_sunk, inputs, outputs), locations=False)
        run.kernel = self._kernels.number(text, sources=sources_of(with_sunk))
        run.inputs.extend(self._numbers.values(inputs))
        run.outputs.extend(self._numbers.values(outputs))
        states = [self._commits.in_place(value, self._todo.keys()) for value in outputs]
        if any(state is not None for state in states):
            run.commits.extend(0 if state is None else self._numbers.value(state) for state in states)
        self._available.update(made)

    def _finish(self) -> None:
        arguments = func_of(self._cut.module).block.args
        for named in self._cut.names.states:
            state = arguments[named.argument]
            if state in self._sharing.states[self._shard]:
                self._plan.states.add(
                    value=self._numbers.value(state),
                    name=named.name,
                    type=types.to_proto(state),
                    replicated=state in self._sharing.replicated,
                )
        if self._plan.loop.begin == self._plan.loop.end:
            self._plan.ClearField("loop")
        self._plan.groups.extend(self._groups.values())
        self._plan.kernels.extend(self._kernels.messages())
        self._plan.sources.extend(self._kernels.sources())
        states = {slot.value for slot in self._plan.states}
        sends = [i.send.group for i in self._plan.instructions if i.WhichOneof("kind") == "send"]
        sent = {member.value for group in sends for member in self._groups[group].members}
        committed = {i.commit.value for i in self._plan.instructions if i.WhichOneof("kind") == "commit"}
        add_drops(self._plan.instructions, states | sent | committed)
        keep_late_gradients(self._plan)
