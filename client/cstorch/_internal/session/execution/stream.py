"""The stream of an execution: the messages of the script and the coordinator, from its first step to its last."""

import asyncio
import logging
import queue
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, Literal

import grpc

from cstorch._internal.session import failures
from cstorch._internal.session.job import ClientJob
from cstorch._internal.session.job_session import JobSession
from cstorch.errors import CstorchError, InputError, InternalError, JobCancelledError
from wsc.v1 import coordinator_pb2

logger = logging.getLogger("cstorch.execution")

Expected = Literal["state_wanted", "started", "outputs", "checkpoint", "finished"]

CHECK_SECONDS: Final = 1.0
# The number of consumed steps that are reported together, unless the script has no outputs left before.
CONSUMED_INTERVAL: Final = 4


class ExecutionCall:
    """One execution as its Execute call, continued with the successor of a coordinator that has died.

    Used in the event loop of the session.
    """

    def __init__(
        self,
        session: JobSession,
        begin: coordinator_pb2.Begin,
        deliver: Callable[[coordinator_pb2.ExecuteResponse | Exception | None], None],
    ) -> None:
        """
        Args:
            session: The session of the job that has compiled the step.
            begin: What is run, without the token and the identifier.
            deliver: Takes each response, and at last the error of the call; None: it ended without one.
        """
        self._session = session
        self._begin = begin
        self._begin.token = session.token
        self._begin.id = secrets.token_hex(8)
        self._deliver = deliver
        self._resumption = coordinator_pb2.Resumption()  # the script's progress, for a successor of the coordinator
        self._requests: asyncio.Queue[coordinator_pb2.ExecuteRequest] = asyncio.Queue()  # of the present call
        self._reading = asyncio.create_task(self._read())

    def send(self, request: coordinator_pb2.ExecuteRequest) -> None:
        """Queues a message to the coordinator. No effect while there is none: what matters is in the resumption."""
        match request.WhichOneof("kind"):
            case "consumed":
                self._resumption.consumed_step = request.consumed.step
            case "checkpoint_released":
                self._resumption.released_checkpoints.append(request.checkpoint_released.step)
            case "stop_after":
                self._resumption.consumed_step = request.stop_after.step
                self._begin.num_steps = request.stop_after.step
        self._requests.put_nowait(request)

    async def close(self) -> None:
        """Ends the call; before the last step this cancels the execution."""
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        try:
            self._deliver(await self._follow())
        except Exception as defect:
            logger.exception("a defect in the stream of an execution")
            self._deliver(defect)

    async def _follow(self) -> grpc.RpcError | None:
        """Delivers the responses of the coordinator, and of those that take over, until the last; returns its error."""
        while True:
            connection = self._session.connection
            kind = None
            try:
                async for response in connection.stub.Execute(self._sent()):
                    kind = response.WhichOneof("kind")
                    self._record_progress(response)
                    self._deliver(response)
                return None
            except grpc.RpcError as error:
                if kind in ("finished", "failed"):
                    return None
                if not await self._session.has_successor(error, connection.incarnation):
                    logger.debug("the execution of incarnation %d ended: %s", connection.incarnation, error)
                    return error
            self._requests = asyncio.Queue()
            self._begin.resumption.CopyFrom(self._resumption)

    async def _sent(self) -> AsyncIterator[coordinator_pb2.ExecuteRequest]:
        requests = self._requests
        yield coordinator_pb2.ExecuteRequest(begin=self._begin)
        while True:
            yield await requests.get()

    def _record_progress(self, response: coordinator_pb2.ExecuteResponse) -> None:
        match response.WhichOneof("kind"):
            case "started":
                self._resumption.started = True
            case "outputs":
                self._resumption.shown_step = response.outputs.steps[-1].step
            case "checkpoint":
                self._resumption.announced_checkpoints.append(response.checkpoint.step)


