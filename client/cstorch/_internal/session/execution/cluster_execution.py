"""Executions on the cluster: the first step is compiled and started; closures run when its outputs arrive."""

import itertools
import logging
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import Future
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from xdsl.dialects.builtin import ModuleOp

from cstorch import backends
from cstorch._internal import state, step_clock
from cstorch._internal.artifacts import write_for_information
from cstorch._internal.batch import check_batch
from cstorch._internal.batch_objects import ChangedObjects, changed_objects
from cstorch._internal.execution import Closure, Execution, Executor, Input
from cstorch._internal.log import logged_if_slow
from cstorch._internal.session.cluster_session import ClusterSession, Target, outcome
from cstorch._internal.session.execution.compiling import compile_step
from cstorch._internal.session.execution.input import loader_name, prepared_input, read_state
from cstorch._internal.session.execution.outputs import takes_values, unpack
from cstorch._internal.session.execution.program_check import report
from cstorch._internal.session.execution.stream import ExecutionStream
from cstorch._internal.session.execution.traced_step import TracedStep
from cstorch._internal.session.job import FORKED, ClientJob
from cstorch._internal.session.staging import Staged
from cstorch._internal.session.tensor_hooks import call_tensor_hooks
from cstorch._internal.session.transfer import ShardReplacedError
from cstorch._internal.tracing import LazyTensor
from cstorch._internal.tracing.provenance import line_of_function
from cstorch.backends.mixed_precision import get_half_dtype_str, mixed_precision
from cstorch.errors import ClusterError, UsageError
from waferbox import execution_folders
from waferbox.cirh.modules.verify import verify
from waferbox.execution_folders import ExecutionRecord, Stage
from waferbox.input_process.batch_digest import UNKNOWN, batch_digest
from wsc.v1 import coordinator_pb2, node_pb2, plan_pb2

logger = logging.getLogger("cstorch.execution")

NO_STEP = (
    "the execution that changed it did not come to an end, and the cluster was some steps ahead of the script: its "
    "states are those of no known step. Load a checkpoint"
)
NOT_RECOVERABLE = (
    "the loop of the execution that changed it was left before its last step, and the cluster was some steps ahead of "
    "the script. It can undo such steps only with recovery points, which cstorch.backends.csx.cluster.max_num_restarts "
    "= 0 turns off. Let the executor run to its end, or load a checkpoint"
)
LEFT_EARLY = (
    "On a Cerebras system a loop must run to its last step, and the states would be lost now: run several executions "
    "in a row, each a loop over a DataExecutor with a smaller num_steps, and decide between them whether to go on"
)

_numbers = itertools.count(1)  # of the script's executions


