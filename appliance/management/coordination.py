"""Management's end of a coordinator's stream: requests for nodes and reports come in, nodes and notices go out."""

import queue
import threading
import time
from collections.abc import Iterator

import grpc

from appliance.management.jobs import Job
from appliance.management.registry import NodeRegistry
from wsc.v1 import management_pb2

MISSING_NODES_SECONDS = 5.0  # how long a job waits for nodes that are not there, or not free


class Coordination:
    """One Coordinate stream. responses() ends when the stream does."""

    def __init__(self, job: Job, registry: NodeRegistry, requests: Iterator[management_pb2.CoordinateRequest]) -> None:
        self._job = job
        self._registry = registry
        self._requests = requests
        self._outbox: queue.SimpleQueue[management_pb2.CoordinateResponse | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._outbox.put(management_pb2.CoordinateResponse(job=job.request))
        self._reader = threading.Thread(target=self._read, name=f"coordination-{job.name}", daemon=True)

    def responses(self) -> Iterator[management_pb2.CoordinateResponse]:
        self._reader.start()
        yield from iter(self._outbox.get, None)

    def cancel(self) -> None:
        """Tell the coordinator to give up."""
        self._outbox.put(management_pb2.CoordinateResponse(cancel=management_pb2.CancelNotice()))

    def lost(self, node: management_pb2.NodeInfo) -> None:
        """Tell the coordinator that one of its nodes is gone."""
        self._outbox.put(management_pb2.CoordinateResponse(lost=node))

    def end(self) -> None:
        """The stream is over: a waiting acquire gives up, and responses() ends."""
        self._over.set()
        self._registry.wake()
        self._outbox.put(None)

    def _read(self) -> None:
        acquiring: threading.Thread | None = None
        try:
            for request in self._requests:
                match request.WhichOneof("kind"):
                    case "acquire" if acquiring is None or not acquiring.is_alive():
                        # It may wait, and a job can end meanwhile.
                        acquiring = threading.Thread(target=self._acquire, args=(request.acquire,), daemon=True)
                        acquiring.start()
                    case "report":
                        self._job.report = request.report
        except grpc.RpcError:
            pass  # the coordinator is gone: what follows from that is the service's business
        finally:
            self.end()
            if acquiring is not None:
                acquiring.join()

    def _acquire(self, wanted: management_pb2.Acquire) -> None:
        deadline = time.monotonic() + MISSING_NODES_SECONDS
        acquired = self._registry.acquire(self._job.name, wanted, deadline, self._over)
        self._outbox.put(management_pb2.CoordinateResponse(acquired=acquired))
