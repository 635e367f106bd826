"""The work of a step in layer pipelined mode as a graph: reads of values, and reads of states before they change.

A value exists once for each micro-batch, or once for the step. The parts of the batch and the values computed from them
exist for each micro-batch; weights, joined values, and the values computed from those exist once. A number that each
micro-batch computes for itself may exist in both ways: see `Side`.
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
from waferbox.cirh.modules.sources import OperationSource

# Suffix of the labels of updates.
UPDATE: Final = " update"


class WorkKind(IntEnum):
    """Kinds of work, in the order in which a region prefers them: see `schedule.py`."""

    RECEIVE = 0
    BACKWARD = 1
    FORWARD = 2
    SEND = 3
    UPDATE = 4
    COMMIT = 5


# A value, and whether it is the part of one micro-batch (True) or exists once for the step (False).
Side = tuple[SSAValue, bool]


@dataclass(slots=True, eq=False)
class RegionWork:
    """A piece of work of a region: a segment, an update, a commit, or a message.

    The work of a segment, and repeated work, is done once for each micro-batch, in the region of the micro-batch's
    replica; all other work is done once in a step.

    Attributes:
        kind: what kind of work it is.
        layer: the layer that it belongs to.
        label: its name in traces and reports.
        reads: the values that it reads.
        makes: the values that it makes.
        kernel: text of the kernel; empty: not a Run.
        sources: of those of its operations that can fail.
        seconds: predicted duration, each time that it is done.
        commits: by a value that it makes, the state whose buffer the value is written to.
        bundle: the tensors of a message.
        component: the weight with its optimizer state that an update belongs to; None: an update of single numbers.
        region: its region within a replica.
        replica: the replica whose region does the work, if it is done once in a step.
        of_whole_batch: whether other work waits until this has been done for all micro-batches.
        repeated: whether an update, or the commit of one, is done for each micro-batch: asynchronous updates.
    """

    kind: WorkKind
    layer: str
    label: str
    reads: list[Side]
    makes: list[Side]
    kernel: str = ""
    sources: Sequence[OperationSource] = ()
    seconds: float = 0.0
    commits: dict[SSAValue, SSAValue] = field(default_factory=dict)
    bundle: Bundle | None = None
    component: int | None = None
    region: int = 0
    replica: int = 0
    of_whole_batch: bool = False
    repeated: bool = False

    @property
    def is_segment(self) -> bool:
        return self.kind in (WorkKind.FORWARD, WorkKind.BACKWARD)

    @property
    def of_each_micro_batch(self) -> bool:
        return self.is_segment or self.repeated


class RegionGraph:
    """The work of a step in a valid order, with the dependencies between its pieces.

    Besides reading after making, there is reading before overwriting: a state has one buffer, so the work that replaces
    it comes after all work that reads its old value, or a view of it.
    """

    def __init__(
        self,
        work: Sequence[RegionWork],
        states: Iterable[SSAValue],
        ops: Iterable[Operation],
        repeated: Collection[SSAValue] = (),
    ) -> None:
        """Connects the pieces.

        Args:
            work: all pieces, in a valid order.
            states: the states of the step.
            ops: all operations of the step, in order.
            repeated: values that repeated work makes for each micro-batch, besides the parts of the batch.
        """
        self.work = list(work)
        self.repeated = repeated
        self._roots = _roots(states, ops)
        self._maker = {side: item for item in work for side in item.makes}
        self._readers: dict[SSAValue, list[RegionWork]] = {}  # by state: work that reads it or a view of it
        self._after: dict[RegionWork, list[RegionWork]] = {}
        self._before: dict[RegionWork, list[RegionWork]] = {}
        self._writers: dict[SSAValue, RegionWork] = {}  # by state: work that replaces it
        self._readers_of_value: dict[SSAValue, list[RegionWork]] = {}  # only values that exist once
        for item in work:
            self._connect(item)

    def _connect(self, item: RegionWork) -> None:
        for value, is_part in item.reads:
            if not is_part:
                self._readers_of_value.setdefault(value, []).append(item)
            maker = self._maker.get((value, is_part))
            if maker is not None:
                self._after.setdefault(maker, []).append(item)
            root = self._roots.get(value)
            if root is not None:
                self._readers.setdefault(root, []).append(item)

    def before(self, item: RegionWork) -> list[RegionWork]:
        """Work that reads a state that the item overwrites: it comes first, although it makes nothing for the item."""
        return self._before.get(item, [])

    def readers_of_old(self, item: RegionWork) -> list[RegionWork]:
        """Other work that reads the old value of a state that the item replaces."""
        readers = (reader for state in item.commits.values() for reader in self._readers.get(state, ()))
        return list(dict.fromkeys(reader for reader in readers if reader is not item))

    def readers_of_new(self, item: RegionWork) -> list[RegionWork]:
        """Other work that reads the new value of a state that the item replaces."""
        readers = (reader for value in item.commits for reader in self._readers_of_value.get(value, ()))
        return list(dict.fromkeys(reader for reader in readers if reader is not item))

    def writers_of(self, item: RegionWork) -> list[RegionWork]:
        """The work that replaces a state that the item reads."""
        roots = (self._roots.get(value) for value, _ in item.reads)
        return list(dict.fromkeys(self._writers[root] for root in roots if root in self._writers))

    def commit_in_place(self, item: RegionWork, value: SSAValue, state: SSAValue) -> bool:
        """Makes the item write its result over a state. Returns False if a reader of the old value waits for it."""
        readers = [reader for reader in self._readers.get(state, ()) if reader is not item]
        # The readers would have to come before the item, and after it: a circle.
        if not self._reachable(item).isdisjoint(readers):
            return False
        item.commits[value] = state
        self._writers[state] = item
        self._overwrites(item, readers)
        return True

    def commit_later(self, value: SSAValue, state: SSAValue, layer: str, label: str) -> None:
        """Adds work that copies a value over a state after all reads of the state."""
        item = RegionWork(kind=WorkKind.COMMIT, layer=layer, label=label, reads=[(value, False)], makes=[])
        item.commits[value] = state
        item.repeated = value in self.repeated
        self._writers[state] = item
        self.work.append(item)
        self._connect(item)
        self._overwrites(item, self._readers.get(state, []))

    def _overwrites(self, item: RegionWork, readers: Iterable[RegionWork]) -> None:
        self._before[item] = [*self._before.get(item, []), *(reader for reader in readers if reader is not item)]
        for reader in self._before[item]:
            self._after.setdefault(reader, []).append(item)

    def _reachable(self, item: RegionWork) -> set[RegionWork]:
        """All work that comes after an item."""
        found: set[RegionWork] = set()
        stack = [item]
        while stack:
            for follower in self._after.get(stack.pop(), ()):
                if follower not in found:
                    found.add(follower)
                    stack.append(follower)
        return found


def _roots(states: Iterable[SSAValue], ops: Iterable[Operation]) -> Mapping[SSAValue, SSAValue]:
    """By value: the state that the value is, or is a view of."""
    roots = {state: state for state in states}
    for op in ops:
        if op.name in VIEWS and op.operands[0] in roots:
            roots.update(dict.fromkeys(op.results, roots[op.operands[0]]))
    return roots


# --- Asynchronous updates ---------------------------------------------------------------------------------------------
#
# All work on gradients and states is repeated for each micro-batch, while others are in flight. It reads the states as
# the micro-batch before left them, and the micro-batch's own part of a gradient. The forward and backward passes read
# the weight that is in the buffer at the time; the order of a region's list decides behind which of its updates that
# is. So the delays are those of one forward, one backward, and are the same in every run.

WAY_OUT = "use cstorch.backends.csx.performance.asynchronous_updates = False"


def repeat_updates(cut: Cut, work: Sequence[RegionWork]) -> frozenset[SSAValue]:
    """Marks the work that each micro-batch repeats. Returns the values that it makes and reads, besides parts.

    Raises:
        CompileError: some work needs the whole batch.
    """
    for item in work:
        if item.of_whole_batch:
            raise CompileError(
                f"{item.label} computes a statistic over the whole batch, and with asynchronous updates the weights "
                f"change in between; {WAY_OUT}"
            )
    wanted = set(cut.new_states.values())
    wanted.update(value for item in work if item.is_segment for value, _ in item.reads)
    made: set[SSAValue] = set()
    read: set[SSAValue] = set()
    elsewhere = {value: f"output {name!r}" for name, value in cut.outputs}
    for item in reversed(work):
        results = {value for value, _ in item.makes}
        if item.kind is WorkKind.UPDATE and not wanted.isdisjoint(results):
            item.repeated = True
            made |= results
            read.update(value for value, _ in item.reads)
            wanted |= read
        elif item.kind is not WorkKind.RECEIVE:
            elsewhere.update({value: item.label for value, _ in item.reads})
    joined = {value for item in work if item.is_segment for value, is_part in item.makes if not is_part}
    gradients = joined & read
    for value in gradients & elsewhere.keys():
        raise CompileError(
            f"{elsewhere[value]} needs a value of the whole batch that the updates need for each micro-batch; {WAY_OUT}"
        )
    return frozenset(made | gradients)


def earlier_updates(graph: RegionGraph, num_regions: int) -> Mapping[RegionWork, Sequence[tuple[RegionWork, int]]]:
    """By repeated work: the repeated work that must have been done before it, and for how many micro-batches earlier.

    Each state is replaced in the order of the micro-batches, and an update reads the states that the micro-batch before
    left. A value that is computed from a weight for the layers, such as its half precision copy, may be older: it
    waits only for micro-batches that are no longer in flight. Otherwise a forward pass would wait for the update of a
    micro-batch whose backward pass is still to come, and the pipeline would run empty.
    """
    before: dict[RegionWork, list[tuple[RegionWork, int]]] = {item: [] for item in graph.work if item.repeated}
    read_by_layers = {value for item in graph.work if item.is_segment for value, _ in item.reads}
    for item in before:
        if not item.commits:
            continue
        before[item].append((item, 1))
        before[item] += [(reader, 1) for reader in graph.readers_of_new(item) if reader.repeated]
        for reader in graph.readers_of_old(item):
            if not reader.repeated:
                continue
            for_layers = any(value in read_by_layers for value, _ in reader.makes) and not reader.commits
            before[reader].append((item, _max_in_flight(reader, num_regions) if for_layers else 1))
    return before


def _max_in_flight(item: RegionWork, num_regions: int) -> int:
    """The most micro-batches in flight in the item's region; in all regions for single numbers, which all read."""
    return num_regions if item.component is None else num_regions - item.region


def repeated_writers(graph: RegionGraph, item: RegionWork) -> Iterator[RegionWork]:
    """The other repeated work that replaces a state that an item reads."""
    return (writer for writer in graph.writers_of(item) if writer.repeated and writer is not item)
