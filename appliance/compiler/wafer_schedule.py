"""The wafer's program: receive, run the segments, send what is to be reduced.

Forward and backward pass come in the order of the trace; weights are waited for just before the first segment that
reads them, and stay if they are read again soon. Gradients are sent after the segment that makes them, so after that
segment's last read of the weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from xdsl.ir import Operation, SSAValue

from appliance.compiler.cut import Cut
from appliance.compiler.errors import CompileError
from appliance.compiler.groups import REDUCTIONS, Bundle, KernelTable, Numbers, has_room
from appliance.compiler.layers import Segment, closure, inputs_of, partition, waits_of
from appliance.compiler.local import Localiser
from appliance.compiler.shards import Sharing
from appliance.compiler.target import Target
from cirh import types
from cirh.graph import func_of
from cirh.printer import print_module
from wsc.v1 import plan_pb2


@dataclass(slots=True, eq=False)
class Work:
    """A segment with all that its kernel reads and makes for others."""

    segment: Segment
    ops: list[Operation]
    inputs: list[SSAValue]
    outputs: list[SSAValue] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WaferSchedule:
    """The wafer's part of a plan, and what MemoryX must know of its order."""

    plan: plan_pb2.WaferPlan
    batch: plan_pb2.Group
    work: list[Work]
    weights: list[tuple[int, Bundle]]  # (segment before which it is received, group), in order; reloads included
    reductions: list[tuple[int, Bundle]]  # (segment after which it is sent, group), in order
    last_read: Mapping[SSAValue, int]  # the last segment that reads a streamed value
    in_step: frozenset[SSAValue]  # streamed values that depend on reductions of the same step
    localiser: Localiser


def schedule_wafer(cut: Cut, sharing: Sharing, target: Target, numbers: Numbers) -> WaferSchedule:
    """Makes the program."""
    localiser = Localiser(cut.sharding)
    work = _make_work(cut)
    reads = _reads(work)
    in_step = _depends_on_reductions(cut)
    weights = _weights(cut, sharing, target, numbers, reads, in_step)
    tokens, batch = _tokens(sharing, numbers), _batch(cut, numbers, localiser)
    reductions = _reductions(cut, sharing, numbers, localiser, work)
    plan = plan_pb2.WaferPlan()
    _Assembler(cut, numbers, localiser, plan).assemble(batch, tokens, work, weights, reductions)
    used_tokens = [(-1, token) for token in tokens if any(i.receive.group == token.id for i in plan.instructions)]
    return WaferSchedule(
        plan=plan,
        batch=batch.group,
        work=work,
        weights=[*used_tokens, *weights],
        reductions=reductions,
        last_read={value: max(where) for value, where in reads.items()},
        in_step=in_step,
        localiser=localiser,
    )


def _make_work(cut: Cut) -> list[Work]:
    work = []
    for segment in partition(cut):
        ops = closure(segment.ops, cut.sunk)
        work.append(Work(segment, ops, inputs_of(ops)))
    leaving = set(cut.sharding.reduced) | {value for _, value in cut.outputs if cut.sharding.used(value).is_sharded}
    read = {value for item in work for value in item.inputs}
    for item in work:
        made = [result for op in item.segment.ops for result in op.results]
        item.outputs = [value for value in made if value in leaving or value in read]
    return work


def _reads(work: list[Work]) -> dict[SSAValue, list[int]]:
    """The segments that read each value that comes from elsewhere."""
    reads: dict[SSAValue, list[int]] = {}
    for position, item in enumerate(work):
        for value in item.inputs:
            reads.setdefault(value, []).append(position)
    return reads


def _depends_on_reductions(cut: Cut) -> frozenset[SSAValue]:
    """MemoryX values that are known only when something of the same step has been reduced."""
    late: set[SSAValue] = set()
    for op in cut.memoryx_ops:
        if any(operand in late or operand in cut.sharding.reduced for operand in op.operands):
            late.update(op.results)
    return frozenset(late)


