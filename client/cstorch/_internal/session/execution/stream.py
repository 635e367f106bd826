"""The stream of an execution: the messages of the script and the coordinator, from its first step to its last."""

import logging
import queue
import secrets
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

import grpc

from cstorch._internal.session import failures
from cstorch._internal.session.job import ClientJob
from cstorch.errors import InternalError
from waferbox.host.threads import GuardedThread
from wsc.v1 import coordinator_pb2

logger = logging.getLogger("cstorch.execution")

Expected = Literal["state_wanted", "started", "outputs", "checkpoint", "finished"]

CHECK_SECONDS: Final = 1.0
JOIN_SECONDS: Final = 5.0
# The number of consumed steps that are reported together, unless the script has no outputs left before.
CONSUMED_INTERVAL: Final = 4


class ExecutionStream:
    """One execution on a job, as its Execute call; continued with the successor of a coordinator that has died.

    Used by the script's thread; a thread of its own reads the responses. The number of outputs that are not yet read
    is bounded by the coordinator, to which consumed steps are reported.

    Args:
        job: The job that has compiled the step.
        begin: What is run; the stream adds the token and the identifier.
    """

    def __init__(self, job: ClientJob, begin: coordinator_pb2.Begin) -> None:
        self._job = job
        self._begin = begin
        self._begin.token = job.token
        self._begin.id = secrets.token_hex(8)
        self._lock = threading.Lock()  # of the next five
        self._requests: queue.SimpleQueue[coordinator_pb2.ExecuteRequest | None] = queue.SimpleQueue()
        self._closed = False
        self._resumption = coordinator_pb2.Resumption()  # the script's progress, for a successor of the coordinator
        self._incarnation = 0  # of the coordinator that is called
        self._call = self._open()
        self._responses: queue.SimpleQueue[coordinator_pb2.ExecuteResponse | Exception | None] = queue.SimpleQueue()
        self._outputs: deque[coordinator_pb2.StepOutputs] = deque()
        self._consumed = 0  # steps since the last report
        self._reader = GuardedThread(self._read, name="cstorch execution", on_defect=self._responses.put)
        self._reader.start()

    def _open(self) -> "grpc.CallIterator[coordinator_pb2.ExecuteResponse]":
        """Opens the call; with the lock, or before there are threads."""
        connection = self._job.connection
        self._incarnation = connection.incarnation
        self._requests.put(coordinator_pb2.ExecuteRequest(begin=self._begin))
        return connection.stub.Execute(iter(self._requests.get, None))

    def _read(self) -> None:
        while True:
            kind = None
            try:
                for response in self._call:
                    kind = response.WhichOneof("kind")
                    self._record_progress(response)
                    self._responses.put(response)
                self._responses.put(None)
                return
            except grpc.RpcError as error:
                is_over = kind in ("finished", "failed")
                if is_over or not self._job.has_successor(error, self._incarnation, lambda: not self._closed):
                    # Raised in the script's thread, after the responses that came before.
                    logger.debug("the execution of incarnation %d ended: %s", self._incarnation, error)
                    self._responses.put(None if is_over else error)
                    return
            if not self._reopen():
                self._responses.put(None)
                return

    def _record_progress(self, response: coordinator_pb2.ExecuteResponse) -> None:
        with self._lock:
            match response.WhichOneof("kind"):
                case "started":
                    self._resumption.started = True
                case "outputs":
                    self._resumption.shown_step = response.outputs.steps[-1].step
                case "checkpoint":
                    self._resumption.announced_checkpoints.append(response.checkpoint.step)

    def _reopen(self) -> bool:
        """Continues with the coordinator that has taken over the job; False if the stream was closed."""
        with self._lock:
            if self._closed:
                return False
            self._requests.put(None)  # ends gRPC's thread that reads the old queue
            self._requests = queue.SimpleQueue()
            self._begin.resumption.CopyFrom(self._resumption)
            self._call = self._open()
        return True

    def send(self, request: coordinator_pb2.ExecuteRequest) -> None:
        """Queues a message to the coordinator."""
        with self._lock:
            match request.WhichOneof("kind"):
                case "consumed":
                    self._resumption.consumed_step = request.consumed.step
                case "checkpoint_released":
                    self._resumption.released_checkpoints.append(request.checkpoint_released.step)
            self._requests.put(request)

    def receive(self, *expected: Expected) -> coordinator_pb2.ExecuteResponse:
        """Waits for the next message, which must be of an expected kind.

        There is no deadline, since a step may take any time: the end of the stream or of the job ends the wait.

        Raises:
            CstorchError: The execution failed, or another kind of message came.
        """
        response = self._next()
        if response is None:
            raise self._job.wait_for_failure() or InternalError(f"the execution ended where {expected[0]!r} was due")
        if isinstance(response, Exception):
            raise self._job.reason(response, "running") from None
        kind = response.WhichOneof("kind")
        if kind == "failed":
            raise failures.from_failure(response.failed)
        if kind not in expected:
            raise InternalError(f"the coordinator sent {kind!r} where {expected[0]!r} was due")
        return response

    def _next(self) -> coordinator_pb2.ExecuteResponse | Exception | None:
        while True:
            try:
                return self._responses.get(timeout=CHECK_SECONDS)
            except queue.Empty:
                if not self._reader.is_alive() and self._responses.empty():
                    return None
                if self._job.failure is not None and self._responses.empty():
                    raise self._job.failure from None

    def receive_outputs(self) -> coordinator_pb2.StepOutputs:
        """Returns the outputs of the next activation step. Raises as `receive`."""
        if not self._outputs:
            self._outputs.extend(self.receive("outputs").outputs.steps)
        return self._outputs.popleft()

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[list[bytes]]:
        """Waits for the snapshot after a step, yields the states of the workers' loaders, and releases the snapshot.

        Args:
            step: Counted from 1; it must be the next checkpoint step.
        """
        taken = self.receive("checkpoint").checkpoint
        yield list(taken.input_states)
        released = coordinator_pb2.CheckpointReleased(step=step)
        self.send(coordinator_pb2.ExecuteRequest(checkpoint_released=released))

    def consumed(self, step: int) -> None:
        """Reports to the coordinator that the closures of all steps up to this one have run; several steps at once."""
        self._consumed += 1
        if self._consumed >= CONSUMED_INTERVAL or not self._outputs:
            self._consumed = 0
            self.send(coordinator_pb2.ExecuteRequest(consumed=coordinator_pb2.Consumed(step=step)))

    def finish(self) -> list[bytes]:
        """Waits for the end of the last step; returns the states of the workers' loaders, if there are any."""
        finished = self.receive("finished").finished
        for name, seconds in sorted(finished.seconds.items()):
            logger.debug("%s: %.3f s", name, seconds)
        return list(finished.input_states)

    def close(self) -> None:
        """Ends the call; before the last step this cancels the execution."""
        with self._lock:
            self._closed = True
            self._requests.put(None)
            self._call.cancel()  # type: ignore[no-untyped-call]
        self._job.wake()
        self._reader.join(JOIN_SECONDS)
