"""What MemoryX would compute, as work of regions: which operations are one kernel, and whose layer's they are.

A weight, its optimizer state and their update belong to the layer that reads the weight first. Single numbers (counts
of steps, rates, norms) belong to the last region: it is idle when a step begins.
"""

from collections.abc import Iterable, Iterator, Sequence

from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.target import Target
from appliance.compiler.memoryx.batches import ready_batches
from appliance.compiler.memoryx.frontier import Frontier
from appliance.compiler.memoryx.reads import Reads
from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.shards import divide, elements, order
from appliance.compiler.wafer.turns import Work
from cirh.dialect.operations import func_of


class Updates:
    """Gives the operations in batches, as values become known in the order of the trace."""

    def __init__(self, cut: Cut, work: Sequence[Work], target: Target, last_layer: str) -> None:
        """last_layer: where single numbers are computed."""
        self._cut = cut
        self._last_layer = last_layer
        self._sharing = divide(cut, target)
        todo = order((op for op in self._sharing.ops[0] if op not in self._sharing.sunk), cut)
        self._todo = dict.fromkeys(todo)
        self._reads = Reads(self._sharing, 0, todo)
        self._frontier = Frontier(self._todo, self._reads)
        arguments = func_of(cut.module).block.args
        self.states = [arguments[state.argument] for state in cut.names.states]
        self._have: set[SSAValue] = set(self.states)
        self._leaving = {*cut.new_states.values(), *cut.streamed, *(value for _, value in cut.outputs)}
        self._frontier.add(self._have)
        self._first_read = {value: item.segment.layer for item in reversed(work) for value in item.inputs}
        self._made_in: dict[SSAValue, str] = {
            value: item.segment.layer for item in work for op in item.ops for value in op.results
        }
        self._place = {layer: number for number, layer in enumerate(dict.fromkeys(w.segment.layer for w in work))}
        self._component_of = {
            value: component
            for op, component in self._sharing.component.items()
            for value in (*op.operands, *op.results)
        }
        self._layers = self._find_layers()

    def after(self, values: Iterable[SSAValue]) -> Iterator[list[Operation]]:
        """Batches that can be run when these values are there too, with the broadcasts that they read."""
        values = list(values)
        self._have.update(values)
        self._frontier.add(values)
        while batches := ready_batches(
            self._frontier, self._reads, self._have, lambda op: True, self._leaving.__contains__
        ):
            for batch in batches:
                for op in batch:
                    del self._todo[op]
                self._frontier.remove(batch)
                self._have.update(result for op in batch for result in op.results)
                yield batch

    def closure(self, batch: Sequence[Operation]) -> list[Operation]:
        """A batch with the broadcasts that it reads, in order."""
        return self._reads.with_repeated(batch)

    def outputs(self, batch: Sequence[Operation]) -> list[SSAValue]:
        """What of a batch's results is wanted outside of it."""
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
        """What a batch belongs to: a weight with its state. None: single numbers."""
        return self._sharing.component.get(batch[0])

    def layer_of_state(self, state: SSAValue) -> str:
        """The layer that a state lies with."""
        if elements(state) == 1:
            return self._last_layer
        component = self._component_of.get(state, self._component_of.get(self._cut.new_states.get(state, state)))
        if component is not None:
            return self._layers[component]
        made = self._made_in.get(self._cut.new_states.get(state, state), self._last_layer)
        return self._first_read.get(state, made)

    def _find_layers(self) -> dict[int, str]:
        """By component: the layer that reads its values first, else the one that makes what it reads."""
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
        return elements(value) > 1 and value in self._first_read and value not in self._cut.sharding.reduced
