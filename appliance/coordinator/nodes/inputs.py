"""The inputs of a job, as they are sent to its workers and to replacements."""

from collections.abc import Iterable

from appliance.coordinator.nodes.job_nodes import JobMembers
from appliance.coordinator.nodes.topology import Member
from wsc.v1 import node_pb2


class Inputs:
    """The inputs that the workers of a job need."""

    def __init__(self, nodes: JobMembers, num_csx: int, inputs: Iterable[node_pb2.PrepareInput]) -> None:
        """num_csx: initial number of wafers. inputs: those of the earlier incarnation."""
        self._nodes = nodes
        self._num_csx = num_csx
        self._prepared = {prepared.loader: prepared for prepared in inputs}

    def prepare(self, prepared: node_pb2.PrepareInput) -> None:
        """Sends an input of the client to all workers."""
        self._prepared[prepared.loader] = prepared
        self._hand_over(prepared, self._nodes.topology.workers)

    def began(self, loader: str) -> None:
        """Drops the inputs that were prepared before this one, as an execution with it has begun."""
        names = list(self._prepared)
        for name in names[: names.index(loader)] if loader in names else ():
            del self._prepared[name]

    def prepare_again(self, workers: Iterable[Member]) -> None:
        """Sends all needed inputs to these workers, which are new."""
        for prepared in self._prepared.values():
            self._hand_over(prepared, workers)

    def _hand_over(self, prepared: node_pb2.PrepareInput, workers: Iterable[Member]) -> None:
        topology = self._nodes.topology

        def command(worker: Member) -> node_pb2.AttachRequest:
            wafer, number = divmod(worker.index, topology.num_workers_per_wafer)
            own = node_pb2.PrepareInput()
            own.CopyFrom(prepared)
            own.worker, own.num_workers = number, topology.num_workers_per_wafer
            own.wafer, own.num_csx = wafer, len(topology.wafers)
            own.redivided = own.num_csx < self._num_csx
            return node_pb2.AttachRequest(prepare_input=own)

        self._nodes.send(workers, command)
