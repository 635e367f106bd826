"""The run of a compiled step on a job: its stream of messages, its state, and what each step has for the script."""

import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import grpc
import torch

from cstorch import backends
from cstorch._internal.execution import Executor
from cstorch._internal.session import failures
from cstorch._internal.session.cluster_session import Target
from cstorch._internal.session.execution.input import loader_name
from cstorch._internal.session.execution.outputs import unpack
from cstorch._internal.session.job import ClientJob
from cstorch._internal.session.staging import Staged
from cstorch._internal.session.transfer import ShardReplacedError
from cstorch._internal.tracing import Cell
from cstorch.errors import ClusterError, InternalError
from waferbox.host.threads import GuardedThread
from wsc.v1 import coordinator_pb2, plan_pb2

# --- The stream of one execution: what the client tells the coordinator, and what comes back, in order ----------------


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

    def __init__(self, job: ClientJob, begin: coordinator_pb2.Begin) -> None:
        self._job = job
        self._begin = begin
        self._begin.id = secrets.token_hex(8)
        self._lock = threading.Lock()  # of the next five
        self._requests: queue.SimpleQueue[coordinator_pb2.ExecuteRequest | None] = queue.SimpleQueue()
        self._closed = False
        self._resumption = coordinator_pb2.Resumption()  # what there is of the execution here
        self._incarnation = 0  # of the coordinator that is called
        self._call = self._open()
        self._responses: queue.SimpleQueue[coordinator_pb2.ExecuteResponse | Exception | None] = queue.SimpleQueue()
        self._outputs: deque[coordinator_pb2.StepOutputs] = deque()
        self._consumed = 0  # steps since the coordinator was told
        self._reader = GuardedThread(self._read, name="cstorch execution", on_defect=self._responses.put)
        self._reader.start()

    def _open(self) -> "grpc.CallIterator[coordinator_pb2.ExecuteResponse]":
        """With the lock, or before there are threads."""
        self._incarnation = self._job.incarnation
        self._requests.put(coordinator_pb2.ExecuteRequest(begin=self._begin))
        return self._job.execute(iter(self._requests.get, None))

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
                    # The script hears of it when it is done with what it does now.
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
        """Goes on with the coordinator that has taken up the job; False if nobody wants that any more."""
        with self._lock:
            if self._closed:
                return False
            self._requests.put(None)  # ends gRPC's thread that waits for them
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


# ----------------------------------------------------------------------------------------------------------------------
# The run of a compiled step on a job: its state goes there, and what each step has for the script comes back


class ClusterRun:
    """A run from its first step to its last, on one job; it knows no closures.

    To go on with an execution after its job has failed means to make another one, on another job.

    Args:
        target: has a session, whose state on the cluster the run reads and changes.
        job: that has compiled the step.
        compiled: what it made of the step.
        cells: the states of the step, by name.

    Raises:
        StateError: the script has changed state where it may not.
    """

    def __init__(
        self,
        executor: Executor,
        target: Target,
        job: ClientJob,
        compiled: coordinator_pb2.CompileResponse,
        cells: Mapping[str, Cell],
    ) -> None:
        assert target.session is not None
        self._job = job
        self._state = target.session.state
        self._cells = cells
        self._compiled = compiled
        self.began = 0.0  # when the first step did, as of time.monotonic
        self.seconds = 0.0  # from the begin of the first step to the newest outputs, by the cluster's clock
        if target.config.changes_need_checkpoint:
            self._state.check_changes(cells, backends.csx.debug.lazy_initialization)
        self._state.prepare(cells)
        logger.info("Programming the cluster for execution. This may take a few minutes.")
        logger.info("Execute job id: %s", job.name)
        logger.info("Preparing to execute using %d CSX", target.config.num_csx)
        self._stream = ExecutionStream(job, _begin(executor, job, compiled))

    def start(self, staged: Staged) -> None:
        """Sends the state that the cluster has not, and waits until the first step begins.

        Args:
            staged: initial values that the cluster has made.

        Raises:
            ClusterError: the cluster failed.
        """
        cells = self._cells
        pipelined = self._job.strategy == plan_pb2.EXECUTION_STRATEGY_PIPELINE
        places = staged.current(cells)
        sent: set[str] = set()
        response = self._stream.receive("state_wanted", "started")
        while response.HasField("state_wanted"):
            logger.info("Sending initial weights to the %s", "wafer" if pipelined else "weight servers")
            self._send(response.state_wanted, places, sent)
            logger.info("Staging the run: the input workers fill their buffers")
            # If somebody dies before the cluster has put the states where no death takes them, they are wanted again.
            response = self._stream.receive("started", "state_wanted")
            places = {}  # what was staged was used up, or has gone with a shard
        self._state.begin(cells)
        self.began = time.monotonic()

    def _send(self, wanted: coordinator_pb2.StateWanted, staged: Mapping[str, int], sent: set[str]) -> None:
        """Sends what is wanted, and what was sent before; adds its names to `sent`."""
        cells = self._cells
        sent |= self._state.unsent(cells, wanted.missing)
        try:
            self._state.send(cells, self._compiled.states, wanted.shards, sent, staged)
        except ShardReplacedError as error:
            logger.debug("%s", error)
            return
        except ClusterError as error:
            raise self._job.wait_for_failure() or error from None
        logger.info("Sent %d of %d state tensors to the cluster", len(sent), len(cells))
        answer = coordinator_pb2.StateSent(attempt=wanted.attempt, wrote=bool(sent))
        self._stream.send(coordinator_pb2.ExecuteRequest(state_sent=answer))

    def receive_outputs(self) -> dict[str, torch.Tensor]:
        """The outputs of the next activation step, as CPU tensors by name."""
        if not self._compiled.outputs:
            return {}
        received = self._stream.receive_outputs()
        self.seconds = received.seconds
        return unpack(self._compiled.outputs, received)

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[list[bytes]]:
        """Waits for the snapshot after `step`, counted from 1; within it, reads of state get that.

        Gives the states of the workers' loaders.
        """
        taken = self._stream.receive("checkpoint").checkpoint
        with self._state.at_checkpoint(step):
            yield list(taken.input_states)
        self._stream.send(
            coordinator_pb2.ExecuteRequest(checkpoint_released=coordinator_pb2.CheckpointReleased(step=step))
        )

    def consumed(self, step: int) -> None:
        """The closures of all steps up to this one have run."""
        self._stream.consumed(step)

    def finish(self, *, is_saved: bool) -> list[bytes]:
        """Waits for the end of the last step; returns the states of the workers' loaders after it, if they are known.

        Args:
            is_saved: whether it was a checkpoint step.
        """
        finished = self._stream.receive("finished").finished
        for name, seconds in sorted(finished.seconds.items()):
            logger.debug("%s: %.3f s", name, seconds)
        self._state.settle(is_saved)
        return list(finished.input_states)

    def close(self) -> None:
        """Ends the run; before its last step this cancels it."""
        self._stream.close()


def _begin(executor: Executor, job: ClientJob, compiled: coordinator_pb2.CompileResponse) -> coordinator_pb2.Begin:
    return coordinator_pb2.Begin(
        token=job.token,
        artifact=compiled.artifact,
        loader=loader_name(executor.artifact_dir),
        num_steps=executor.num_steps,
        activation_steps=executor.activation_steps,
        checkpoint_steps=executor.checkpoint_steps,
        wants_input_states=executor.dataloader.is_restartable,
    )
