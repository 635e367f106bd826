"""The stream of one execution: what the client tells the coordinator, and what comes back, in order."""

import logging
import queue
import secrets
import threading
from collections import deque
from typing import Literal

import grpc

from cstorch.errors import InternalError
from cstorch.session import failures
from cstorch.session.job import Job
from interconnect.threads import GuardedThread
from wsc.v1 import coordinator_pb2

logger = logging.getLogger("cstorch.execution")

Expected = Literal["state_wanted", "started", "outputs", "checkpoint", "finished"]

CHECK_SECONDS = 1.0
JOIN_SECONDS = 5.0
# After so many consumed steps the coordinator is told, even if more outputs are here already.
CONSUMED_INTERVAL = 4


class ExecutionStream:
    """One Execute call. Used by the script's thread; a thread of ours reads what arrives.

    How many outputs may wait unread is bounded by the coordinator, which knows what was consumed.
    """

    def __init__(self, job: Job, begin: coordinator_pb2.Begin) -> None:
        self._job = job
        self._begin = begin
        self._begin.id = secrets.token_hex(8)
        self._lock = threading.Lock()  # of the next five
        self._requests: queue.SimpleQueue[coordinator_pb2.ExecuteRequest | None] = queue.SimpleQueue()
        self._closed = False
        self._had = coordinator_pb2.Resumption()  # what there is of the execution here
        self._turn = 0  # of the coordinator that is called
        self._call = self._open()
        self._responses: queue.SimpleQueue[coordinator_pb2.ExecuteResponse | Exception | None] = queue.SimpleQueue()
        self._outputs: deque[coordinator_pb2.StepOutputs] = deque()
        self._consumed = 0  # steps since the coordinator was told
        self._reader = GuardedThread(self._read, name="cstorch execution", on_defect=self._responses.put)
        self._reader.start()

    def _open(self) -> "grpc.CallIterator[coordinator_pb2.ExecuteResponse]":
        """With the lock, or before there are threads."""
        self._turn = self._job.turn
        self._requests.put(coordinator_pb2.ExecuteRequest(begin=self._begin))
        return self._job.execute(iter(self._requests.get, None))

    def _read(self) -> None:
        while True:
            kind = None
            try:
                for response in self._call:
                    kind = response.WhichOneof("kind")
                    self._note(response)
                    self._responses.put(response)
                self._responses.put(None)
                return
            except grpc.RpcError as error:
                is_over = kind in ("finished", "failed")
                if is_over or not self._job.is_taken_up(error, self._turn, lambda: not self._closed):
                    # The script hears of it when it is done with what it does now.
                    logger.debug("the execution of turn %d ended: %s", self._turn, error)
                    self._responses.put(None if is_over else error)
                    return
            if not self._reopen():
                self._responses.put(None)
                return

    def _note(self, response: coordinator_pb2.ExecuteResponse) -> None:
        with self._lock:
            match response.WhichOneof("kind"):
                case "started":
                    self._had.started = True
                case "outputs":
                    self._had.shown_step = response.outputs.steps[-1].step
                case "checkpoint":
                    self._had.told_checkpoints.append(response.checkpoint.step)

    def _reopen(self) -> bool:
        """Goes on with the coordinator that has taken up the job; False if nobody wants that any more."""
        with self._lock:
            if self._closed:
                return False
            self._requests.put(None)  # ends gRPC's thread that waits for them
            self._requests = queue.SimpleQueue()
            self._begin.resumption.CopyFrom(self._had)
            self._call = self._open()
        return True

    def send(self, request: coordinator_pb2.ExecuteRequest) -> None:
        """Queues a message to the coordinator."""
        with self._lock:
            match request.WhichOneof("kind"):
                case "consumed":
                    self._had.consumed_step = request.consumed.step
                case "checkpoint_taken":
                    self._had.taken_checkpoints.append(request.checkpoint_taken.step)
            self._requests.put(request)

    def receive(self, *expected: Expected) -> coordinator_pb2.ExecuteResponse:
        """Waits for the next message, which must be of an expected kind.

        A step takes as long as it takes: what ends the wait, besides the message, is the end of the stream or the job.

        Raises:
            CstorchError: the execution failed; the error says where and why.
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

    def receive_outputs(self) -> coordinator_pb2.StepOutputs:
        """The outputs of the next step that has any. Raises as `receive`."""
        if not self._outputs:
            self._outputs.extend(self.receive("outputs").outputs.steps)
        return self._outputs.popleft()

    def consumed(self, step: int) -> None:
        """The closures of all steps up to this one have run; the coordinator is told of several at once."""
        self._consumed += 1
        if self._consumed >= CONSUMED_INTERVAL or not self._outputs:
            self._consumed = 0
            self.send(coordinator_pb2.ExecuteRequest(consumed=coordinator_pb2.Consumed(step=step)))

    def _next(self) -> coordinator_pb2.ExecuteResponse | Exception | None:
        while True:
            try:
                return self._responses.get(timeout=CHECK_SECONDS)
            except queue.Empty:
                if not self._reader.is_alive() and self._responses.empty():
                    return None
                if self._job.failure is not None and self._responses.empty():
                    raise self._job.failure from None

    def close(self) -> None:
        """Ends the call; before the execution has finished this cancels it."""
        with self._lock:
            self._closed = True
            self._requests.put(None)
            self._call.cancel()  # type: ignore[no-untyped-call]
        self._job.wake()
        self._reader.join(JOIN_SECONDS)
