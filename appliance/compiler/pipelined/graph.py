"""The work of a step in layer pipelined mode as a graph: what reads what, and what must be read before it changes.

Values have two sides. What the micro-batches make of the batch each has for itself; weights, joined values and what is
computed from them there is once. A number that a micro-batch computes for itself may be there on both sides.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.errors import CompileError
from appliance.compiler.cost.flops import VIEWS
from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.groups import Bundle

# The end of the label of an update.
UPDATE: Final = " update"


class WorkKind(IntEnum):
    """Kinds of work, in the order in which a region prefers them."""

    RECEIVE = 0
    BACKWARD = 1
    FORWARD = 2
    SEND = 3
    UPDATE = 4
    COMMIT = 5


# A value with whether it is what one micro-batch has.
Side = tuple[SSAValue, bool]


@dataclass(slots=True, eq=False)
class RegionWork:
    """Work of a region: of a segment, or repeated, once for each micro-batch, in its replica's; else once in a step."""

    kind: WorkKind
    layer: str
    label: str
    reads: list[Side]
    makes: list[Side]
    kernel: str = ""
    seconds: float = 0.0  # predicted, each time
    commits: dict[SSAValue, SSAValue] = field(default_factory=dict)  # made value -> state whose buffer takes it
    bundle: Bundle | None = None  # of a message
    component: int | None = None  # of an update: the weight with its state that it is of; None: of single numbers
    region: int = 0  # of those of a replica
    replica: int = 0  # whose region, of what is done once in a step
    of_whole_batch: bool = False  # others wait until it has been done for all micro-batches
    repeated: bool = False  # an update for each micro-batch: see `pipelined.asynchronous`

    @property
    def is_segment(self) -> bool:
        return self.kind in (WorkKind.FORWARD, WorkKind.BACKWARD)

    @property
    def of_each_micro_batch(self) -> bool:
        return self.is_segment or self.repeated


class RegionGraph:
    """Nodes in a valid order, and who must come before whom."""

    def __init__(
        self,
        nodes: Sequence[RegionWork],
        states: Iterable[SSAValue],
        ops: Iterable[Operation],
        repeated: Collection[SSAValue] = (),
    ) -> None:
        """ops: all of the step, in order. repeated: values of which each micro-batch has one, besides its parts."""
        self.nodes = list(nodes)
        self.repeated = repeated
        self._roots = _roots(states, ops)
        self._maker = {side: node for node in nodes for side in node.makes}
        self._readers: dict[SSAValue, list[RegionWork]] = {}  # by state, of it or of views of it
        self._after: dict[RegionWork, list[RegionWork]] = {}
        self._before: dict[RegionWork, list[RegionWork]] = {}
        self._writers: dict[SSAValue, RegionWork] = {}  # by state, who replaces it
        self._readers_of_value: dict[SSAValue, list[RegionWork]] = {}  # of what there is once
        for node in nodes:
            self._connect(node)

    def _connect(self, node: RegionWork) -> None:
        for value, is_part in node.reads:
            if not is_part:
                self._readers_of_value.setdefault(value, []).append(node)
            maker = self._maker.get((value, is_part))
            if maker is not None:
                self._after.setdefault(maker, []).append(node)
            root = self._roots.get(value)
            if root is not None:
                self._readers.setdefault(root, []).append(node)

    def before(self, node: RegionWork) -> list[RegionWork]:
        """Nodes that read what this one overwrites: they come first although it needs nothing of them."""
        return self._before.get(node, [])

    def readers_of_old(self, node: RegionWork) -> list[RegionWork]:
        """Other nodes that read a state that this one replaces."""
        readers = (reader for state in node.commits.values() for reader in self._readers.get(state, ()))
        return list(dict.fromkeys(reader for reader in readers if reader is not node))

    def readers_of_new(self, node: RegionWork) -> list[RegionWork]:
        """Other nodes that read what this one replaces a state by."""
        readers = (reader for value in node.commits for reader in self._readers_of_value.get(value, ()))
        return list(dict.fromkeys(reader for reader in readers if reader is not node))

    def writers_of(self, node: RegionWork) -> list[RegionWork]:
        """The nodes that replace a state that this one reads."""
        roots = (self._roots.get(value) for value, _ in node.reads)
        return list(dict.fromkeys(self._writers[root] for root in roots if root in self._writers))

    def commit_in_place(self, node: RegionWork, value: SSAValue, state: SSAValue) -> bool:
        """Has a node write its result over a state, unless something reads the old value that waits for the node."""
        readers = [reader for reader in self._readers.get(state, ()) if reader is not node]
        if not self._reachable(node).isdisjoint(readers):
            return False
        node.commits[value] = state
        self._writers[state] = node
        self._overwrites(node, readers)
        return True

    def commit_later(self, value: SSAValue, state: SSAValue, layer: str, label: str) -> None:
        """Has a value copied over a state when all have read it."""
        node = RegionWork(kind=WorkKind.COMMIT, layer=layer, label=label, reads=[(value, False)], makes=[])
        node.commits[value] = state
        node.repeated = value in self.repeated
        self._writers[state] = node
        self.nodes.append(node)
        self._connect(node)
        self._overwrites(node, self._readers.get(state, []))

    def _overwrites(self, node: RegionWork, readers: Iterable[RegionWork]) -> None:
        self._before[node] = [*self._before.get(node, []), *(reader for reader in readers if reader is not node)]
        for reader in self._before[node]:
            self._after.setdefault(reader, []).append(node)

    def _reachable(self, node: RegionWork) -> set[RegionWork]:
        """All that come after a node."""
        found: set[RegionWork] = set()
        stack = [node]
        while stack:
            for follower in self._after.get(stack.pop(), ()):
                if follower not in found:
                    found.add(follower)
                    stack.append(follower)
        return found


