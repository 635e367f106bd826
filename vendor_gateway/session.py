"""A client of the vendor's, and the Waferbox job that it has: from its first compile until it cancels its last job."""

import json
import logging
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

# --- What the script is told while its job goes on: how it stands in the queue, who died, what would help -------------


MAX_MESSAGES: Final = 256  # that the client has not taken


class Messages(logging.Handler):
    """Keeps what a job logs until the client takes it; what there is no room for is dropped."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._records: queue.Queue[logging.LogRecord] = queue.Queue(MAX_MESSAGES)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._records.put_nowait(record)
        except queue.Full:
            """The client takes none: it has what it wants to know."""

    def take(self, seconds: float) -> logging.LogRecord | None:
        """The next, or None if there is none for so long."""
        try:
            return self._records.get(timeout=seconds)
        except queue.Empty:
            return None


def messages_logger(messages: Messages, parent: logging.Logger) -> logging.Logger:
    """For one job: what is logged by it goes to the client, and to the parent."""
    logger = logging.Logger(f"{parent.name}.job")
    logger.parent = parent
    logger.addHandler(messages)
    return logger


# ----------------------------------------------------------------------------------------------------------------------
# A client of the vendor's, and the Waferbox job that it has: from its first compile until it cancels its last job


logger = logging.getLogger(__name__)

COMPILE_FOLDER: Final = "cached_compile"
MAX_STEPS_KEPT: Final = 16  # compiled
MAX_LABELS: Final = 32
MAX_REPOSITORY: Final = 1 << 20  # names of states
_NO_TEXT: Final = (
    "the client has sent no text for the step: its program, torch-cirh-opt, could not lower it. The client says why "
    'where it only validates: cstorch.backend("CSX", validate_only=True), with the same script. Inputs in uint8, int8 '
    "and float64 are such a reason: convert them in the input_fn, as in x.to(torch.int32) or x.to(torch.float32). An "
    "operation that it cannot legalize has to be written with others. Where the program cannot be found, add the bin "
    "folder of the client's environment to PATH"
)
_LABEL_PART: Final = re.compile(r"[^\s=]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTarget:
    """Where a job goes, and by which interpreter its input is made."""

    management: str
    input_python: str


@dataclass(slots=True, kw_only=True)
class QueueSettings:
    """What the queue knows of a job."""

    labels: Mapping[str, str]
    priority: int  # 1 (first) to 3

    def label_texts(self) -> list[str]:
        """Those that are labels here too."""
        given = [(key, value) for key, value in self.labels.items() if _LABEL_PART.fullmatch(f"{key}{value}" or "=")]
        return [f"{key}={value}" for key, value in given[:MAX_LABELS]]


class VendorSession:
    """Thread-safe: what changes the job happens one after the other; an end from outside waits for nobody."""

    def __init__(self, place: JobTarget, workflow: str) -> None:
        self.workflow = workflow
        self.peer = ""  # where the client called from when it last asked for a job
        self.presence = Presence()
        self.messages = Messages()
        self.queue = QueueSettings(labels={}, priority=2)
        self.python_paths: Sequence[str] = ()
        self.mount_dirs: Sequence[str] = ()
        self._place = place
        self._changing = threading.Lock()  # of the next five
        self._job: ClientJob | None = None
        self._resources: Resources | None = None
        self._states: States | None = None
        self._execution: VendorExecution | None = None
        self._artifact = ""
        self._steps: dict[str, CompiledStep] = {}
        self._repository: dict[int, str] = {}  # persistent tensors: names of states
        self._num_executions = 0
        self._failure: CstorchError | None = None
        self._closed = False

    def compile(self, text: str, resources: Resources) -> CompiledStep:
        """Raises CstorchError: CompileError, if the step has no plan on this cluster, or the client no text for it."""
        if not text.strip():
            raise CompileError(_NO_TEXT)
        with self._changing:
            return self._compile(text, resources)

    def _compile(self, text: str, resources: Resources) -> CompiledStep:
        job = self._job_with(resources)
        # Which values are in half precision is in the text already.
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
                mgmt_address=self._place.management,
                num_csx=resources.num_csx,
                num_workers_per_csx=resources.num_workers_per_csx,
                max_wgt_servers=resources.max_wgt_servers,
                job_labels=self.queue.label_texts(),
                job_priority=f"p{self.queue.priority}",
            )
            log = messages_logger(self.messages, logger)
            self._job, self._resources = ClientJob(self._place.management, config, COMPILE_FOLDER, log=log), resources
            self._failure = None
            logger.info("workflow %s has %s", self.workflow, self._job.name)
            self._states = States(self._job)
            if self._closed:  # meanwhile
                self._drop_job()
                raise JobCancelledError("the job was cancelled")
        return self._job

    def load(self, artifact: str) -> None:
        """Choose what is run next; compiled again where the client has begun a job anew. Raises CstorchError."""
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
        """Begin an execution of what is loaded. builder: of its input, as the client sent it. Raises CstorchError."""
        with self._changing:
            if self._job is None or self._states is None or self._artifact not in self._steps:
                raise UsageError("nothing is loaded that could be run")
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
                    interpreter=self._place.input_python,
                    python_paths=self.python_paths,
                    mount_dirs=self.mount_dirs,
                )
            )
            self._execution = VendorExecution(self._job, self._states, step, settings)

    def set_priority(self, priority: int) -> None:
        """1 (first) to 3; also of the job that the client has already. Raises CstorchError."""
        self.queue.priority = priority
        job = self._job
        if job is not None:
            job.set_priority(priority)

    def state_names(self) -> list[str]:
        """The states of what runs. Raises UsageError."""
        return self._running().names

    def state_elements(self, name: str) -> int:
        """How many elements a state has. Raises ValueError, CstorchError."""
        return self._known_states().elements(name)

    def write(self, name: str, value: torch.Tensor) -> None:
        """As States.write."""
        self._known_states().write(name, value)

    def start(self) -> None:
        """Let the steps begin. Raises CstorchError."""
        self._running().start()

    def output(self, name: str, step: int, is_wanted: Callable[[], bool]) -> torch.Tensor:
        """As VendorExecution.get."""
        try:
            return self._running().get(name, step, is_wanted)
        except CstorchError as error:
            self.fail(error)
            raise

    def input_states(self, step: int, is_wanted: Callable[[], bool]) -> Sequence[str]:
        """As VendorExecution.input_states."""
        return self._running().input_states(step, is_wanted)

    def finish(self, is_success: bool, is_wanted: Callable[[], bool]) -> None:
        """The execution is over for the client. Raises as VendorExecution.finish."""
        with self._changing:
            execution, self._execution = self._execution, None
        if execution is None:
            return
        if is_success:
            execution.finish(is_wanted)
        else:
            execution.close()

    def keep(self, tensor: int, name: str) -> None:
        """Keep a state beyond the execution, under a number. Raises UsageError, ValueError."""
        if len(self._repository) >= MAX_REPOSITORY:
            raise UsageError(f"more than {MAX_REPOSITORY} tensors cannot be kept")
        self.state_elements(name)
        self._repository[tensor] = name

    def carry_over(self, tensor: int, name: str, *, keeps: bool) -> None:
        """Have what is kept as a state of what runs. Raises UsageError, CstorchError."""
        before = self._kept(tensor)
        states = self._known_states()
        if before != name:  # else it lies where it is wanted
            states.write(name, states.read(before).reshape(-1))
        if not keeps:
            del self._repository[tensor]

    def read_kept(self, tensor: int) -> tuple[str, torch.Tensor]:
        """What is kept, and its name. Raises UsageError, CstorchError."""
        name = self._kept(tensor)
        return name, self._known_states().read(name)

    def drop(self, tensor: int) -> None:
        """Keep it no longer."""
        self._repository.pop(tensor, None)

    @property
    def failure(self) -> CstorchError | None:
        """Why nothing goes on."""
        return self._failure or (self._job.failure if self._job is not None else None)

    def fail(self, error: CstorchError) -> None:
        """Nothing goes on, for this reason."""
        self._failure = self._failure or error

    def end_job(self, *, is_success: bool) -> None:
        """The client's job is over, and its nodes become free; it may begin another."""
        with self._changing:
            self._drop_job(is_success=is_success)

    def close(self, reason: str) -> None:
        """End it all, at once, whoever waits. From any thread."""
        self._closed = True
        self.fail(JobCancelledError(reason))
        job, execution = self._job, self._execution
        if job is not None:
            job.cancel()  # so that those end who wait for it with the lock
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
