"""The states of a job, which MemoryX keeps: the gateway writes and reads them by name, and keeps no copy."""

import math
import threading
from collections.abc import Iterable, Sequence

import torch

from cstorch._internal.session.job import ClientJob
from cstorch._internal.session.transfer import Outgoing, ShardConnection
from waferbox.links.elements import tensor_bytes, torch_dtype
from wsc.v1 import coordinator_pb2, plan_pb2


class UnknownStateError(ValueError):
    """Raised for a name that is no state of the step."""


class States:
    """The states of a job and the connections to their shards. Thread-safe: each connection serves one call at a time.

    Raises UnknownStateError, and ClusterError for a lost shard.
    """

    def __init__(self, job: ClientJob) -> None:
        self._job = job
        self._lock = threading.Lock()  # of the other attributes
        self._types: dict[str, plan_pb2.TensorType] = {}
        self._shards: dict[str, list[int]] = {}
        self._connections: dict[int, tuple[ShardConnection, threading.Lock]] = {}

    def place(self, placements: Iterable[coordinator_pb2.StatePlacement]) -> None:
        """Adds the placements of the states of a step; states of earlier steps keep theirs."""
        by_name: dict[str, list[int]] = {}
        with self._lock:
            for placement in placements:
                self._types[placement.name] = placement.type
                by_name.setdefault(placement.name, []).append(placement.shard)
            self._shards |= by_name

    def connect(self, shards: Sequence[coordinator_pb2.StateShard]) -> None:
        """Connects to shards, instead of the earlier ones."""
        with self._lock:
            self._close_connections()
            self._connections = {
                shard.shard: (
                    ShardConnection(shard, self._job.config.lane, self._job, self._job.gateway),
                    threading.Lock(),
                )
                for shard in shards
            }

    def __contains__(self, name: str) -> bool:
        return name in self._types

    def elements(self, name: str) -> int:
        """Returns the number of elements of a state."""
        return math.prod(self._type(name).shape)

    def write(self, name: str, value: torch.Tensor) -> None:
        """Writes a state. `value` has all elements, flat, or one for all of them; otherwise raises ValueError."""
        kind = self._type(name)
        shape, dtype = tuple(kind.shape), torch_dtype(kind.element_type)
        if value.numel() not in (1, torch.Size(shape).numel()):
            raise ValueError(f"{name} has the shape {list(shape)}, but {value.numel()} elements were sent")
        value = value.to(dtype)
        whole = value.reshape(shape) if value.numel() == torch.Size(shape).numel() else value.expand(shape)
        outgoing = Outgoing(name=name, nbytes=tensor_bytes(kind), value=lambda: whole)
        for shard in self._shards[name]:
            connection, lock = self._connections[shard]
            with lock:
                connection.write([outgoing])

    def read(self, name: str, step: int = 0) -> torch.Tensor:
        """Returns a state as of a checkpoint step; 0: its present value."""
        kind = self._type(name)
        connection, lock = self._connections[min(self._shards[name])]
        with lock:
            pieces = list(connection.read(name, tuple(kind.shape), torch_dtype(kind.element_type), step))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def close(self) -> None:
        with self._lock:
            self._close_connections()

    def _type(self, name: str) -> plan_pb2.TensorType:
        kind = self._types.get(name)
        if kind is None:
            raise UnknownStateError(f"the step has no state {name!r}")
        return kind

    def _close_connections(self) -> None:
        for connection, lock in self._connections.values():
            with lock:
                connection.close()
        self._connections = {}