def _weights(
    cut: Cut,
    sharing: Sharing,
    target: Target,
    numbers: Numbers,
    reads: Mapping[SSAValue, list[int]],
    in_step: frozenset[SSAValue],
) -> list[tuple[int, Bundle]]:
    """Weights groups with the segments before which they are received, in order."""
    streamed = [value for value in cut.streamed if value in reads]
    open_bundles: dict[tuple[object, ...], Bundle] = {}
    bundles: list[tuple[tuple[int, ...], Bundle]] = []
    for value in sorted(streamed, key=lambda value: reads[value][0]):
        loads = _loads(reads[value], target.prefetch_layers)
        shard = sharing.source(value)
        type = types.tensor_type(types.shape(value), types.dtype(value))
        # Single loads may differ in when they are needed: the earliest counts. What comes late travels alone.
        key = (shard, loads if len(loads) > 1 else (), value if value in in_step else None)
        bundle = open_bundles.get(key)
        if bundle is None or not has_room(bundle, type):
            group = plan_pb2.Group(id=numbers.group(), kind=plan_pb2.GROUP_KIND_WEIGHTS, source_shard=shard)
            bundle = open_bundles[key] = Bundle(group)
            bundles.append((loads, bundle))
        bundle.add(numbers, value, type)
    return sorted(((load, bundle) for loads, bundle in bundles for load in loads), key=lambda item: item[0])


def _loads(reads: list[int], prefetch_layers: int) -> tuple[int, ...]:
    """The segments before which a value is loaded: the first that reads it, and those after a long gap."""
    loads = [reads[0]]
    for before, now in pairwise(reads):
        if now - before > prefetch_layers:
            loads.append(now)
    return tuple(loads)


def _tokens(sharing: Sharing, numbers: Numbers) -> list[Bundle]:
    return [
        Bundle(plan_pb2.Group(id=numbers.group(), kind=plan_pb2.GROUP_KIND_WEIGHTS, source_shard=shard))
        for shard in range(sharing.num_shards)
    ]


def _batch(cut: Cut, numbers: Numbers, localiser: Localiser) -> Bundle:
    """All inputs, in the order of the batch, whether the step reads them or not."""
    bundle = Bundle(plan_pb2.Group(id=numbers.group(), kind=plan_pb2.GROUP_KIND_BATCH))
    arguments = func_of(cut.module).block.args
    for argument in cut.names.inputs:
        value = arguments[argument.argument]
        bundle.add(numbers, value, localiser.type_of(value))
    return bundle


def _reductions(
    cut: Cut, sharing: Sharing, numbers: Numbers, localiser: Localiser, work: list[Work]
) -> list[tuple[int, Bundle]]:
    """Reduction groups with the segments after which they are sent, in order."""
    outputs = {value for _, value in cut.outputs}
    waited = {value for op in cut.wafer_ops for value in waits_of(cut, op)}
    open_bundles: dict[tuple[object, ...], tuple[int, Bundle]] = {}
    found: dict[int, tuple[int, Bundle]] = {}
    for position, item in enumerate(work):
        for value in item.outputs:
            type = localiser.type_of(value)
            group = plan_pb2.Group(kind=plan_pb2.GROUP_KIND_REDUCTION)
            if value in cut.sharding.reduced:
                group.reduction = REDUCTIONS[cut.sharding.placements[value].reduction]
                group.shards.extend(s for s in range(sharing.num_shards) if _is_read(cut, sharing, s, value))
                group.to_wafers = value in waited
                group.to_coordinator = value in outputs
                if not group.shards and not group.to_wafers and not group.to_coordinator:
                    continue
            elif value in outputs:
                group.reduction = plan_pb2.REDUCTION_GATHER
                group.to_coordinator = True
            else:
                continue
            # What the wafers wait for is sent at once; a gathered tensor travels alone.
            alone = group.reduction == plan_pb2.REDUCTION_GATHER
            key = (
                types.dtype(type),
                group.reduction,
                tuple(group.shards),
                group.to_coordinator,
                (position if group.to_wafers else -1),
                value if alone else None,
            )
            before = open_bundles.get(key)
            if before is None or not has_room(before[1], type):
                group.id = numbers.group()
                bundle = Bundle(group)
            else:
                bundle = before[1]
            bundle.add(numbers, value, type)
            if alone:
                bundle.group.nbytes *= cut.sharding.num_csx
            open_bundles[key] = found[bundle.id] = (position, bundle)
    return sorted(found.values(), key=lambda item: item[0])


