"""The process of a job's coordinator as management sees it: a child, a child of an earlier service, or an ingress's."""

import logging
import threading
from typing import Protocol

import grpc

from waferbox import deadlines
from waferbox.launch.spawn import Child
from waferbox.links.socket_names import host_id
from waferbox.rpc.server import make_channel
from waferbox.security.tokens import Kind, cluster_secret
from wsc.v1 import ingress_pb2, ingress_pb2_grpc, management_pb2

logger = logging.getLogger(__name__)


class ProcessLost(RuntimeError):
    """Raised when neither the state nor the exit status of the process can be determined."""


class CoordinatorProcess(Protocol):
    """The process of a coordinator: a waferbox.launch.spawn.Child, or an object with the same methods."""

    @property
    def cause(self) -> str:
        """After wait: the cause, if the process ended together with another one; else empty."""

    def wait(self) -> int:
        """Returns the exit status, once it has ended. Raises ProcessLost."""

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def close(self, deadline_seconds: float = ...) -> object:
        """Ends the process if it still runs, and releases all resources."""


class IngressProcess:
    """A coordinator that an ingress runs. Without a call of close it outlives this process. Thread-safe."""

    cause = ""

    def __init__(self, ingress: str, request: ingress_pb2.RunCoordinatorRequest) -> None:
        """Requests the start; wait raises ProcessLost if it failed. ingress: its address."""
        self._ingress = ingress
        self._job = request.job
        self._channel = make_channel(ingress, cluster_secret().token(Kind.MANAGEMENT))
        self._stub = ingress_pb2_grpc.IngressStub(self._channel)
        self._call = self._stub.RunCoordinator.future(request)
        self._lock = threading.Lock()  # of the channel against close

    def wait(self) -> int:
        try:
            return self._call.result().status
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            reason = error.details() if isinstance(error, grpc.Call) else "the call has ended"
            raise ProcessLost(f"the ingress at {self._ingress} does not run it: {reason}") from error

    def terminate(self) -> None:
        self._end(kill=False)

    def kill(self) -> None:
        self._end(kill=True)

    def close(self, deadline_seconds: float = deadlines.END.signal) -> None:
        if not self._call.done():
            self.terminate()
            try:
                self._call.result(deadline_seconds)
            except grpc.FutureTimeoutError:
                self.kill()
            except (grpc.RpcError, grpc.FutureCancelledError):
                pass  # the ingress has died
        with self._lock:
            self._channel.close()

    def _end(self, *, kill: bool) -> None:
        request = ingress_pb2.EndCoordinatorRequest(job=self._job, kill=kill)
        with self._lock:
            if self._call.done():
                return
            try:
                self._stub.EndCoordinator(request, timeout=deadlines.END.signal)
            except grpc.RpcError as error:
                logger.warning("the ingress at %s did not end %s: %s", self._ingress, self._job, error)


def process_of(hello: management_pb2.CoordinatorHello) -> Child | None:
    """Returns a coordinator that an earlier management service started; None if it has ended or is elsewhere."""
    if hello.ingress or hello.host != host_id():
        return None
    return Child.find("appliance.coordinator", hello.process_id, hello.process_started)
