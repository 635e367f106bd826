"""A shard's program: send weights, take reduced gradients, update state as soon as all that an update needs is there.

Messages come in an order that all roles share, so that roles with one thread each can never wait for one another in a
circle; computing is done as early as possible in between. A state is overwritten when nothing reads its old value any
more: on this shard, in a message still to be sent, or on a wafer. The last is known by the reduction that every wafer
sends after its last read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from xdsl.ir import Operation, SSAValue

from appliance.compiler.cut import VIEWS, Cut, is_constant
from appliance.compiler.errors import CompileError
from appliance.compiler.groups import Bundle, KernelTable, Numbers
from appliance.compiler.shards import Sharing, elements, order
from appliance.compiler.target import Target
from appliance.compiler.wafer_schedule import WaferSchedule
from cirh import types
from cirh.graph import extract, func_of
from cirh.printer import print_module
from cirh.table import spec
from interconnect.frame import INLINE_BYTES
from wsc.v1 import plan_pb2


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Groups of numbers that one shard's components make and other shards read."""

    bundles: list[Bundle]

    def from_shard(self, shard: int) -> list[Bundle]:
        return [bundle for bundle in self.bundles if bundle.group.source_shard == shard]

    def to_shard(self, shard: int) -> list[Bundle]:
        return [bundle for bundle in self.bundles if shard in bundle.group.shards]


def find_exchanges(cut: Cut, sharing: Sharing, numbers: Numbers) -> Exchanges:
    """Groups by source, destinations and depth: how many exchanges a number depends on, one after the other."""
    depth: dict[SSAValue, int] = {}
    found: dict[tuple[int, tuple[int, ...], int], Bundle] = {}
    sent: dict[SSAValue, int] = {}
    for op in cut.memoryx_ops:
        mine = sharing.home.get(op.results[0])
        level = 0
        for operand in op.operands:
            crosses = operand in sent and sharing.home.get(operand) != mine
            level = max(level, depth.get(operand, 0) + crosses)
        for value in op.results:
            depth[value] = level
            if op not in sharing.component or elements(value) > 1:
                continue
            readers = tuple(
                shard
                for shard in range(sharing.num_shards)
                if shard != sharing.home[value] and any(use.operation in sharing.ops[shard] for use in value.uses)
            )
            if readers:
                sent[value] = level
                key = (sharing.home[value], readers, level)
                if key not in found:
                    group = plan_pb2.Group(
                        id=numbers.group(),
                        kind=plan_pb2.GROUP_KIND_EXCHANGE,
                        source_shard=key[0],
                        shards=readers,
                    )
                    found[key] = Bundle(group)
                found[key].add(numbers, value, types.tensor_type(types.shape(value), types.dtype(value)))
    return Exchanges([found[key] for key in sorted(found, key=lambda key: (key[2], key[0], key[1]))])


def find_output(cut: Cut, numbers: Numbers) -> Bundle | None:
    """The group of what shard 0 sends to the client."""
    bundle = Bundle(plan_pb2.Group(kind=plan_pb2.GROUP_KIND_OUTPUT))
    for _, value in cut.outputs:
        if value not in cut.sharding.reduced and not cut.sharding.used(value).is_sharded and value not in bundle.values:
            bundle.add(numbers, value, types.tensor_type(types.shape(value), types.dtype(value)))
    if not bundle.values:
        return None
    bundle.group.id = numbers.group()
    return bundle


@dataclass(slots=True, eq=False)
class _Event:
    """A message of the step: sent as soon as its values are there, or waited for."""

    bundle: Bundle
    position: int  # segment of the wafer's program
    sent: bool = False


# Component, and the shape of element-wise work in it.
_Kind = tuple[int | None, tuple[int, ...] | None]


