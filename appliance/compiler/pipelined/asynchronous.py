"""Asynchronous updates: what is done with gradients is done for each micro-batch, while others are in flight.

The optimizer, its schedule and all else that is computed of states is repeated: for a micro-batch it reads the states
as those before have left them, and the part of a gradient that the micro-batch makes. The passes forward and backward
read a weight as it lies there: a region's list says behind which of its updates. So the delays are those of one
forward, one backward, and they are the same in every run.
"""

from collections.abc import Iterator, Mapping, Sequence

from xdsl.ir import SSAValue

from appliance.compiler.core.errors import CompileError
from appliance.compiler.partition.cut import Cut
from appliance.compiler.pipelined.nodes import Graph, Kind, Node

WAY_OUT = "use cstorch.backends.csx.performance.asynchronous_updates = False"


def repeat_updates(cut: Cut, nodes: Sequence[Node]) -> frozenset[SSAValue]:
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
        if node.kind is Kind.UPDATE and not wanted.isdisjoint(results):
            node.repeated = True
            made |= results
            read.update(value for value, _ in node.reads)
            wanted |= read
        elif node.kind is not Kind.RECEIVE:
            elsewhere.update({value: node.label for value, _ in node.reads})
    joined = {value for node in nodes if node.is_segment for value, is_part in node.makes if not is_part}
    gradients = joined & read
    for value in gradients & elsewhere.keys():
        raise CompileError(
            f"{elsewhere[value]} needs what the whole batch makes of a value that updates need of each micro-batch; "
            f"{WAY_OUT}"
        )
    return frozenset(made | gradients)


def earlier_updates(graph: Graph, num_regions: int) -> Mapping[Node, Sequence[tuple[Node, int]]]:
    """For each repeated node those that come first, and of how many micro-batches before.

    Each state is replaced in the order of the micro-batches. What updates read is what the micro-batch before has left;
    what is computed of a weight for the layers (its half, say) is as old as the oldest in flight, which waits for none.
    """
    before: dict[Node, list[tuple[Node, int]]] = {node: [] for node in graph.nodes if node.repeated}
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


def _in_flight(node: Node, num_regions: int) -> int:
    """How many micro-batches have begun in a region and not ended, at most. Single numbers are read by all regions."""
    return num_regions if node.component is None else num_regions - node.region


def replaced(graph: Graph, node: Node) -> Iterator[Node]:
    """The repeated nodes that replace a state that a node reads."""
    return (writer for writer in graph.writers_of(node) if writer.repeated and writer is not node)
