"""The coordinators that this ingress runs: management asks for them, and they go on when it dies, but end with us."""

import logging
import threading

import grpc

from appliance.coordinator.settings import END_SECONDS, CoordinatorHome, FolderRefused
from nodes.launch.child import Child
from nodes.launch.spawn import SpawnError
from wsc.v1 import ingress_pb2, ingress_pb2_grpc

logger = logging.getLogger(__name__)


class Coordinators(ingress_pb2_grpc.IngressServicer):
    """Serves Ingress. The thread of each call waits for its process."""

    def __init__(self, home: CoordinatorHome) -> None:
        """home: theirs; they do not outlive this process."""
        self._home = home
        self._changed = threading.Condition()
        self._children: dict[str, Child] = {}  # by job
        self._closing = False

    def count(self) -> int:
        """How many run."""
        return len(self._children)

    def RunCoordinator(
        self, request: ingress_pb2.RunCoordinatorRequest, context: grpc.ServicerContext
    ) -> ingress_pb2.RunCoordinatorResponse:
        try:
            child = self._start(request)
        except (SpawnError, FolderRefused) as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        logger.info("the coordinator of %s has pid %d", request.job, child.pid)
        status = child.wait()
        with self._changed:
            del self._children[request.job]
            child.close()
            self._changed.notify_all()
        logger.info("the coordinator of %s has ended with status %d", request.job, status)
        return ingress_pb2.RunCoordinatorResponse(status=status)

    def _start(self, request: ingress_pb2.RunCoordinatorRequest) -> Child:
        with self._changed:
            if self._closing:
                raise SpawnError("the ingress is going down")
            if request.job in self._children:
                raise SpawnError(f"{request.job} has a coordinator")
            child = self._home.start(request)
            self._children[request.job] = child
        return child

    def EndCoordinator(
        self, request: ingress_pb2.EndCoordinatorRequest, context: grpc.ServicerContext
    ) -> ingress_pb2.EndCoordinatorResponse:
        with self._changed:
            child = self._children.get(request.job)
            if child is not None and request.kill:
                child.kill()
            elif child is not None:
                child.terminate()
        return ingress_pb2.EndCoordinatorResponse()

    def close(self) -> None:
        """End all coordinators, and start no more."""
        with self._changed:
            self._closing = True
            for child in self._children.values():
                child.terminate()
            if not self._changed.wait_for(lambda: not self._children, END_SECONDS):
                for child in self._children.values():
                    child.kill()