def _is_elementwise(kind: _Kind) -> bool:
    return kind[1] is not None


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
        self._states = set(sharing.states[shard])
        self._have: set[SSAValue] = set(self._states)
        self._todo = order((op for op in sharing.ops[shard] if op not in sharing.sunk), cut)
        self._loads = [_Event(b, at) for at, b in wafer.weights if b.group.source_shard == shard]
        self._exchanged = [_Event(bundle, 0) for bundle in exchanges.from_shard(shard)]
        self._output = _Event(output, 0) if output is not None and shard == 0 else None
        self._released = -1  # every wafer has finished this segment
        self._unreleased_too = False
        self._late_commits: list[tuple[SSAValue, SSAValue]] = []
        self._committed: set[SSAValue] = set()
        self._updates: dict[SSAValue, list[SSAValue]] = {}
        for state in sharing.states[shard]:
            if state in cut.new_states:
                self._updates.setdefault(cut.new_states[state], []).append(state)
        self._roots = _view_roots(self._todo)
        self._exchange_inputs = exchanges.to_shard(shard)

    def schedule(self) -> plan_pb2.MemoryXPlan:
        """The program."""
        receives = [(at, bundle) for at, bundle in self._wafer.reductions if self._shard in bundle.group.shards]
        first = receives[0][0] if receives else len(self._wafer.work)
        self._send_loads(first + self._target.prefetch_layers)
        self._run_ready()
        for position, bundle in receives:
            self._send_loads(position + self._target.prefetch_layers)
            self._receive(bundle)
            self._released = position
            self._run_ready()
        self._send_loads(len(self._wafer.work))
        for bundle in self._exchange_inputs:
            self._receive(bundle)
            self._run_ready()
        # What is left waits for a message from the wafers that they never send.
        self._unreleased_too = True
        self._run_ready()
        assert not self._todo, f"shard {self._shard} cannot compute {self._todo[0].name}"
        if self._output is not None:
            self._send(self._output)
        self._commit_late()
        self._check_computed()
        self._finish()
        return self._plan

    # -- messages

    def _receive(self, bundle: Bundle) -> None:
        self._groups[bundle.id] = bundle.group
        self._plan.instructions.add().receive.group = bundle.id
        self._have.update(bundle.values)
        for value in bundle.values:
            for state in self._updates.get(value, ()):
                self._late_commits.append((value, state))

    def _send(self, event: _Event) -> None:
        event.sent = True
        self._groups[event.bundle.id] = event.bundle.group
        self._plan.instructions.add().send.group = event.bundle.id

    def _send_loads(self, up_to: int) -> None:
        """Sends weights in the order in which the wafers wait for them; what they need is computed first."""
        for event in self._loads:
            if event.sent:
                continue
            if event.position > up_to:
                return
            self._compute(event.bundle.values)
            if not self._have.issuperset(event.bundle.values):
                return  # it depends on a reduction that is still to come
            self._send(event)

    def _compute(self, values: Sequence[SSAValue]) -> None:
        """Runs what these values need, if it can run now."""
        needed: set[Operation] = set()
        stack = [value for value in values if value not in self._have]
        while stack:
            owner = stack.pop().owner
            if isinstance(owner, Operation) and owner not in needed and owner in self._sharing.ops[self._shard]:
                needed.add(owner)
                stack.extend(operand for operand in owner.operands if operand not in self._have)
        if needed:
            self._run_ready(lambda op: op in needed)

    # -- computing

    def _run_ready(self, allowed: Callable[[Operation], bool] = lambda op: True) -> None:
        """Runs everything that can run, joined to few kernels; sends exchanges as they are complete."""
        while True:
            batches = self._ready_batches(allowed)
            if not batches:
                break
            for batch in batches:
                self._run(batch)
        for event in self._exchanged:
            if not event.sent and self._have.issuperset(event.bundle.values):
                self._send(event)

    def _ready_batches(self, allowed: Callable[[Operation], bool]) -> list[list[Operation]]:
        """For each kind of work that can go on now, all of it."""
        done: set[SSAValue] = set()
        batches: dict[_Kind, list[Operation]] = {}
        maker: dict[SSAValue, _Kind] = {}
        for op in self._todo:
            if not allowed(op) or not self._may_run(op):
                continue
            kind = self._kind(op)
            operands = [value for value in self._operands(op) if value not in self._have]
            # Within a batch operations may follow one another; between batches they must not, in this round.
            if all(value in done and maker[value] == kind for value in operands):
                batches.setdefault(kind, []).append(op)
                done.update(op.results)
                maker.update(dict.fromkeys(op.results, kind))
        whole = (self._without_loose_ends(kind, batch) for kind, batch in batches.items())
        return [batch for batch in whole if batch]

    def _without_loose_ends(self, kind: _Kind, batch: list[Operation]) -> list[Operation]:
        """Of an element-wise batch, what leads to a value that is wanted outside of it.

        The rest waits for the operation that reads it: an update is one kernel, which passes over its tensors once.
        """
        if not _is_elementwise(kind):
            return batch
        needed: set[Operation] = set()
        for op in reversed(batch):
            read = [reader for value in op.results for reader in self._readers(value)]
            wanted = any(value in self._updates or self._is_sent(value) for value in op.results)
            if wanted or any(reader in needed or self._kind(reader) != kind for reader in read):
                needed.add(op)
        return [op for op in batch if op in needed]

    def _is_sent(self, value: SSAValue) -> bool:
        return any(value in event.bundle.values for event in self._messages())

    def _kind(self, op: Operation) -> _Kind:
        """What can be one kernel: element-wise work on tensors of one shape in one component; or the rest of it."""
        component = self._sharing.component.get(op)
        shape = types.shape(op.results[0])
        return (component, shape if spec(op.name).pointwise and component is not None else None)

    def _operands(self, op: Operation) -> list[SSAValue]:
        """What an operation reads, through the broadcasts that are repeated with it."""
        operands: list[SSAValue] = []
        for value in op.operands:
            owner = value.owner
            if isinstance(owner, Operation) and owner in self._sharing.sunk:
                operands += [inner for inner in owner.operands if not is_constant(inner)]
            elif not is_constant(value):
                operands.append(value)
        return operands

    def _may_run(self, op: Operation) -> bool:
        """An update waits until the wafers have read what it overwrites."""
        if self._unreleased_too:
            return True
        return all(self._is_released(state) for value in op.results for state in self._updates.get(value, ()))

    def _is_released(self, state: SSAValue) -> bool:
        events = [event for event in self._loads if state in event.bundle.values]
        if not all(event.sent for event in events):
            return False
        in_place = any(event.bundle.nbytes > INLINE_BYTES for event in events)
        return not in_place or self._wafer.last_read.get(state, -1) <= self._released

    def _run(self, ops: list[Operation]) -> None:
        chosen = set(ops)
        self._todo = [op for op in self._todo if op not in chosen]
        with_sunk = self._with_broadcasts(ops)
        made = [result for op in ops for result in op.results]
        made_here = {result for op in with_sunk for result in op.results}
        inputs = list(
            dict.fromkeys(
                value for op in with_sunk for value in op.operands if value not in made_here and not is_constant(value)
            )
        )
        outputs = [value for value in made if self._is_wanted_later(value, chosen)]
        run = self._plan.instructions.add().run
        run.kernel = self._kernels.number(print_module(extract(with_sunk, inputs, outputs), locations=False))
        run.inputs.extend(self._numbers.values(inputs))
        run.outputs.extend(self._numbers.values(outputs))
        commits = [self._commit_of(value) for value in outputs]
        if any(commits):
            run.commits.extend(commits)
        self._have.update(made)

    def _with_broadcasts(self, ops: list[Operation]) -> list[Operation]:
        result: list[Operation] = []
        for op in ops:
            for operand in op.operands:
                owner = operand.owner
                if isinstance(owner, Operation) and owner in self._sharing.sunk and owner not in result:
                    result.append(owner)
            result.append(op)
        return result

    def _is_wanted_later(self, value: SSAValue, here: set[Operation]) -> bool:
        if value in self._updates or self._is_sent(value):
            return True
        return any(reader not in here for reader in self._readers(value))

    def _messages(self) -> list[_Event]:
        output = [self._output] if self._output is not None else []
        return [event for event in (*self._loads, *self._exchanged, *output) if not event.sent]

    def _readers(self, value: SSAValue) -> list[Operation]:
        """Operations of this shard that read a value, through broadcasts too."""
        readers: list[Operation] = []
        for use in value.uses:
            if use.operation in self._sharing.sunk:
                readers += [inner.operation for inner in use.operation.results[0].uses]
            else:
                readers.append(use.operation)
        return [op for op in readers if op in self._sharing.ops[self._shard]]

    # -- commits

    def _commit_of(self, value: SSAValue) -> int:
        """The state whose buffer takes a result at once; 0 if none, or if its old value is still read."""
        for state in self._updates.get(value, ()):
            if state not in self._committed and self._is_released(state) and self._is_dead(state):
                self._committed.add(state)
                rest = [other for other in self._updates[value] if other is not state]
                self._late_commits += [(value, other) for other in rest]
                return self._numbers.value(state)
        self._late_commits += [(value, state) for state in self._updates.get(value, ())]
        return 0

    def _is_dead(self, state: SSAValue) -> bool:
        """Whether nothing reads the old value any more, or a view of it."""
        aliases = [state, *(value for value, root in self._roots.items() if root is state)]
        todo = set(self._todo)
        if any(reader in todo for alias in aliases for reader in self._readers(alias)):
            return False
        return not any(self._is_sent(alias) for alias in aliases)

    def _commit_late(self) -> None:
        for value, state in self._late_commits:
            if not self._is_released(state):
                name = self._name(state)
                raise CompileError(
                    f"{name} is read by the wafers and replaced without anything that depends on the batch; "
                    "make its next value depend on the step's loss or gradients, or use max_wgt_servers=1"
                )
            commit = self._plan.instructions.add().commit
            commit.value, commit.state = self._numbers.value(value), self._numbers.value(state)

    def _check_computed(self) -> None:
        """What is computed and streamed is written again at the start of the next step, in the same place."""
        for event in self._loads:
            for value in event.bundle.values:
                if value not in self._states and event.bundle.nbytes > INLINE_BYTES:
                    read = self._wafer.last_read.get(value, -1)
                    assert read <= self._released, "no reduction says that the wafers have read a computed value"

    def _name(self, state: SSAValue) -> str:
        arguments = func_of(self._cut.module).block.args
        return next(named.name for named in self._cut.names.states if arguments[named.argument] is state)

    # -- the end

    def _finish(self) -> None:
        arguments = func_of(self._cut.module).block.args
        for named in self._cut.names.states:
            state = arguments[named.argument]
            if state in self._states:
                self._plan.states.add(
                    value=self._numbers.value(state),
                    name=named.name,
                    type=types.to_proto(state),
                    replicated=state in self._sharing.replicated,
                )
        self._plan.groups.extend(self._groups.values())
        self._plan.kernels.extend(self._kernels.messages())
        states = {slot.value for slot in self._plan.states}
        sent = {member.value for group in self._plan.groups for member in group.members}
        committed = {i.commit.value for i in self._plan.instructions if i.WhichOneof("kind") == "commit"}
        _add_drops(self._plan, states | sent | committed)


def _view_roots(ops: Sequence[Operation]) -> Mapping[SSAValue, SSAValue]:
    """Of each view, the value whose memory it shares."""
    roots: dict[SSAValue, SSAValue] = {}
    for op in ops:
        if op.name in VIEWS:
            roots[op.results[0]] = roots.get(op.operands[0], op.operands[0])
    return roots


def _add_drops(plan: plan_pb2.MemoryXPlan, kept: set[int]) -> None:
    """Notes with each Run the values that nothing reads behind it."""
    live = set(kept)
    for instruction in reversed(plan.instructions):
        if instruction.WhichOneof("kind") == "run":
            read = list(dict.fromkeys(instruction.run.inputs))
            instruction.run.drops.extend(value for value in read if value not in live)
            live.update(read)
