"""The work of a step in layer pipelined mode as a graph: what reads what, and what must be read before it changes.

Values have two sides. What the micro-batches make of the batch each has for itself; weights, joined values and what is
computed from them there is once. A number that a micro-batch computes for itself may be there on both sides.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from xdsl.ir import Operation, SSAValue

from appliance.compiler.cost.flops import VIEWS
from appliance.compiler.partition.groups import Bundle

# The end of the label of an update.
UPDATE: Final = " update"


class Kind(IntEnum):
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
class Node:
    """Work of a region: of a segment, or repeated, once for each micro-batch, in its replica's; else once in a step."""

    kind: Kind
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
        return self.kind in (Kind.FORWARD, Kind.BACKWARD)

    @property
    def of_each_micro_batch(self) -> bool:
        return self.is_segment or self.repeated


class Graph:
    """Nodes in a valid order, and who must come before whom."""

    def __init__(
        self,
        nodes: Sequence[Node],
        states: Iterable[SSAValue],
        ops: Iterable[Operation],
        repeated: Collection[SSAValue] = (),
    ) -> None:
        """ops: all of the step, in order. repeated: values of which each micro-batch has one, besides its parts."""
        self.nodes = list(nodes)
        self.repeated = repeated
        self._roots = _roots(states, ops)
        self._maker = {side: node for node in nodes for side in node.makes}
        self._readers: dict[SSAValue, list[Node]] = {}  # by state, of it or of views of it
        self._after: dict[Node, list[Node]] = {}
        self._before: dict[Node, list[Node]] = {}
        self._writers: dict[SSAValue, Node] = {}  # by state, who replaces it
        self._readers_of_value: dict[SSAValue, list[Node]] = {}  # of what there is once
        for node in nodes:
            self._connect(node)

    def _connect(self, node: Node) -> None:
        for value, is_part in node.reads:
            if not is_part:
                self._readers_of_value.setdefault(value, []).append(node)
            maker = self._maker.get((value, is_part))
            if maker is not None:
                self._after.setdefault(maker, []).append(node)
            root = self._roots.get(value)
            if root is not None:
                self._readers.setdefault(root, []).append(node)

    def before(self, node: Node) -> list[Node]:
        """Nodes that read what this one overwrites: they come first although it needs nothing of them."""
        return self._before.get(node, [])

    def readers_of_old(self, node: Node) -> list[Node]:
        """Other nodes that read a state that this one replaces."""
        readers = (reader for state in node.commits.values() for reader in self._readers.get(state, ()))
        return list(dict.fromkeys(reader for reader in readers if reader is not node))

    def readers_of_new(self, node: Node) -> list[Node]:
        """Other nodes that read what this one replaces a state by."""
        readers = (reader for value in node.commits for reader in self._readers_of_value.get(value, ()))
        return list(dict.fromkeys(reader for reader in readers if reader is not node))

    def writers_of(self, node: Node) -> list[Node]:
        """The nodes that replace a state that this one reads."""
        roots = (self._roots.get(value) for value, _ in node.reads)
        return list(dict.fromkeys(self._writers[root] for root in roots if root in self._writers))

    def commit_in_place(self, node: Node, value: SSAValue, state: SSAValue) -> bool:
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
        node = Node(kind=Kind.COMMIT, layer=layer, label=label, reads=[(value, False)], makes=[])
        node.commits[value] = state
        node.repeated = value in self.repeated
        self._writers[state] = node
        self.nodes.append(node)
        self._connect(node)
        self._overwrites(node, self._readers.get(state, []))

    def _overwrites(self, node: Node, readers: Iterable[Node]) -> None:
        self._before[node] = [*self._before.get(node, []), *(reader for reader in readers if reader is not node)]
        for reader in self._before[node]:
            self._after.setdefault(reader, []).append(node)

    def _reachable(self, node: Node) -> set[Node]:
        """All that come after a node."""
        found: set[Node] = set()
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
