"""Builds the graph of a step in layer pipelined mode: segments, updates in their layers' regions, and messages."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.target import Target
from appliance.compiler.cost.kernel_profile import loop_time, operations_time
from appliance.compiler.cost.machine_model import MachineModel
from appliance.compiler.memoryx_schedule.reads import Frontier, Reads, ready_batches
from appliance.compiler.partition.cut import Cut, num_elements
from appliance.compiler.partition.groups import Bundle, Numbers
from appliance.compiler.partition.layers import Waits, inputs_of
from appliance.compiler.partition.local import Localiser
from appliance.compiler.partition.shards import divide, order
from appliance.compiler.pipelined.graph import UPDATE, RegionGraph, RegionWork, Side, WorkKind, repeat_updates
from appliance.compiler.pipelined.regions import NOMINAL, Regions, find_regions
from appliance.compiler.pipelined.schedule import SHARED
from appliance.compiler.wafer_schedule.schedule import make_segment_runs
from appliance.compiler.wafer_schedule.segment_runs import SegmentRun, num_of_whole_batch
from appliance.compiler.wafer_schedule.streams import make_batch
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.operations import body_ops, func_of
from waferbox.cirh.modules.graph import extract
from waferbox.cirh.modules.sources import sources_of
from waferbox.cirh.table.lookup import spec
from waferbox.cirh.text.printer import print_module
from wsc.v1 import plan_pb2

# --- Updates ----------------------------------------------------------------------------------------------------------
#
# A weight, its optimizer state and their update belong to the layer that reads the weight first. Single numbers (counts
# of steps, rates, norms) belong to the last region: it is idle when a step begins.


class Updates:
    """The operations that MemoryX runs in weight streaming, in batches of one kernel each, with their layers."""

    def __init__(self, cut: Cut, runs: Sequence[SegmentRun], target: Target, last_layer: str) -> None:
        """Prepares the batches.

        Args:
            cut: the step.
            runs: the segments, in order.
            target: of one shard.
            last_layer: the layer in which single numbers are computed.
        """
        self._cut = cut
        self._last_layer = last_layer
        self._sharing = divide(cut, target)
        todo = order((op for op in self._sharing.ops[0] if op not in self._sharing.sunk), cut)
        self._todo = dict.fromkeys(todo)
        self._reads = Reads(self._sharing, 0, todo)
        self._frontier = Frontier(self._todo, self._reads)
        arguments = func_of(cut.module).block.args
        self.states = [arguments[state.argument] for state in cut.names.states]
        self._available: set[SSAValue] = set(self.states)
        self._leaving = {*cut.new_states.values(), *cut.streamed, *(value for _, value in cut.outputs)}
        self._frontier.add(self._available)
        self._first_read = {value: run.segment.layer for run in reversed(runs) for value in run.inputs}
        self._made_in: dict[SSAValue, str] = {
            value: run.segment.layer for run in runs for op in run.ops for value in op.results
        }
        self._place = {layer: number for number, layer in enumerate(dict.fromkeys(w.segment.layer for w in runs))}
        self._component_of = {
            value: component
            for op, component in self._sharing.component.items()
            for value in (*op.operands, *op.results)
        }
        self._layers = self._find_layers()

    def after(self, values: Iterable[SSAValue]) -> Iterator[list[Operation]]:
        """The batches that can be run once these values are available, too."""
        values = list(values)
        self._available.update(values)
        self._frontier.add(values)
        while batches := ready_batches(
            self._frontier, self._reads, self._available, lambda op: True, self._leaving.__contains__
        ):
            for batch in batches:
                for op in batch:
                    del self._todo[op]
                self._frontier.remove(batch)
                self._available.update(result for op in batch for result in op.results)
                yield batch

    def closure(self, batch: Sequence[Operation]) -> list[Operation]:
        """A batch with the broadcasts that it reads, in order."""
        return self._reads.with_repeated(batch)

    def outputs(self, batch: Sequence[Operation]) -> list[SSAValue]:
        """The results of a batch that are read outside of it."""
        chosen = set(batch)
        return [
            value
            for op in batch
            for value in op.results
            if value in self._leaving or any(reader not in chosen for reader in self._reads.readers(value))
        ]

    def layer(self, batch: Sequence[Operation]) -> str:
        """The layer that a batch belongs to."""
        component = self.component(batch)
        return self._last_layer if component is None else self._layers[component]

    def component(self, batch: Sequence[Operation]) -> int | None:
        """The component (a weight with its optimizer state) that a batch belongs to; None: single numbers."""
        return self._sharing.component.get(batch[0])

    def layer_of_state(self, state: SSAValue) -> str:
        """The layer that a state belongs to."""
        if num_elements(state) == 1:
            return self._last_layer
        component = self._component_of.get(state, self._component_of.get(self._cut.new_states.get(state, state)))
        if component is not None:
            return self._layers[component]
        made = self._made_in.get(self._cut.new_states.get(state, state), self._last_layer)
        return self._first_read.get(state, made)

    def _find_layers(self) -> dict[int, str]:
        """By component: the layer that reads its values first, else the first that makes a gradient for it."""
        read: dict[int, list[str]] = {}
        made: dict[int, list[str]] = {}
        for op, component in self._sharing.component.items():
            values = [*op.operands, *op.results]
            read.setdefault(component, []).extend(self._first_read[v] for v in values if self._is_read(v))
            reduced = [value for value in op.operands if value in self._cut.sharding.reduced]
            made.setdefault(component, []).extend(self._made_in[value] for value in reduced)
        found = {}
        for component, layers in read.items():
            known = layers or made[component]
            found[component] = min(known, key=self._place.__getitem__, default=self._last_layer)
        return found

    def _is_read(self, value: SSAValue) -> bool:
        return num_elements(value) > 1 and value in self._first_read and value not in self._cut.sharding.reduced


# --- The graph --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Built:
    """A step that is ready to be scheduled.

    Attributes:
        graph: the work of the step.
        regions: the regions of the wafer.
        batch: the message of the batch.
        sends: the messages of the outputs.
        localiser: makes the kernels.
        parts_of_outputs: by output, the micro-batch whose value is sent: the last if each has one, else SHARED.
    """

    graph: RegionGraph
    regions: Regions
    batch: Bundle
    sends: Sequence[Bundle]
    localiser: Localiser
    parts_of_outputs: Mapping[SSAValue, int]


def build(cut: Cut, target: Target, numbers: Numbers) -> Built:
    """Builds the graph with its regions, and decides which updates overwrite their states in place."""
    localiser = Localiser(cut.sharding)
    waits = Waits(cut)
    runs = make_segment_runs(cut, waits)
    layers = list(dict.fromkeys(run.segment.layer for run in runs)) or [""]
    updates = Updates(cut, runs, replace(target, num_shards=1, pinned_shards={}), layers[-1])
    batch = make_batch(cut, numbers, localiser, target.num_parts)
    work = list(_Builder(cut, localiser, waits, runs, updates).work(batch, layers[0]))
    seconds = dict.fromkeys(layers, 0.0)
    repeated = repeat_updates(cut, work) if target.asynchronous_updates else frozenset()
    # Regions are those of one replica, which does its own micro-batches and its share of the updates.
    for item in work:
        times = target.micro_batches if item.of_each_micro_batch else 1 / target.num_replicas
        seconds[item.layer] += item.seconds * times
    regions = find_regions(seconds, target.wafer_cores // target.num_replicas, target.num_replicas)
    region_of = regions.region_of()
    for item in work:
        item.region = region_of[item.layer]
    _share_updates(work, target.num_replicas)
    last = target.num_parts - 1
    parts_of_outputs = {value: last if value in repeated else SHARED for _, value in cut.outputs}
    sends = _find_sends(cut, target, numbers, localiser, work, parts_of_outputs)
    graph = RegionGraph([*work, *sends], updates.states, body_ops(cut.module), repeated)
    _commit(cut, graph, updates)
    # Again, as sends and commits were added since.
    for item in graph.work:
        item.region = region_of[item.layer]
    bundles = [item.bundle for item in sends if item.bundle is not None]
    return Built(graph, regions, batch, bundles, localiser, parts_of_outputs)


class _Builder:
    """Makes the work of the regions in the order of the trace."""

    def __init__(
        self, cut: Cut, localiser: Localiser, waits: Waits, runs: Sequence[SegmentRun], updates: Updates
    ) -> None:
        self._cut = cut
        self._localiser = localiser
        self._runs = runs
        self._updates = updates
        self._whole = num_of_whole_batch(runs, waits, {})
        self._parts = cut.parts
        self._wanted = {value for op in cut.memoryx_ops for value in op.operands}
        self._wanted |= {value for run in runs for value in run.inputs} | set(cut.new_states.values())
        self._wanted |= {value for _, value in cut.outputs}
        self._seconds: dict[str, float] = {}  # by kernel

    def work(self, batch: Bundle, first_layer: str) -> Iterator[RegionWork]:
        makes = [(value, True) for value in batch.values]
        yield RegionWork(kind=WorkKind.RECEIVE, layer=first_layer, label="batch", reads=[], makes=makes, bundle=batch)
        yield from self._updates_after([])
        for position, run in enumerate(self._runs):
            outputs = [v for v in run.outputs if v not in self._cut.sharding.reduced or v in self._wanted]
            if outputs:
                module = self._localiser.kernel(run.ops, run.inputs, outputs)
                text = print_module(module, locations=False)
                yield RegionWork(
                    kind=WorkKind.BACKWARD if run.segment.backward else WorkKind.FORWARD,
                    layer=run.segment.layer,
                    label=run.segment.label,
                    reads=[self._side(value) for value in run.inputs],
                    makes=[self._side(value) for value in outputs],
                    kernel=text,
                    sources=sources_of(body_ops(module)),
                    seconds=self._time(text, module, operations_time),
                    of_whole_batch=position < self._whole,
                )
            yield from self._updates_after([v for v in outputs if v in self._cut.sharding.reduced])

    def _updates_after(self, values: Sequence[SSAValue]) -> Iterator[RegionWork]:
        for ops in self._updates.after(values):
            closure = self._updates.closure(ops)
            inputs, outputs = inputs_of(closure), self._updates.outputs(ops)
            module = extract(closure, inputs, outputs)
            text = print_module(module, locations=False)
            layer = self._updates.layer(ops)
            yield RegionWork(
                kind=WorkKind.UPDATE,
                layer=layer,
                label=f"{layer or 'model'}{UPDATE}",
                reads=[(value, False) for value in inputs],
                makes=[(value, False) for value in outputs],
                kernel=text,
                component=self._updates.component(ops),
                seconds=self._time(text, module, loop_time if _is_loop(closure) else operations_time),
            )

    def _side(self, value: SSAValue) -> Side:
        return value, value in self._parts

    def _time(self, text: str, module: ModuleOp, seconds: Callable[[ModuleOp, MachineModel], float]) -> float:
        if text not in self._seconds:
            self._seconds[text] = seconds(module, NOMINAL)
        return self._seconds[text]


def _share_updates(work: Sequence[RegionWork], num_replicas: int) -> None:
    """Divides the updates among the replicas, so that each has about the same work.

    All updates of a component go to one replica, where its states lie.
    """
    busy = [0.0] * num_replicas
    home: dict[int, int] = {}
    for item in work:
        if item.component is not None:
            item.replica = home.setdefault(item.component, busy.index(min(busy)))
            busy[item.replica] += item.seconds


def _is_loop(ops: Sequence[Operation]) -> bool:
    return all(spec(op.name).pointwise or op.name == "cirh.BroadcastInDim" for op in ops)


def _find_sends(
    cut: Cut,
    target: Target,
    numbers: Numbers,
    localiser: Localiser,
    work: Sequence[RegionWork],
    parts_of_outputs: Mapping[SSAValue, int],
) -> list[RegionWork]:
    """The messages of the outputs: one for each region that makes some, and one for each output that is gathered."""
    maker = {side: item for item in work for side in item.makes}
    together: dict[tuple[int, int], RegionWork] = {}
    sends: dict[SSAValue, RegionWork] = {}
    for value in dict.fromkeys(value for _, value in cut.outputs):
        gathered = cut.sharding.used(value).is_sharded and value not in cut.sharding.reduced
        home = maker[value, gathered]
        where = (home.replica, home.region)
        item = None if gathered else together.get(where)
        if item is None:
            group = plan_pb2.Group(id=numbers.group(), kind=plan_pb2.GROUP_KIND_OUTPUT, layer=home.label)
            item = RegionWork(
                kind=WorkKind.SEND, layer=home.layer, label="outputs", reads=[], makes=[], bundle=Bundle(group)
            )
            item.replica = home.replica
        assert item.bundle is not None
        item.reads.append((value, gathered))
        if gathered:
            item.bundle.group.reduction = plan_pb2.REDUCTION_GATHER
            item.bundle.add_parts(numbers, value, localiser.type_of(value), target.num_parts)
        else:
            together[where] = item
            type = types.tensor_type(types.shape(value), types.dtype(value))
            item.bundle.add(numbers, value, type, parts_of_outputs[value])
        sends[value] = item
    return list(dict.fromkeys(sends.values()))


def _commit(cut: Cut, graph: RegionGraph, updates: Updates) -> None:
    """Makes each state take its new value: in place by the update that makes it, if possible, else by a later copy.

    An update cannot write in place if the state lies in another layer, if it writes the same value over another state,
    or if a reader of the old value waits for it.
    """
    makers = {value: item for item in graph.work if item.kind is WorkKind.UPDATE for value, _ in item.makes}
    for state, value in cut.new_states.items():
        item = makers.get(value)
        layer = updates.layer_of_state(state)
        fits = item is not None and item.layer == layer and value not in item.commits
        if item is None or not fits or not graph.commit_in_place(item, value, state):
            graph.commit_later(value, state, layer, f"{layer or 'model'}{UPDATE}")
