"""An execution of a vendor's client: one Execute stream of the coordinator, and outputs that the client fetches."""

import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from cstorch._internal.session import failures
from cstorch._internal.session.execution.outputs import unpack
from cstorch._internal.session.execution.stream import ExecutionStream
from cstorch._internal.session.job import ClientJob
from cstorch._internal.tracing.random_counter import COUNTER
from cstorch.errors import ClusterError, CstorchError, InternalError, UsageError
from vendor_gateway.states import States
from waferbox.host.threads import GuardedThread
from wsc.v1 import coordinator_pb2

# --- A compiled step --------------------------------------------------------------------------------------------------


_INPUT_NAME: Final = re.compile(r'\bcs\.input_name = "([^"\\]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The part of the cluster that a step is compiled for."""

    num_csx: int
    num_workers_per_csx: int
    max_wgt_servers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """A compiled step, with its text: a client does not compile again for a new job, but the gateway has to."""

    text: str
    resources: Resources
    response: coordinator_pb2.CompileResponse

    @property
    def input_names(self) -> list[str]:
        """The names of the tensors of a batch that the step takes, in its order."""
        header = next((line for line in self.text.splitlines() if line.lstrip().startswith("func ")), "")
        return _INPUT_NAME.findall(header)


# --- The outputs ------------------------------------------------------------------------------------------------------


CHECK_SECONDS = 1.0


class CallEndedError(Exception):
    """Raised in a call that the client has ended."""


class Outputs:
    """The outputs and checkpoints of the steps that the client has not passed. Thread-safe.

    The coordinator bounds their number, by the passed steps that it receives. Reads wait until a value has arrived, and
    raise CstorchError if the execution has failed, CallEndedError if `is_active()` is false, and KeyError if the step
    has no such value or is passed.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # of the other attributes
        self._outputs: dict[int, dict[str, torch.Tensor]] = {}
        self._checkpoints: dict[int, Sequence[str]] = {}  # the states of the loaders
        self._passed = 0
        self._finished = False
        self._failure: CstorchError | None = None

    def put(self, step: int, values: dict[str, torch.Tensor]) -> None:
        with self._changed:
            self._outputs[step] = values
            self._changed.notify_all()

    def put_checkpoint(self, step: int, input_states: Sequence[str]) -> None:
        with self._changed:
            self._checkpoints[step] = input_states
            self._changed.notify_all()

    def finish(self) -> None:
        """Sets that all outputs have arrived."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def fail(self, failure: CstorchError) -> None:
        """Sets the failure that readers get instead of further outputs. Those that have arrived can still be read."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def take_passed(self, step: int) -> tuple[int, list[int]]:
        """Removes all steps up to this one, which the client has passed.

        Returns the last of them that had outputs, or 0, and the checkpoints among them.
        """
        with self._changed:
            if step <= self._passed:
                return 0, []
            self._passed = step
            outputs = [each for each in self._outputs if each <= step]
            for each in outputs:
                del self._outputs[each]
            checkpoints = sorted(each for each in self._checkpoints if each <= step)
            for each in checkpoints:
                del self._checkpoints[each]
            return max(outputs, default=0), checkpoints

    def get(self, name: str, step: int, is_active: Callable[[], bool]) -> torch.Tensor:
        """Returns an output of a step."""
        self._wait(lambda: step in self._outputs or step <= self._passed, is_active)
        with self._changed:
            return self._outputs[step][name]

    def wait_checkpoint(self, step: int, is_active: Callable[[], bool]) -> Sequence[str]:
        """Waits until a checkpoint can be read; returns the states of the loaders."""
        self._wait(lambda: step in self._checkpoints or step <= self._passed, is_active)
        with self._changed:
            return self._checkpoints[step]

    def wait_finished(self, is_active: Callable[[], bool]) -> None:
        """Waits until all steps are done."""
        self._wait(lambda: self._finished, is_active)

    def _wait(self, is_ready: Callable[[], bool], is_active: Callable[[], bool]) -> None:
        with self._changed:
            while not is_ready():
                if self._failure is not None:
                    raise self._failure
                if self._finished:
                    return
                if not is_active():
                    raise CallEndedError
                self._changed.wait(CHECK_SECONDS)


# --- The execution ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of an execution. Steps are numbered from 1."""

    loader: str
    num_steps: int
    activation_steps: int
    checkpoint_steps: Sequence[int]


class VendorExecution:
    """An execution on one Execute stream of the coordinator. A thread of its own receives the outputs.

    Calls for the same step may come from several threads. Raises CstorchError if the cluster, a node or the user's
    input_fn fails, and CallEndedError if `is_active()` is false.
    """

    def __init__(self, job: ClientJob, states: States, step: CompiledStep, settings: RunSettings) -> None:
        """Begins the execution; returns when the cluster has loaded the step, and waits for the states."""
        self._states = states
        self._compiled = step.response
        self._settings = settings
        self._outputs = Outputs()
        self._requested = 0  # the last step that the client has requested
        self._receiver: GuardedThread | None = None
        names = dict.fromkeys(placement.name for placement in step.response.states)
        self.names = [name for name in names if name != COUNTER]
        states.place(step.response.states)
        begin = coordinator_pb2.Begin(
            artifact=step.response.artifact,
            loader=settings.loader,
            num_steps=settings.num_steps,
            activation_steps=settings.activation_steps,
            checkpoint_steps=settings.checkpoint_steps,
            wants_input_states=True,  # The client does not announce whether it will request them.
        )
        self._stream = ExecutionStream(job, begin)
        try:
            self._wanted = self._stream.receive("state_wanted").state_wanted
            states.connect(self._wanted.shards)
            if COUNTER in self._wanted.missing:  # The compiler adds this state, so the client does not send it.
                states.write(COUNTER, torch.zeros((), dtype=torch.int64))
        except BaseException:
            self._stream.close()
            raise

    def start(self) -> None:
        """Starts the steps; called when all states are written."""
        sent = coordinator_pb2.StateSent(attempt=self._wanted.attempt, wrote=True)
        self._stream.send(coordinator_pb2.ExecuteRequest(state_sent=sent))
        if self._stream.receive("started", "state_wanted").HasField("state_wanted"):
            raise ClusterError("a node died before the first step, and its weights are lost: start the script again")
        self._receiver = GuardedThread(
            self._receive, name="vendor execution", on_defect=lambda error: self.fail(failures.from_defect(error))
        )
        self._receiver.start()

    def _receive(self) -> None:
        """Receives outputs and checkpoints, in order, until the last one. Runs in a thread."""
        try:
            while True:
                response = self._stream.receive("outputs", "checkpoint", "finished")
                match response.WhichOneof("kind"):
                    case "outputs":
                        for step in response.outputs.steps:
                            self._outputs.put(step.step, unpack(self._compiled.outputs, step))
                    case "checkpoint":
                        taken = response.checkpoint
                        self._outputs.put_checkpoint(taken.step, [_text(state) for state in taken.input_states])
                    case _:
                        self._outputs.finish()
                        return
        except CstorchError as error:
            self.fail(error)

    def fail(self, error: CstorchError) -> None:
        """Ends the waits for outputs with an error. From any thread."""
        self._outputs.fail(error)

    def get(self, name: str, step: int, is_active: Callable[[], bool]) -> torch.Tensor:
        """Waits for an output of a step, or for a state after it, and returns it."""
        self._pass(step - 1)
        self._requested = max(self._requested, step)
        try:
            if name in self._states:
                self._outputs.wait_checkpoint(step, is_active)
                return self._states.read(name, step)
            return self._outputs.get(name, step, is_active)
        except KeyError:
            problem = "is no checkpoint step" if name in self._states else f"has no output {name!r}"
            message = f"step {step} of {self._settings.num_steps} {problem}, or the client has passed it"
            raise InternalError(message) from None

    def input_states(self, step: int, is_active: Callable[[], bool]) -> Sequence[str]:
        """Waits for the states of all workers' loaders after a checkpoint step, and returns them as hex.

        Raises UsageError if a loader cannot be resumed.
        """
        self._pass(step - 1)
        try:
            states = self._outputs.wait_checkpoint(step, is_active)
        except KeyError:
            raise InternalError(f"step {step} is no checkpoint step, or the client has passed it") from None
        if not all(states):
            raise UsageError(
                "the loader that the input_fn returns in the workers is not restartable: it needs state_dict, "
                "load_state_dict, aggregate_state_dict and deaggregate_state_dict there too"
            )
        return states

    def finish(self, is_active: Callable[[], bool]) -> None:
        """Waits for the last step if the client has requested it, or if there are no outputs; ends the execution."""
        if not self._compiled.outputs or self._requested >= self._settings.num_steps:
            self._pass(self._settings.num_steps)
            self._outputs.wait_finished(is_active)
        self.close()

    def close(self) -> None:
        """Ends the execution, if it runs."""
        self._outputs.fail(ClusterError("the execution was ended"))
        self._stream.close()
        if self._receiver is not None:
            self._receiver.join()

    def _pass(self, step: int) -> None:
        """Passes the steps up to this one: the client's next request is the only sign that it needs a step no more."""
        shown, checkpoints = self._outputs.take_passed(step)
        for taken in checkpoints:
            request = coordinator_pb2.CheckpointReleased(step=taken)
            self._stream.send(coordinator_pb2.ExecuteRequest(checkpoint_released=request))
        if shown:
            self._stream.send(coordinator_pb2.ExecuteRequest(consumed=coordinator_pb2.Consumed(step=shown)))


def _text(state: bytes) -> str:
    """Returns the hex text of a loader's state, or "". The user's code may have sent anything."""
    text = json.loads(state) if state else ""
    if not isinstance(text, str):
        raise ClusterError("a worker sent something else than the state of a loader")
    bytes.fromhex(text)
    return text
