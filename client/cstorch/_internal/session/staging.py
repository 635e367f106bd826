"""Initial values that MemoryX makes: staged while the step is traced and compiled, then copied to their states."""

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
    """The initial values that are being staged for an execution. Used by the script's thread.

    Args:
        getters: The getters of the states, by name.
        begin: Begins to stage programs, by name, and returns a future of the shard of each.
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
        """Returns the shards of the staged values that the script has not changed since; waits for them."""
        if self._shards is None:
            return {}
        try:
            shards = self._shards.result()
        except ClusterError:
            return {}  # if the cluster has failed, sending the states raises the cause
        return {
            name: shard
            for name, shard in shards.items()
            if (cell := cells.get(name)) is not None and self._versions.get(cell) == cell.version
        }


def stage(job: ClientJob, programs: Mapping[str, initialisation_pb2.InitialProgram]) -> dict[str, int]:
    """Lets the shards make values; returns the shard of each.

    Raises:
        ClusterError: A shard is gone or refuses.
    """
    # The compiler places states by the same rule; a value that is staged on another shard is made again.
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
    """Returns the messages to a shard for cells with an initialisation; without a program for those that are staged."""
    states = []
    for name in names:
        made = cells[name].initialisation
        assert made is not None
        states.append(node_pb2.InitialState(name=name, program=None if name in staged else made.program()))
    return states
