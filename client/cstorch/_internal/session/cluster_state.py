"""The client's record of the states on the cluster: their cells, their shards, and the client's changes."""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from cstorch._internal.log import SlowWork, logged_if_slow
from cstorch._internal.session.staging import initial_states
from cstorch._internal.session.transfer import Outgoing, ShardConnection, ShardedJob, batches
from cstorch._internal.tracing.cell import Cell
from cstorch.errors import InternalError, StateError
from waferbox.links.elements import torch_dtype
from wsc.v1 import coordinator_pb2

STATE_NOT_READABLE = """\
the execution has begun and the cluster is ahead of the script. Read state in a @cstorch.checkpoint_closure, on a \
checkpoint step (checkpoint_steps of the DataExecutor), or after the loop:

    @cstorch.checkpoint_closure
    def keep():
        if losses[-1] < best["loss"]:
            best["loss"] = losses[-1]
            best["weights"] = copy.deepcopy(model.state_dict())

    for batch in executor:  # a DataExecutor with checkpoint_steps=1
        note(training_step(batch))  # a step closure that appends to losses: it runs before checkpoint closures
        keep()

In place of the copy, `cstorch.save(model.state_dict(), "best.mdl")` writes a file."""


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A state on the cluster. `version` is the version that the cell had when both had the same value."""

    cell: weakref.ref[Cell]
    version: int
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    shards: list[int] = field(default_factory=list)


class LeftExecution(Protocol):
    """An execution whose loop the script has left before its last step."""

    def end(self) -> None:
        """Ends it after the last step that the script has done, and settles the states.

        Raises:
            ClusterError: The cluster failed; the states are lost.
        """

    def give_up(self) -> None:
        """Ends it at any step, as its states are not needed."""


class ClusterState:
    """The states of one job. Used by the script's thread.

    A state is on the cluster from its first transfer until the job ends. Meanwhile its cell has no bytes in this
    process: a read fetches them, between executions from the live state, at a checkpoint step from the snapshot.

    Args:
        lane: The lane of the links to the shards.
        job: The job that has the states.
        gateway: The address through which the shards are reached; empty if directly.
    """

    def __init__(self, lane: str, job: ShardedJob, gateway: str = "") -> None:
        self._lane = lane
        self._job = job
        self._gateway = gateway
        self._entries: dict[str, _Entry] = {}
        self._addresses: dict[int, coordinator_pb2.StateShard] = {}
        self._connections: dict[int, ShardConnection] = {}
        self._running: frozenset[str] = frozenset()
        self._left: LeftExecution | None = None
        self._snapshot: int | None = None
        self._lost: str | None = None
        self._is_unsaved = False
        self.on_read: Callable[[], None] | None = None  # called when a state is read during an execution

    def prepare(self, cells: Mapping[str, Cell]) -> None:
        """Prepares the load of a plan with these states.

        Fetches the states of other cells that have a name of the new plan, since the load replaces them.
        """
        for name, cell in cells.items():
            entry = self._entries.get(name)
            holder = entry.cell() if entry is not None else None
            if holder is not None and holder is not cell:
                holder.data()
            if entry is not None and holder is not cell:
                del self._entries[name]

    def check_changes(self, cells: Mapping[str, Cell], lazy_initialization: bool) -> None:
        """Checks the script's changes to these states before an execution.

        Args:
            cells: The states, by name.
            lazy_initialization: Whether it is on.

        Raises:
            StateError: The script changed weights or states of an optimizer after an execution whose last step was no
                checkpoint step, or without lazy initialisation.
        """
        if lazy_initialization and not self._is_unsaved:
            return
        for name, cell in cells.items():
            entry = self._entries.get(name)
            is_ruled = name.startswith(("state.model", "state.optimizer"))
            if is_ruled and entry is not None and entry.cell() is cell and entry.version != cell.version:
                why, remedy = (
                    (
                        "after an execution without a checkpoint on its last step",
                        "Give that DataExecutor checkpoint_steps greater than 0",
                    )
                    if self._is_unsaved
                    else (
                        "between executions without lazy initialisation",
                        "Set cstorch.backends.csx.debug.lazy_initialization = True",
                    )
                )
                raise StateError(
                    f"{name!r} was changed {why}. {remedy}, or give the ClusterConfig changes_need_checkpoint=False"
                )

    def unsent(self, cells: Mapping[str, Cell], missing: Iterable[str]) -> set[str]:
        """Returns the states that the cluster lacks, or that the client has changed since their last transfer.

        Args:
            cells: The cells of all states of the plan, by name.
            missing: The states that have no value on the cluster.
        """
        return {name for name in cells if self._changed(name, cells[name])} | (cells.keys() & set(missing))

    def send(
        self,
        cells: Mapping[str, Cell],
        placements: Iterable[coordinator_pb2.StatePlacement],
        shards: Sequence[coordinator_pb2.StateShard],
        names: Collection[str],
        staged: Mapping[str, int],
        work: SlowWork,
    ) -> None:
        """Writes states. The shards make the values of cells without bytes.

        Args:
            cells: The cells of all states of the plan, by name.
            placements: The placements of the plan; a state that several shards keep has one for each.
            shards: The shards of the job.
            names: The states to write.
            staged: The shards that have made the value of a state already.
            work: Takes the bytes that are sent.

        Raises:
            ShardReplacedError: The coordinator will request the states again.
        """
        placed = _by_name(placements)
        if unknown := cells.keys() - placed.keys():
            raise InternalError(f"the plan does not place the states {sorted(unknown)}")
        self._connect(shards)
        by_shard: dict[int, list[str]] = {}
        for name in filter(names.__contains__, cells):
            for placement in placed[name]:
                by_shard.setdefault(placement.shard, []).append(name)
        sent = (name for names in by_shard.values() for name in names if cells[name].initialisation is None)
        work.expect(sum(cells[name].nbytes for name in sent))
        for shard, names in by_shard.items():
            made = [name for name in names if cells[name].initialisation is not None]
            self._connections[shard].initialise(
                initial_states(cells, made, [name for name in made if staged.get(name) == shard]),
                unstaged=partial(initial_states, cells, made, ()),
            )
            for name in names:
                if cells[name].remote:
                    # The cell is that of another state too. Fetch it now: a shard that is written to cannot be read.
                    cells[name].data()
            outgoing = [
                Outgoing(name=name, nbytes=cells[name].nbytes, value=cells[name].data)
                for name in names
                if cells[name].initialisation is None
            ]
            for batch in batches(outgoing):
                self._connections[shard].write(batch)
                work.add(sum(state.nbytes for state in batch))
        for name, cell in cells.items():
            first = placed[name][0]
            self._entries[name] = _Entry(
                cell=weakref.ref(cell),
                version=cell.version,
                shape=tuple(first.type.shape),
                dtype=torch_dtype(first.type.element_type),
                shards=[placement.shard for placement in placed[name]],
            )

    def _changed(self, name: str, cell: Cell) -> bool:
        entry = self._entries.get(name)
        return entry is None or entry.cell() is not cell or entry.version != cell.version

    def _connect(self, shards: Sequence[coordinator_pb2.StateShard]) -> None:
        for shard in shards:
            known = self._addresses.get(shard.shard)
            if known == shard:
                continue
            if shard.shard in self._connections:
                self._connections.pop(shard.shard).close()
            self._addresses[shard.shard] = shard
            self._connections[shard.shard] = ShardConnection(shard, self._lane, self._job, self._gateway)

    def begin(self, names: Iterable[str]) -> None:
        """Marks the begin of an execution with these states: from now on the values on the cluster change."""
        self._running = frozenset(names)
        self._keep_local(self._running)

    def settle(self, is_saved: bool) -> None:
        """Marks the end of the execution: the values on the cluster are final and can be read.

        Args:
            is_saved: Whether the last step was a checkpoint step.
        """
        self._running = frozenset()
        self._is_unsaved = not is_saved

    @property
    def is_left(self) -> bool:
        """Whether the script has left the loop of the running execution."""
        return self._left is not None

    def leave(self, execution: LeftExecution) -> None:
        """Marks the running execution as left; `end_left` waits for its end where values of states are needed."""
        self._left = execution

    def end_left(self) -> None:
        """Ends the execution whose loop the script has left, if there is one. Raises as LeftExecution.end."""
        left, self._left = self._left, None
        if left is not None:
            left.end()

    @contextmanager
    def at_checkpoint(self, step: int) -> Iterator[None]:
        """Directs reads within the context to the snapshot after a step.

        Args:
            step: Counted from 1.

        Raises:
            StateError: The script has changed a state within the context; raised at its end.
        """
        self._snapshot = step
        try:
            yield
        finally:
            self._snapshot = None
        changed = [
            name
            for name in sorted(self._running)
            if (cell := self._entries[name].cell()) is not None and cell.version != self._entries[name].version
        ]
        self._keep_local(self._running)
        if changed:
            raise StateError(
                f"the state {changed[0]!r} was changed in a closure on step {step}, while the execution goes on: the "
                "change would be lost. Change state between executions"
            )

    def fetch_all(self) -> None:
        """Fetches all states whose cells are alive."""
        cells = [cell for entry in self._entries.values() if (cell := entry.cell()) is not None and cell.remote]
        with logged_if_slow(f"Fetching {len(cells)} state tensors") as work:
            work.expect(sum(cell.nbytes for cell in cells))
            for cell in cells:
                cell.data()
                work.add(cell.nbytes)

    def lose(self, reason: str) -> None:
        """Marks all states as lost, except those that are already in this process.

        Args:
            reason: The error message of later reads.
        """
        self._lost = self._lost or reason
        left, self._left = self._left, None
        if left is not None:
            left.give_up()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._addresses.clear()

    def _keep_local(self, names: Iterable[str]) -> None:
        for name in names:
            cell = self._entries[name].cell()
            if cell is not None:
                cell.set_remote(_Fetch(self, name))

    def fetch(self, name: str) -> Iterator[torch.Tensor]:
        """Yields the value of a state on the cluster, in pieces along the first dimension.

        Raises:
            StateError: The state cannot be read now, or is lost.
        """
        if self._lost is not None:
            raise StateError(f"the value of {name!r} is not available: {self._lost}")
        self.end_left()
        if self._running and self._snapshot is None:
            raise StateError(f"the value of {name!r} cannot be read now: {STATE_NOT_READABLE}")
        if self._running and self.on_read is not None:
            self.on_read()
        entry = self._entries[name]
        connection = self._connections[min(entry.shards)]
        yield from connection.read(name, entry.shape, entry.dtype, self._snapshot or 0)


@dataclass(frozen=True, slots=True)
class _Fetch:
    """The read of one state."""

    state: ClusterState
    name: str

    def __call__(self) -> Iterator[torch.Tensor]:
        return self.state.fetch(self.name)


def _by_name(
    placements: Iterable[coordinator_pb2.StatePlacement],
) -> dict[str, list[coordinator_pb2.StatePlacement]]:
    placed: dict[str, list[coordinator_pb2.StatePlacement]] = {}
    for placement in placements:
        placed.setdefault(placement.name, []).append(placement)
    return placed