class ExecutionStream:
    """The messages of one execution, for the script's thread.

    The number of outputs that are not yet read is bounded by the coordinator, to which consumed steps are reported.

    Args:
        job: The job that has compiled the step.
        begin: What is run; the call adds the token and the identifier.
    """

    def __init__(self, job: ClientJob, begin: coordinator_pb2.Begin) -> None:
        self._job = job
        self._responses: queue.SimpleQueue[coordinator_pb2.ExecuteResponse | Exception | None] = queue.SimpleQueue()
        self._outputs: deque[coordinator_pb2.StepOutputs] = deque()
        self._consumed = 0  # steps since the last report
        self._checkpoint_steps = sorted(begin.checkpoint_steps)  # those whose snapshots are not released
        self.has_failed = False
        self.failed_step = 0  # that has no input, as the last message says; 0: it is another message
        self._last_step = 0  # that of stop_after
        self._call = job.run(self._open(begin))

    async def _open(self, begin: coordinator_pb2.Begin) -> ExecutionCall:
        return ExecutionCall(self._job.session, begin, self._responses.put)

    def send(self, request: coordinator_pb2.ExecuteRequest) -> None:
        """Queues a message to the coordinator."""
        self._job.call_soon(partial(self._call.send, request))

    def receive(self, *expected: Expected) -> coordinator_pb2.ExecuteResponse:
        """Waits for the next message, which must be of an expected kind.

        There is no deadline, since a step may take any time: the end of the stream or of the job ends the wait.

        Raises:
            InputError: A step has no input: stop_after may follow, unless the execution has failed.
            CstorchError: The execution failed, or another kind of message came.
        """
        self.failed_step = 0
        try:
            return self._receive(expected)
        except CstorchError:
            self.has_failed |= not self.failed_step
            raise

    def _receive(self, expected: tuple[Expected, ...]) -> coordinator_pb2.ExecuteResponse:
        response = self._next()
        if response is None:
            raise self._job.wait_for_failure() or InternalError(f"the execution ended where {expected[0]!r} was due")
        if isinstance(response, Exception):
            raise self._job.reason(response, "running") from None
        kind = response.WhichOneof("kind")
        if kind == "failed":
            raise failures.from_failure(response.failed)
        if kind == "input_failed":
            self.failed_step = response.input_failed.step
            raise failures.from_failure(response.input_failed)
        if kind not in expected:
            raise InternalError(f"the coordinator sent {kind!r} where {expected[0]!r} was due")
        return response

    def _next(self) -> coordinator_pb2.ExecuteResponse | Exception | None:
        while True:
            try:
                return self._responses.get(timeout=CHECK_SECONDS)
            except queue.Empty:
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
        self._release(step)

    def _release(self, step: int) -> None:
        self._checkpoint_steps.remove(step)
        released = coordinator_pb2.CheckpointReleased(step=step)
        self.send(coordinator_pb2.ExecuteRequest(checkpoint_released=released))

    def consumed(self, step: int) -> None:
        """Reports to the coordinator that the closures of all steps up to this one have run; several steps at once."""
        self._consumed += 1
        if self._consumed >= CONSUMED_INTERVAL or not self._outputs:
            self._consumed = 0
            self.send(coordinator_pb2.ExecuteRequest(consumed=coordinator_pb2.Consumed(step=step)))

    def stop_after(self, step: int) -> None:
        """Makes the cluster end the execution after a step, counted from 1, that the script has done. Does not wait.

        Steps that the cluster has run beyond it are undone: it runs those since its last recovery point again.
        """
        for each in [each for each in self._checkpoint_steps if each <= step]:
            self._release(each)
        self._last_step = step
        self.send(coordinator_pb2.ExecuteRequest(stop_after=coordinator_pb2.StopAfter(step=step)))

    def wait_until_stopped(self) -> None:
        """Waits until the execution has ended after stop_after. Raises as `receive`."""
        is_over = False
        while not is_over:  # other messages were on their way
            try:
                is_over = self.receive("finished", "outputs", "checkpoint").HasField("finished")
            except InputError:
                if self.failed_step <= self._last_step:
                    raise

    def finish(self) -> coordinator_pb2.ExecutionFinished:
        """Waits for the end of the last step, and returns what is known then."""
        finished = self.receive("finished").finished
        for name, seconds in sorted(finished.seconds.items()):
            logger.debug("%s: %.3f s", name, seconds)
        return finished

    def close(self) -> None:
        """Ends the call; before the last step this cancels the execution."""
        with suppress(JobCancelledError):  # the job was closed before, and the call with it
            self._job.run(self._call.close())