class ClusterExecution(Execution):
    """An execution on the cluster: one step, its stream, and the closures. A subclass defines when a step is traced.

    Used by the script's thread.

    Args:
        executor: What is run.
        target: The cluster, and the stage with which the execution ends there.
        step: The step as the script makes it.
    """

    def __init__(self, executor: Executor, target: Target, step: TracedStep) -> None:
        super().__init__(executor)
        self._target = target
        self._step = step
        self._rows = 0
        self._first_batch = UNKNOWN  # its digest
        self._changed_objects: Sequence[ChangedObjects] = ()  # in the batches after the first
        self._input: Future[None] | None = None  # done when the workers have the input_fn
        self._staged: Staged | None = None  # initial values that MemoryX makes during the compile
        self._stream: ExecutionStream | None = None  # None if the execution ends before its first step
        self._outputs: Sequence[plan_pb2.Output] = ()
        self._began = 0.0  # the begin of the first step, as of time.monotonic
        self._seconds = 0.0  # from the begin of the first step to the newest outputs, by the cluster's clock
        self._last_ended: float | None = None  # the end of the last step whose closures ran, as of time.monotonic
        self._job: ClientJob | None = None  # None if the execution ends before its first step
        self._is_running = False  # from the first step to the end of the last
        self._done = 0  # the last step that the script has done
        self._is_in_closure = False
        self._input_states: list[bytes] | None = None  # at the checkpoint step whose closures run

    @property
    def last_step(self) -> int:
        return self._done

    @property
    @abstractmethod
    def step_name(self) -> str:
        """The step, with its line if it is a function."""

    @property
    def snapshot_steps(self) -> list[int]:
        """The steps after which the cluster keeps a snapshot of the states."""
        return self.executor.checkpoint_steps

    @cached_property
    def _snapshots(self) -> Set[int]:
        return frozenset(self.snapshot_steps)  # which are computed anew by each call

    @property
    def _session(self) -> ClusterSession:
        assert self._target.session is not None
        return self._target.session

    @property
    def _is_parents(self) -> bool:
        """Whether this process was forked in the loop: the outputs are for its parent."""
        return self._target.session is not None and self._target.session.is_parents

    def _begin(self, looked_at: int = 1) -> Any:
        """Sends the input to the workers, and returns the first batch with tensors on the meta device.

        looked_at: The number of first batches whose objects are compared, at most.

        The values, which may take gigabytes, are freed before the compile.
        """
        loader, session, config = self.executor.dataloader, self._target.session, self._target.config
        runs = session is not None and not self._target.compile_only
        if session is not None:
            session.end_left_execution()
            session.open_in_background()
            if runs:
                # The builder has the states of the random generators, which the first batch changes.
                builder = loader.builder()
                self._input = session.prepare_input(prepared_input(builder, config, self.executor.artifact_dir))
                self._staged = Staged(state.named_getters(), session.stage)
        with logged_if_slow("Reading the first batch"):
            batch, *later = loader.first_batches(min(looked_at, self.executor.num_steps), has_values=runs)
        self._first_batch = batch_digest(pytree.tree_leaves(batch)) if runs else UNKNOWN
        self._rows = check_batch(batch, config.num_csx)
        self._changed_objects = list(changed_objects([batch, *later]))
        return pytree.tree_map_only(torch.Tensor, _without_values, batch)

    def _launch(self) -> None:
        """Lowers the step, then compiles and starts it, unless the target ends the execution before."""
        folder = self.executor.artifact_dir
        path = folder / execution_folders.CIRH
        with logged_if_slow("Lowering the step"):
            module = self._lower()
        record = self._record()
        write_for_information(path, self._step.text)
        write_for_information(folder / execution_folders.RECORD, record.text())
        # Runs before this one may have left folders beside it.
        logger.info("Execution %d (%s/%s), %s", next(_numbers), folder.parent.name, folder.name, record)
        if self._target.session is None:
            verify(module)
            logger.info("The step is valid. With validate_only nothing is compiled or run. CIRH: %s", path)
            return
        job, compiled = compile_step(self._target, self._step.text, trains=self._step.trains)
        if compiled.report:
            # The plan lies beside the folder of its report.
            record = replace(record, plan=str(Path(compiled.report).parent.with_suffix(".plan")))
            write_for_information(folder / execution_folders.RECORD, record.text())
        if self._input is None or self._staged is None:
            return
        with logged_if_slow("Starting the input_fn in the workers"):
            outcome(self._input)
        self._start(job, compiled, self._staged)
        self.executor.profiler.start()
        logger.debug("Beginning the run on %d CSX", self._target.config.num_csx)

    def _lower(self) -> ModuleOp:
        return self._step.lower()

    def _record(self) -> ExecutionRecord:
        """Returns what the execution is, for those who look for it in the artifact folder."""
        executor, half = self.executor, mixed_precision()
        return ExecutionRecord(
            stage=Stage.TRAIN if self._step.trains else Stage.EVAL,
            function=self.step_name,
            model=self._step.model_class,
            loader=_loader_text(executor.dataloader),
            steps=executor.asked_steps,
            rows=self._rows,
            num_csx=self._target.config.num_csx,
            half=get_half_dtype_str() if half else "",
            optimization_level=backends.csx.precision.optimization_level,
            half_gradients=half and backends.csx.precision.half_gradients,
        )

    def _start(self, job: ClientJob, compiled: coordinator_pb2.CompileResponse, staged: Staged) -> None:
        """Opens the stream, sends the states that the cluster lacks, and waits until the first step begins.

        Raises:
            StateError: The script has changed state where it may not.
            ClusterError: The cluster failed.
        """
        cells, states, executor = self._step.cells, self._session.state, self.executor
        if self._target.config.changes_need_checkpoint:
            self._check_changes()
        states.prepare(cells)
        logger.debug("Programming the cluster for execution. This may take a few minutes.")
        logger.debug("Execute job id: %s", job.name)
        logger.debug("Preparing to execute using %d CSX", self._target.config.num_csx)
        begin = coordinator_pb2.Begin(
            artifact=compiled.artifact,
            loader=loader_name(executor.artifact_dir),
            num_steps=executor.num_steps,
            activation_steps=executor.activation_steps,
            checkpoint_steps=self.snapshot_steps,
            wants_input_states=executor.dataloader.is_restartable,
            labels=self._step.labels,
            first_batch=node_pb2.BatchDigest(layout=self._first_batch.layout, values=self._first_batch.values),
        )
        self._job, self._stream = job, ExecutionStream(job, begin)
        stream = self._stream
        self._outputs = compiled.outputs
        pipelined = job.strategy == plan_pb2.EXECUTION_STRATEGY_PIPELINE
        with logged_if_slow("Loading the plan into the nodes"):
            shards = staged.current(cells)
            response = stream.receive("state_wanted", "started")
        names: set[str] = set()
        while response.HasField("state_wanted"):
            wanted = response.state_wanted
            logger.debug("Sending initial weights to the %s", "wafer" if pipelined else "weight servers")
            # States that were sent before are sent again: a node died before the first recovery point.
            names |= states.unsent(cells, wanted.missing)
            try:
                with logged_if_slow(f"Sending {len(names)} state tensors") as work:
                    states.send(cells, compiled.states, wanted.shards, names, shards, work)
            except ShardReplacedError as error:
                logger.debug("%s", error)  # the coordinator requests the states again
            except ClusterError as error:
                raise job.wait_for_failure() or error from None
            else:
                logger.debug("Sent %d of %d state tensors to the cluster", len(names), len(cells))
                sent = coordinator_pb2.StateSent(attempt=wanted.attempt, wrote=bool(names))
                stream.send(coordinator_pb2.ExecuteRequest(state_sent=sent))
            logger.debug("Staging the run: the input workers fill their buffers")
            with logged_if_slow("Filling the buffers of the input workers"):
                response = stream.receive("started", "state_wanted")
            shards = {}  # the staged values are used up, or were lost with a shard
        states.begin(cells)
        self._is_running = True
        self._began = time.monotonic()

    def _check_changes(self) -> None:
        """Checks what the script has changed since the execution before; raises StateError."""
        self._session.state.check_changes(self._step.cells, backends.csx.debug.lazy_initialization)

    def _end_step(self, step: int) -> None:
        """Waits for the outputs of the step, and runs the closures that were called in it."""
        stream, executor = self._stream, self.executor
        if stream is None:
            return
        if self._is_parents:
            raise UsageError(FORKED)
        executor.profiler.step(self._rows)
        has_snapshot = step in self._snapshots
        values = self._receive_outputs(stream) if executor.on_activation_step else {}
        self._done = step
        self._warn_of_findings()
        if not executor.on_activation_step and not has_snapshot:
            return
        if values:
            executor.profiler.record_elapsed(self._seconds)
        calls = [call for call in self._step.calls if not call.at_checkpoint]
        if executor.on_checkpoint_step:
            calls += [call for call in self._step.calls if call.at_checkpoint]
        if has_snapshot:
            with stream.checkpoint(step) as self._input_states, self._session.state.at_checkpoint(step):
                self._run_closures(calls, values)
                self._at_snapshot(step)
            self._input_states = None
        else:
            self._run_closures(calls, values)
        stream.consumed(step)

    def _at_snapshot(self, step: int) -> None:
        """Does what a subclass does while the states after a step can be read."""

    def _receive_outputs(self, stream: ExecutionStream) -> dict[str, torch.Tensor]:
        """Returns the outputs of the next activation step, as CPU tensors by name."""
        if not self._outputs:
            return {}
        received = stream.receive_outputs()
        self._seconds = received.seconds
        return unpack(self._outputs, received)

    def _run_closures(self, calls: list[Closure], values: dict[str, torch.Tensor]) -> None:
        step, outputs = self._step, self._step.outputs
        step.at_hand.evaluate(step.has_output, lambda source: outputs.value(source, values))
        # All closures are filled before the first runs, since a closure may write to its tensors.
        filled = [outputs.fill(call, values) for call in calls]
        step.at_hand.is_last = self.executor.on_final_iteration
        self._is_in_closure = True
        try:
            ended = self._began + self._seconds if values else time.monotonic()
            with step_clock.closures_of_step(self._last_ended or self._began, ended):
                arrived = False
                for closure, call in zip(calls, filled, strict=True):
                    if not arrived and takes_values(closure):
                        # Not earlier: closures before may prepare for values, as plain PyTorch's forward pass does.
                        call_tensor_hooks(values)
                        arrived = True
                    call.run()
                if not arrived:
                    call_tensor_hooks(values)
            self._last_ended = ended
        finally:
            self._is_in_closure = False

    def _warn_of_findings(self, findings: Iterable[str] = ()) -> None:
        """Warns of what the cluster has found that the script does otherwise than it says.

        findings: All of the execution, at its end; those that came before are known.
        """
        if self._job is not None:
            line = line_of_function(self.executor.dataloader.input_fn)
            for finding in self._job.new_findings(findings):
                report(f"at {line} {finding}" if line else finding, line)

    def _finish(self) -> None:
        if self._stream is not None:
            with logged_if_slow("Ending the execution"):
                finished = self._stream.finish()
            self._warn_of_findings(finished.findings)
            self._settle()
            if finished.input_states:
                self.executor.dataloader.completed([read_state(each) for each in finished.input_states])
            kind = "Training" if self._step.trains else "Evaluation"
            logger.info("%s of %d steps completed successfully!", kind, self.executor.num_steps)

    def _settle(self) -> None:
        """Marks the end of the execution after the last step that the script has done."""
        self._is_running = False
        self._session.state.settle(is_saved=self._is_saved)

    @property
    def _is_saved(self) -> bool:
        """Whether the last step that the script has done was a checkpoint step."""
        return self._done in self._snapshots

    def _close(self) -> None:
        """Ends the execution, or marks it as left if the script has left its loop before the last step."""
        self._step.close()
        job, stream, executor = self._job, self._stream, self.executor
        if job is None or stream is None or self._is_parents:
            return
        if stream.failed_step:
            self._done = min(self._done, stream.failed_step - 1)  # the script is ahead where it awaits no outputs
        if self._done % executor.activation_steps == 0:  # else the number is that of an earlier step
            for schedule in state.registered("scheduler"):
                schedule.put_back()
        if self._is_running and job.recovers and job.alive and not stream.has_failed:
            text = "The loop was left after step %d of %d: steps that the cluster has run beyond it are undone"
            if self._done < executor.num_steps:
                logger.info(text, self._done, executor.num_steps)
                if not stream.failed_step:
                    _warn_once(LEFT_EARLY)
            stream.stop_after(self._done)  # at once, so that the job is idle while the script does other work
            self._session.state.leave(self)
            return
        self.give_up()
        if self._is_running or self._done < executor.num_steps:
            if job.failure is not None and not stream.has_failed:
                text = "The loop was left after step %d of %d, when the job had ended: %s"
                logger.error(text, self._done, executor.num_steps, job.failure)
            self._session.abandon_job(_reason_of_loss(job))

    # --- After the script has left the loop, as LeftExecution ---------------------------------------------------------

    def end(self) -> None:
        assert self._stream is not None
        try:
            self._stream.wait_until_stopped()
            self._settle()
        except BaseException:
            self.give_up()
            assert self._job is not None
            self._session.abandon_job(_reason_of_loss(self._job))
            raise
        self.give_up()

    def give_up(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    # --- Calls of the script within a step ----------------------------------------------------------------------------

    def input_states(self) -> list[dict[str, Any]]:
        if self._input_states is None:
            raise UsageError(
                "the cluster has not run this step yet: read the state of the input in a @checkpoint_closure"
            )
        return [read_state(state) for state in self._input_states]

    def use_model(self, model: nn.Module) -> None:
        self._step.use_model(model)

    def call_closure(self, closure: Closure) -> Any:
        if self._is_in_closure:
            return closure.run()
        self._step.call_closure(closure)
        return None


def _reason_of_loss(job: ClientJob) -> str:
    """Returns why states of an execution that did not come to its end cannot be read."""
    if job.failure is not None:
        return f"the job ended in the execution that changed it: {job.failure}"
    return NO_STEP if job.recovers else NOT_RECOVERABLE


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, LazyTensor):
        return tensor  # it has none on the client
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _loader_text(loader: Input) -> str:
    """Returns the input_fn with its line, and the class of the samples' set if the loader names it."""
    function = loader.input_fn
    name = getattr(function, "__name__", type(function).__name__)
    line = line_of_function(function)
    dataset = getattr(loader.dataloader, "dataset", None)
    of = "" if dataset is None else f" of {type(dataset).__name__}"
    return f"{name}{f' ({line})' if line else ''}{of}"
