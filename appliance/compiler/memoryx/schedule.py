"""A shard's program: send weights, take reduced gradients, update state as soon as all that an update needs is there.

Messages come in an order that all roles share, so that roles with one thread each can never wait for one another in a
circle; computing is done as early as possible in between.
"""

from collections.abc import Callable, Sequence

from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.target import Target
from appliance.compiler.memoryx.batches import ready_batches
from appliance.compiler.memoryx.commits import Commits, Event
from appliance.compiler.memoryx.exchanges import Exchanges
from appliance.compiler.memoryx.frontier import Frontier
from appliance.compiler.memoryx.kept import keep_late_gradients
from appliance.compiler.memoryx.reads import Reads
from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.groups import Bundle, KernelTable, Numbers
from appliance.compiler.partition.shards import Sharing, order
from appliance.compiler.partition.waits import inputs_of
from appliance.compiler.wafer.drops import add_drops
from appliance.compiler.wafer.schedule import WaferSchedule
from cirh.dialect import types
from cirh.dialect.operations import func_of
from cirh.modules.graph import extract
from cirh.text.printer import print_module
from nodes.steps.schedule import WEIGHTS_AHEAD
from wsc.v1 import plan_pb2


class ShardScheduler:
    """Makes the program of one shard."""

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
        self._have: set[SSAValue] = set(sharing.states[shard])
        self._todo = dict.fromkeys(order((op for op in sharing.ops[shard] if op not in sharing.sunk), cut))
        self._reads = Reads(sharing, shard, list(self._todo))
        self._frontier = Frontier(self._todo, self._reads)
        self._frontier.add(self._have)
        self._loads = [
            Event(load.bundle, load.position) for load in wafer.loads if load.bundle.group.source_shard == shard
        ]
        outputs = [output] if output is not None and shard == 0 else []
        self._others = [Event(bundle) for bundle in (*exchanges.from_shard(shard), *outputs)]
        self._exchange_inputs = exchanges.to_shard(shard)
        self._commits = Commits(cut, sharing, shard, self._reads, self._loads, self._others, wafer.last_read)

    def schedule(self) -> plan_pb2.MemoryXPlan:
        """The program. CompileError if there is no order in which it could be done."""
        receives = [d for d in self._wafer.departures if self._shard in d.bundle.group.shards]
        for departure in receives:
            self._send_loads(departure.position + self._target.prefetch_layers, needed=departure.position)
            self._run_ready()
            self._receive(departure.bundle)
            self._commits.released = departure.position
            self._run_ready()
        self._send_loads(len(self._wafer.work), needed=len(self._wafer.work))
        self._run_ready()
        while self._exchange_inputs:
            self._receive(self._exchange_inputs.pop(0))
            self._run_ready()
        # What is left waits for a message from the wafers that they never send.
        self._commits.wait_for_wafers = False
        self._run_ready()
        if not all(event.sent for event in self._loads):
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

    # -- messages

    def _receive(self, bundle: Bundle) -> None:
        self._groups[bundle.id] = bundle.group
        self._plan.instructions.add().receive.group = bundle.id
        self._have.update(bundle.values)
        self._frontier.add(bundle.values)
        self._commits.received(bundle.values)

    def _send(self, event: Event) -> None:
        event.sent = True
        self._groups[event.bundle.id] = event.bundle.group
        self._plan.instructions.add().send.group = event.bundle.id

    def _send_loads(self, up_to: int, *, needed: int) -> None:
        """Sends weights in the order in which the wafers wait for them; what they are made of is computed first.

        up_to: the last segment for which weights are sent, if they can be; needed: the last one for which they must,
        because the wafers send nothing more to this shard without them. No more go ahead of those than the window has
        room for: waiting for the wafers to take some, the shard would keep the gradients for which the wafers wait.
        """
        ahead = sum(1 for event in self._loads if event.sent and event.position > needed)
        for event in self._loads:
            if event.sent:
                continue
            if event.position > up_to or (event.position > needed and ahead >= WEIGHTS_AHEAD):
                return
            ahead += event.position > needed
            self._compute(event.bundle.values)
            if event.position <= needed and not self._have.issuperset(event.bundle.values):
                self._receive_for(event.bundle.values)
            if not self._have.issuperset(event.bundle.values):
                return  # it depends on a reduction that is still to come
            self._send(event)

    def _receive_for(self, values: Sequence[SSAValue]) -> None:
        """Waits for what these values need from other shards, when everything that those may need has been sent."""
        self._run_ready()
        behind = self._behind(values)
        for bundle in list(self._exchange_inputs):
            if any(value in behind for value in bundle.values):
                self._exchange_inputs.remove(bundle)
                self._receive(bundle)
                self._run_ready()

    def _compute(self, values: Sequence[SSAValue]) -> None:
        """Runs what these values need, if it can run now."""
        behind = self._behind(values)
        self._run_ready(lambda op: any(result in behind for result in op.results))

    def _behind(self, values: Sequence[SSAValue]) -> set[SSAValue]:
        """These values and all that they are made of on this shard, where it is not there yet."""
        behind: set[SSAValue] = set()
        stack = [value for value in values if value not in self._have]
        while stack:
            value = stack.pop()
            if value in behind:
                continue
            behind.add(value)
            if isinstance(value.owner, Operation) and value.owner in self._sharing.ops[self._shard]:
                stack.extend(operand for operand in value.owner.operands if operand not in self._have)
        return behind

    # -- computing

    def _run_ready(self, allowed: Callable[[Operation], bool] = lambda op: True) -> None:
        """Runs everything that can run, joined to few kernels; sends exchanges and outputs as they are complete.

        Outputs too, since who takes them needs a core, which at the end of a step the next weights wait for.
        """
        while True:
            batches = ready_batches(
                self._frontier,
                self._reads,
                self._have,
                lambda op: allowed(op) and self._commits.may_run(op),
                self._commits.leaves,
            )
            if not batches:
                break
            for batch in batches:
                self._run(batch)
        for event in self._others:
            if not event.sent and self._have.issuperset(event.bundle.values):
                self._send(event)

    def _run(self, ops: list[Operation]) -> None:
        chosen = set(ops)
        for op in ops:
            del self._todo[op]
        self._frontier.remove(ops)
        with_sunk = self._reads.with_repeated(ops)
        made = [result for op in ops for result in op.results]
        inputs = inputs_of(with_sunk)
        outputs = [
            value
            for value in made
            if self._commits.leaves(value) or any(reader not in chosen for reader in self._reads.readers(value))
        ]
        run = self._plan.instructions.add().run
        run.kernel = self._kernels.number(print_module(extract(with_sunk, inputs, outputs), locations=False))
        run.inputs.extend(self._numbers.values(inputs))
        run.outputs.extend(self._numbers.values(outputs))
        states = [self._commits.in_place(value, self._todo.keys()) for value in outputs]
        if any(state is not None for state in states):
            run.commits.extend(0 if state is None else self._numbers.value(state) for state in states)
        self._have.update(made)

    # -- the end

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
        self._plan.groups.extend(self._groups.values())
        self._plan.kernels.extend(self._kernels.messages())
        states = {slot.value for slot in self._plan.states}
        sends = [i.send.group for i in self._plan.instructions if i.WhichOneof("kind") == "send"]
        sent = {member.value for group in sends for member in self._groups[group].members}
        committed = {i.commit.value for i in self._plan.instructions if i.WhichOneof("kind") == "commit"}
        add_drops(self._plan.instructions, states | sent | committed)
        keep_late_gradients(self._plan)
