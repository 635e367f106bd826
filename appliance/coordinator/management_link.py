"""The coordinator's stream to management: asks for nodes, reports how the job goes, hears of what concerns the job."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from interconnect.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc

HELLO_SECONDS = 20.0
CLOSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """What management tells a coordinator that it starts."""

    job: str
    token: str
    management: str
    listen: str  # host:port; port 0 for any
    cache: Path  # folder of the compiled artifacts


class ManagementLost(RuntimeError):
    """The management service is gone, or refuses."""


class ManagementLink:
    """Owns the stream and the thread that reads it. acquire() and report() from any thread."""

    def __init__(self, settings: CoordinatorSettings, address: str) -> None:
        self._requests: queue.SimpleQueue[management_pb2.CoordinateRequest | None] = queue.SimpleQueue()
        hello = management_pb2.CoordinatorHello(job=settings.job, address=address, token=settings.token)
        self._requests.put(management_pb2.CoordinateRequest(hello=hello))
        self._address = settings.management
        self._channel = make_channel(settings.management)
        stub = management_pb2_grpc.ManagementStub(self._channel)
        self._call = stub.Coordinate(iter(self._requests.get, None))
        self._acquired: queue.SimpleQueue[management_pb2.Acquired | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = False

    def hello(self) -> management_pb2.CreateJobRequest:
        """What the job is. Raises ManagementLost."""
        timer = threading.Timer(HELLO_SECONDS, self._channel.close)
        timer.start()
        try:
            first = next(iter(self._call), None)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            raise ManagementLost(f"the management service does not answer: {error.details()}") from error
        finally:
            timer.cancel()
        if first is None or first.WhichOneof("kind") != "job":
            raise ManagementLost("the management service did not answer hello")
        return first.job

    def listen(
        self,
        on_cancel: Callable[[], None],
        on_node_lost: Callable[[management_pb2.NodeInfo], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Begin to hear what management says; the callbacks are called from a thread. on_lost(reason): it is gone."""
        self._thread = threading.Thread(
            target=self._read, args=(on_cancel, on_node_lost, on_lost), name="management", daemon=True
        )
        self._thread.start()

    def acquire(self, wanted: management_pb2.Acquire) -> management_pb2.Acquired:
        """Ask for nodes; waits as long as management does. Raises ManagementLost. One at a time."""
        self._requests.put(management_pb2.CoordinateRequest(acquire=wanted))
        acquired = self._acquired.get()
        if acquired is None:
            raise ManagementLost("the management service is gone")
        return acquired

    def report(self, report: management_pb2.JobReport) -> None:
        """Tell how the job goes."""
        self._requests.put(management_pb2.CoordinateRequest(report=report))

    def close(self) -> None:
        """End the stream, after what was reported has been sent."""
        self._closing = True
        self._requests.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        self._channel.close()  # ends the stream, if it has not ended

    def _read(
        self,
        on_cancel: Callable[[], None],
        on_node_lost: Callable[[management_pb2.NodeInfo], None],
        on_lost: Callable[[str], None],
    ) -> None:
        reason = f"the management service at {self._address} has ended"
        try:
            for response in self._call:
                match response.WhichOneof("kind"):
                    case "acquired":
                        self._acquired.put(response.acquired)
                    case "cancel":
                        on_cancel()
                    case "lost":
                        on_node_lost(response.lost)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            lost = error.code() == grpc.StatusCode.UNAVAILABLE
            why = "died or was cut off" if lost else f"ended the connection: {error.details()}"
            reason = f"the management service at {self._address} {why}"
        finally:
            self._acquired.put(None)
            self._requests.put(None)
        if not self._closing:
            on_lost(reason)
