"""The run of a compiled step on a job: its state goes there, and what each step has for the script comes back."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from cstorch import backends
from cstorch.errors import ClusterError
from cstorch.execution import Executor
from cstorch.session.execution.input import loader_name
from cstorch.session.execution.outputs import unpack
from cstorch.session.execution.stream import ExecutionStream
from cstorch.session.execution.target import Target
from cstorch.session.initialisation import Staged
from cstorch.session.job import Job
from cstorch.session.transfer import ShardReplacedError
from cstorch.tracing import Cell
from wsc.v1 import coordinator_pb2, plan_pb2

logger = logging.getLogger("cstorch.execution")


class Run:
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
        job: Job,
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
        self._stream.send(coordinator_pb2.ExecuteRequest(checkpoint_taken=coordinator_pb2.CheckpointTaken(step=step)))

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


def _begin(executor: Executor, job: Job, compiled: coordinator_pb2.CompileResponse) -> coordinator_pb2.Begin:
    return coordinator_pb2.Begin(
        token=job.token,
        artifact=compiled.artifact,
        loader=loader_name(executor.artifact_dir),
        num_steps=executor.num_steps,
        activation_steps=executor.activation_steps,
        checkpoint_steps=executor.checkpoint_steps,
        wants_input_states=executor.dataloader.is_restartable,
    )
