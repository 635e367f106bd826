"""The session of a vendor's client: its Waferbox job, from the first compile until the client ends its last job."""

import json
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from cstorch._internal.session.job import ClientJob
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import ClusterError, CompileError, CstorchError, JobCancelledError, UsageError
from vendor_gateway.presence import Presence
from vendor_gateway.states import States
from vendor_gateway.vendor_execution import CompiledStep, Resources, RunSettings, VendorExecution
from vendor_gateway.wire_values import MAX_STEPS
from wsc.v1 import node_pb2, plan_pb2

# --- Messages for the script ------------------------------------------------------------------------------------------


MAX_MESSAGES: Final = 256  # the most messages that the client has not fetched


class Messages(logging.Handler):
    """The log records of a job that the client has not fetched; beyond MAX_MESSAGES they are dropped. Thread-safe."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._records: queue.Queue[logging.LogRecord] = queue.Queue(MAX_MESSAGES)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._records.put_nowait(record)
        except queue.Full:
            """The client fetches no messages at present."""

    def take(self, seconds: float) -> logging.LogRecord | None:
        """Returns the next record; None after so many seconds without one."""
        try:
            return self._records.get(timeout=seconds)
        except queue.Empty:
            return None


def messages_logger(messages: Messages, parent: logging.Logger) -> logging.Logger:
    """Returns a logger of one job, whose records go to the client and to the parent."""
    logger = logging.Logger(f"{parent.name}.job")
    logger.parent = parent
    logger.addHandler(messages)
    return logger


# --- The session ------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

COMPILE_FOLDER: Final = "cached_compile"
MAX_STEPS_KEPT: Final = 16  # the most compiled steps
MAX_LABELS: Final = 32
MAX_REPOSITORY: Final = 1 << 20  # the most names of states
_NO_TEXT: Final = (
    "the client has sent no text for the step: its program, torch-cirh-opt, could not lower it. The client reports the "
    'reason when it only validates: cstorch.backend("CSX", validate_only=True), with the same script. Inputs in uint8, '
    "int8 and float64 are one reason: convert them in the input_fn, as in x.to(torch.int32) or x.to(torch.float32). An "
    "operation that it cannot legalize has to be written with others. If the program is not found, add the bin folder "
    "of the client's environment to PATH"
)
_LABEL_PART: Final = re.compile(r"[^\s=]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTarget:
    """The cluster of a job (host:port of its management), and the path of the interpreter for its input_fns."""

    management: str
    input_python: str


@dataclass(slots=True, kw_only=True)
class QueueSettings:
    """The settings of a job for the queue."""

    labels: Mapping[str, str]
    priority: int  # 1 (first) to 3

    def label_texts(self) -> list[str]:
        """Returns the labels that are valid in Waferbox too, as "key=value"."""
        given = [(key, value) for key, value in self.labels.items() if _LABEL_PART.fullmatch(f"{key}{value}" or "=")]
        return [f"{key}={value}" for key, value in given[:MAX_LABELS]]


class VendorSession:
    """The session of one client: its job, the compiled steps, and the execution that runs.

    Thread-safe: changes of the job happen one after the other; `close` interrupts them. Raises CstorchError for errors
    of the client, of the cluster and of the user's code.
    """

    def __init__(self, target: JobTarget, workflow: str) -> None:
        self.workflow = workflow
        self.peer = ""  # the address from which the client last began a job
        self.presence = Presence()
        self.messages = Messages()
        self.queue = QueueSettings(labels={}, priority=2)
        self.python_paths: Sequence[str] = ()
        self.mount_dirs: Sequence[str] = ()
        self._target = target
        self._changing = threading.Lock()  # held to change the next five
        self._job: ClientJob | None = None
        self._resources: Resources | None = None
        self._states: States | None = None
        self._execution: VendorExecution | None = None
        self._artifact = ""
        self._steps: dict[str, CompiledStep] = {}
        self._repository: dict[int, str] = {}  # the names of the states that are kept, by the client's number
        self._num_executions = 0
        self._failure: CstorchError | None = None
        self._closed = False

    def compile(self, text: str, resources: Resources) -> CompiledStep:
        """Compiles a step. Raises CompileError if it has no plan on this cluster, or the client sent no text for it."""
        if not text.strip():
            raise CompileError(_NO_TEXT)
        with self._changing:
            return self._compile(text, resources)

    def _compile(self, text: str, resources: Resources) -> CompiledStep:
        job = self._job_with(resources)
        # The text already has the values that are in half precision, so no option names them.
        response = job.compile(text, plan_pb2.CompileOptions(execution_strategy=job.strategy))
        step = CompiledStep(text=text, resources=resources, response=response)
        self._steps.pop(response.artifact, None)
        self._steps[response.artifact] = step
        for old in list(self._steps)[:-MAX_STEPS_KEPT]:
            del self._steps[old]
        return step

    def _job_with(self, resources: Resources) -> ClientJob:
        if self._closed:
            raise JobCancelledError("the job was cancelled")
        if self._job is not None and (not self._job.alive or self._resources != resources):
            if self._execution is not None and self._job.alive:
                raise UsageError("a step cannot be compiled for other wafers while another runs")
            self._drop_job()
        if self._job is None:
            config = ClusterConfig(
                mgmt_address=self._target.management,
                num_csx=resources.num_csx,
                num_workers_per_csx=resources.num_workers_per_csx,
                max_wgt_servers=resources.max_wgt_servers,
                job_labels=self.queue.label_texts(),
                job_priority=f"p{self.queue.priority}",
            )
            log = messages_logger(self.messages, logger)
            self._job, self._resources = ClientJob(self._target.management, config, COMPILE_FOLDER, log=log), resources
            self._failure = None
            logger.info("Workflow %s has %s", self.workflow, self._job.name)
            self._states = States(self._job)
            if self._closed:  # `close` sets it without the lock, perhaps before it could see this job.
                self._drop_job()
                raise JobCancelledError("the job was cancelled")
        return self._job

    def load(self, artifact: str) -> None:
        """Chooses the step to run. It is compiled again if the client has begun a new job since."""
        with self._changing:
            step = self._steps.get(artifact)
            if step is None:
                raise UsageError(f"nothing was compiled as {artifact[:64]!r}")
            if self._job is None or not self._job.alive:
                self._compile(step.text, step.resources)
            self._artifact = artifact

    def run(
        self, builder: Mapping[str, str], num_steps: int, activation_steps: int, checkpoint_steps: Sequence[int]
    ) -> None:
        """Begins an execution of the loaded step. builder: the builder of its input, as the client sent it."""
        with self._changing:
            if self._job is None or self._states is None or self._artifact not in self._steps:
                raise UsageError("no step is loaded")
            if self._execution is not None:
                raise UsageError("an execution runs already")
            if not 0 < num_steps <= MAX_STEPS or not 0 < activation_steps <= MAX_STEPS:
                raise UsageError(f"{num_steps} steps cannot be run")
            self._num_executions += 1
            step = self._steps[self._artifact]
            settings = RunSettings(
                loader=f"loader_{self._num_executions}",
                num_steps=num_steps,
                activation_steps=activation_steps,
                checkpoint_steps=checkpoint_steps,
            )
            self._job.prepare_input(
                node_pb2.PrepareInput(
                    loader=settings.loader,
                    builder=json.dumps(dict(builder)).encode(),
                    vendor_builder=True,
                    input_names=step.input_names,
                    interpreter=os.fsencode(self._target.input_python),
                    python_paths=map(os.fsencode, self.python_paths),
                    mount_dirs=map(os.fsencode, self.mount_dirs),
                )
            )
            self._execution = VendorExecution(self._job, self._states, step, settings)

    def set_priority(self, priority: int) -> None:
        """Sets the priority of the present and of later jobs, from 1 (first) to 3."""
        self.queue.priority = priority
        job = self._job
        if job is not None:
            job.set_priority(priority)

    def state_names(self) -> list[str]:
        """Returns the names of the states of the execution."""
        return self._running().names

    def state_elements(self, name: str) -> int:
        """Returns the number of elements of a state. Raises UnknownStateError."""
        return self._known_states().elements(name)

    def write(self, name: str, value: torch.Tensor) -> None:
        """Writes a state; see States.write."""
        self._known_states().write(name, value)

    def start(self) -> None:
        """Starts the steps of the execution."""
        self._running().start()

    def output(self, name: str, step: int, is_active: Callable[[], bool]) -> torch.Tensor:
        """Returns an output or a state after a step; see VendorExecution.get."""
        try:
            return self._running().get(name, step, is_active)
        except CstorchError as error:
            self.fail(error)
            raise

    def input_states(self, step: int, is_active: Callable[[], bool]) -> Sequence[str]:
        """Returns the states of the loaders after a step; see VendorExecution.input_states."""
        return self._running().input_states(step, is_active)

    def finish(self, is_success: bool, is_active: Callable[[], bool]) -> None:
        """Ends the execution, if there is one; see VendorExecution.finish."""
        with self._changing:
            execution, self._execution = self._execution, None
        if execution is None:
            return
        if is_success:
            execution.finish(is_active)
        else:
            execution.close()

    def keep(self, tensor: int, name: str) -> None:
        """Keeps a state beyond the execution, under number `tensor`. Raises UnknownStateError."""
        if len(self._repository) >= MAX_REPOSITORY:
            raise UsageError(f"more than {MAX_REPOSITORY} tensors cannot be kept")
        self.state_elements(name)
        self._repository[tensor] = name

    def carry_over(self, tensor: int, name: str, *, keeps: bool) -> None:
        """Writes a kept state to a state of the execution. keeps: whether it stays in the repository."""
        before = self._kept(tensor)
        states = self._known_states()
        if before != name:  # A state of the same name has the value already.
            states.write(name, states.read(before).reshape(-1))
        if not keeps:
            del self._repository[tensor]

    def read_kept(self, tensor: int) -> tuple[str, torch.Tensor]:
        """Returns the name and the value of a kept state."""
        name = self._kept(tensor)
        return name, self._known_states().read(name)

    def drop(self, tensor: int) -> None:
        """Removes a state from the repository."""
        self._repository.pop(tensor, None)

    @property
    def failure(self) -> CstorchError | None:
        """The error that ended the job; None if it runs."""
        return self._failure or (self._job.failure if self._job is not None else None)

    def fail(self, error: CstorchError) -> None:
        """Sets the failure, unless there is one already."""
        self._failure = self._failure or error

    def end_job(self, *, is_success: bool) -> None:
        """Ends the job, which frees its nodes. The client may begin another one."""
        with self._changing:
            self._drop_job(is_success=is_success)

    def close(self, reason: str) -> None:
        """Ends the session at once, and all calls that wait. From any thread."""
        self._closed = True
        self.fail(JobCancelledError(reason))
        job, execution = self._job, self._execution
        if job is not None:
            job.cancel()  # A call may wait for the job while it holds the lock.
        if execution is not None:
            execution.fail(JobCancelledError(reason))
        with self._changing:
            self._drop_job()

    def _drop_job(self, *, is_success: bool = False) -> None:
        job, states, execution = self._job, self._states, self._execution
        self._job = self._states = self._execution = None
        self._artifact = ""
        self._repository.clear()
        if execution is not None:
            execution.close()
        if states is not None:
            states.close()
        if job is not None and is_success:
            job.close()
        elif job is not None:
            job.cancel()

    def _running(self) -> VendorExecution:
        execution = self._execution
        if execution is None:
            raise self.failure or UsageError("nothing runs")
        return execution

    def _known_states(self) -> States:
        states = self._states
        if states is None:
            raise self.failure or ClusterError("the job has ended, and its states with it")
        return states

    def _kept(self, tensor: int) -> str:
        name = self._repository.get(tensor)
        if name is None:
            raise UsageError(f"no tensor is kept as {tensor}")
        return name