def _roots(states: Iterable[SSAValue], ops: Iterable[Operation]) -> Mapping[SSAValue, SSAValue]:
    """The state that a value is, or is a view of."""
    roots = {state: state for state in states}
    for op in ops:
        if op.name in VIEWS and op.operands[0] in roots:
            roots.update(dict.fromkeys(op.results, roots[op.operands[0]]))
    return roots


# ----------------------------------------------------------------------------------------------------------------------
# Asynchronous updates: what is done with gradients is done for each micro-batch, while others are in flight
#
# The optimizer, its schedule and all else that is computed of states is repeated: for a micro-batch it reads the states
# as those before have left them, and the part of a gradient that the micro-batch makes. The passes forward and backward
# read a weight as it lies there: a region's list says behind which of its updates. So the delays are those of one
# forward, one backward, and they are the same in every run.


WAY_OUT = "use cstorch.backends.csx.performance.asynchronous_updates = False"


def repeat_updates(cut: Cut, nodes: Sequence[RegionWork]) -> frozenset[SSAValue]:
    """Marks the nodes that each micro-batch repeats. Returns the values of which each has one of its own besides parts.

    Raises:
        CompileError: something needs the whole batch.
    """
    for node in nodes:
        if node.of_whole_batch:
            raise CompileError(
                f"{node.label} computes a statistic over the whole batch, and with asynchronous updates the weights "
                f"change in between; {WAY_OUT}"
            )
    wanted = set(cut.new_states.values())
    wanted.update(value for node in nodes if node.is_segment for value, _ in node.reads)
    made: set[SSAValue] = set()
    read: set[SSAValue] = set()
    elsewhere = {value: f"output {name!r}" for name, value in cut.outputs}
    for node in reversed(nodes):
        results = {value for value, _ in node.makes}
        if node.kind is WorkKind.UPDATE and not wanted.isdisjoint(results):
            node.repeated = True
            made |= results
            read.update(value for value, _ in node.reads)
            wanted |= read
        elif node.kind is not WorkKind.RECEIVE:
            elsewhere.update({value: node.label for value, _ in node.reads})
    joined = {value for node in nodes if node.is_segment for value, is_part in node.makes if not is_part}
    gradients = joined & read
    for value in gradients & elsewhere.keys():
        raise CompileError(
            f"{elsewhere[value]} needs what the whole batch makes of a value that updates need of each micro-batch; "
            f"{WAY_OUT}"
        )
    return frozenset(made | gradients)


def earlier_updates(graph: RegionGraph, num_regions: int) -> Mapping[RegionWork, Sequence[tuple[RegionWork, int]]]:
    """For each repeated node those that come first, and of how many micro-batches before.

    Each state is replaced in the order of the micro-batches. What updates read is what the micro-batch before has left;
    what is computed of a weight for the layers (its half, say) is as old as the oldest in flight, which waits for none.
    """
    before: dict[RegionWork, list[tuple[RegionWork, int]]] = {node: [] for node in graph.nodes if node.repeated}
    read_by_layers = {value for node in graph.nodes if node.is_segment for value, _ in node.reads}
    for node in before:
        if not node.commits:
            continue
        before[node].append((node, 1))
        before[node] += [(reader, 1) for reader in graph.readers_of_new(node) if reader.repeated]
        for reader in graph.readers_of_old(node):
            if not reader.repeated:
                continue
            for_layers = any(value in read_by_layers for value, _ in reader.makes) and not reader.commits
            before[reader].append((node, _in_flight(reader, num_regions) if for_layers else 1))
    return before


def _in_flight(node: RegionWork, num_regions: int) -> int:
    """How many micro-batches have begun in a region and not ended, at most. Single numbers are read by all regions."""
    return num_regions if node.component is None else num_regions - node.region


def replaced(graph: RegionGraph, node: RegionWork) -> Iterator[RegionWork]:
    """The repeated nodes that replace a state that a node reads."""
    return (writer for writer in graph.writers_of(node) if writer.repeated and writer is not node)
