"""Initial values that MemoryX makes: staged while the step is traced and compiled, then put in their places."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import grpc

from cstorch._internal.session.connecting import connect
from cstorch._internal.session.job import ClientJob
from cstorch._internal.state import Getter
from cstorch._internal.tracing import Cell, LazyTensor
from cstorch.errors import ClusterError
from waferbox import deadlines
from waferbox.placement import place_on_shards
from waferbox.rpc.server import through
from wsc.v1 import coordinator_pb2, initialisation_pb2, node_pb2, node_pb2_grpc


class Staged:
    """What is being staged for an execution.

    Args:
        getters: of the states.
        begin: begins to stage programs, by name, and returns what gives the shard of each.
    """

    def __init__(
        self,
        getters: Mapping[str, Getter],
        begin: Callable[[Mapping[str, initialisation_pb2.InitialProgram]], Future[dict[str, int]]],
    ) -> None:
        self._versions: dict[Cell, int] = {}
        programs = {}
        for name, getter in getters.items():
            tensor = getter()
            cell = tensor._handle.cell if isinstance(tensor, LazyTensor) else None
            made = cell.initialisation if cell is not None else None
            if cell is not None and made is not None and not made.is_fill and cell not in self._versions:
                programs[name] = made.program()
                self._versions[cell] = cell.version
        self._shards = begin(programs) if programs else None

    def current(self, cells: Mapping[str, Cell]) -> dict[str, int]:
        """The shards of the values that are staged and that cells still have; waits for them."""
        if self._shards is None:
            return {}
        try:
            shards = self._shards.result()
        except ClusterError:
            return {}  # whatever it was, sending the rest will say so
        return {
            name: shard
            for name, shard in shards.items()
            if (cell := cells.get(name)) is not None and self._versions.get(cell) == cell.version
        }


def stage(job: ClientJob, programs: Mapping[str, initialisation_pb2.InitialProgram]) -> dict[str, int]:
    """Lets the shards make values; returns the shard of each.

    The compiler decides which shard will keep a state, by the same rule; a value staged on another is made again.

    Raises:
        ClusterError: a shard is gone or refuses.
    """
    shards = job.shards()
    names_by_shard: list[list[str]] = [[] for _ in shards]
    elements = {name: program.buffers[program.result].elements for name, program in programs.items()}
    for name, index in place_on_shards(elements, len(shards)).items():
        names_by_shard[index].append(name)
    staged: dict[str, int] = {}
    calls: list[tuple[coordinator_pb2.StateShard, grpc.CallFuture[node_pb2.StageStatesResponse]]] = []
    channels: list[grpc.Channel] = []
    try:
        for shard, names in zip(shards, names_by_shard, strict=True):
            channel = connect(through(job.gateway, shard.address), f"MemoryX shard {shard.shard}", job.token)
            channels.append(channel)
            states = [node_pb2.InitialState(name=name, program=programs[name]) for name in names]
            request = node_pb2.StageStatesRequest(job=shard.job, states=states)
            stub = node_pb2_grpc.StateServiceStub(channel)
            calls.append((shard, stub.StageStates.future(request, timeout=deadlines.STATE_TRANSFER.stage)))
        for shard, call in calls:
            staged.update(dict.fromkeys(call.result().staged, shard.shard))
    except grpc.RpcError as error:
        raise job.reason(error, "initialising weights") from None
    finally:
        for channel in channels:
            channel.close()
    return staged


def initial_states(
    cells: Mapping[str, Cell], names: Iterable[str], staged: Sequence[str]
) -> list[node_pb2.InitialState]:
    """What a shard is told of states that have an initialisation; nothing but the name of those that it has staged."""
    states = []
    for name in names:
        made = cells[name].initialisation
        assert made is not None
        states.append(node_pb2.InitialState(name=name, program=None if name in staged else made.program()))
    return states