def _is_read(cut: Cut, sharing: Sharing, shard: int, value: SSAValue) -> bool:
    """Whether a shard reads a reduced value: in an operation, or as the next value of a state that it keeps."""
    if any(use.operation in sharing.ops[shard] for use in value.uses):
        return True
    return any(cut.new_states.get(state) is value for state in sharing.states[shard])


class _Assembler:
    """Puts the instructions in order."""

    def __init__(self, cut: Cut, numbers: Numbers, localiser: Localiser, plan: plan_pb2.WaferPlan) -> None:
        self._cut = cut
        self._numbers = numbers
        self._localiser = localiser
        self._plan = plan
        self._kernels = KernelTable()
        self._groups: dict[int, plan_pb2.Group] = {}

    def assemble(
        self,
        batch: Bundle,
        tokens: list[Bundle],
        work: list[Work],
        weights: list[tuple[int, Bundle]],
        reductions: list[tuple[int, Bundle]],
    ) -> None:
        self._receive(batch)
        for shard in _unheard_shards(weights, reductions):
            self._receive(tokens[shard])
        back = {value: bundle for _, bundle in reductions if bundle.group.to_wafers for value in bundle.values}
        received: set[int] = set()
        for position, item in enumerate(work):
            for load, bundle in weights:
                if load == position:
                    self._receive(bundle)
            for op in item.ops:
                for value in waits_of(self._cut, op):
                    if back[value].id not in received:
                        received.add(back[value].id)
                        self._receive(back[value])
            self._run(item)
            for sent_after, bundle in reductions:
                if sent_after == position:
                    self._groups[bundle.id] = bundle.group
                    self._plan.instructions.add().send.group = bundle.id
        self._plan.groups.extend(self._groups.values())
        self._plan.kernels.extend(self._kernels.messages())
        kept = {self._numbers.value(value) for _, bundle in reductions for value in bundle.values}
        add_drops(self._plan.instructions, kept, {bundle.id: bundle for _, bundle in weights})

    def _receive(self, bundle: Bundle) -> None:
        self._groups[bundle.id] = bundle.group
        self._plan.instructions.add().receive.group = bundle.id

    def _run(self, item: Work) -> None:
        module = self._localiser.kernel(item.ops, item.inputs, item.outputs)
        run = self._plan.instructions.add().run
        run.kernel = self._kernels.number(print_module(module, locations=False))
        run.inputs.extend(self._numbers.values(item.inputs))
        run.outputs.extend(self._numbers.values(item.outputs))
        run.layer = item.segment.label


def _unheard_shards(weights: list[tuple[int, Bundle]], reductions: list[tuple[int, Bundle]]) -> list[int]:
    """Shards that get a reduction before the wafer has received anything from them in this step.

    What was sent to them in the step before may still be read: the wafer waits for the shard's token first.
    """
    unheard = []
    for sent_after, bundle in reductions:
        heard = {weight.group.source_shard for load, weight in weights if load < sent_after}
        unheard += [shard for shard in bundle.group.shards if shard not in heard and shard not in unheard]
    return unheard


def add_drops(instructions: Sequence[plan_pb2.Instruction], kept: set[int], weights: Mapping[int, Bundle]) -> None:
    """Notes with each Run the values that nothing reads behind it, up to their next load."""
    live: set[int] = set(kept)
    for instruction in reversed(instructions):
        match instruction.WhichOneof("kind"):
            case "receive":
                bundle = weights.get(instruction.receive.group)
                if bundle is not None:
                    live -= {member.value for member in bundle.group.members}
            case "run":
                read = list(dict.fromkeys(instruction.run.inputs))
                instruction.run.drops.extend(value for value in read if value not in live)
                live.update(read)


def check_nothing_missing(cut: Cut, sharing: Sharing) -> None:
    """Every output must come from somewhere."""
    for name, value in cut.outputs:
        placement = cut.sharding.used(value)
        partial = value in cut.sharding.reduced
        made = isinstance(value.owner, Operation) and value.owner in sharing.ops[0]
        if not (partial or placement.is_sharded or made or value in sharing.home or value in sharing.states[0]):
            raise CompileError(f"{name} is a constant; give the closure its value instead")
