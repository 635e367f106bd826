"""A compiled step, its execution on one Execute stream of the coordinator, and the outputs that the client pulls by
name and step.
"""

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

# --- A step that a client has had compiled, as it is needed to run it later, and on another job too -------------------


_INPUT_NAME: Final = re.compile(r'\bcs\.input_name = "([^"\\]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What of the cluster a step was compiled for."""

    num_csx: int
    num_workers_per_csx: int
    max_wgt_servers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """The text is kept: a client that begins its job anew does not compile again, and the artifact is in the cache."""

    text: str
    resources: Resources
    response: coordinator_pb2.CompileResponse

    @property
    def input_names(self) -> list[str]:
        """The tensors of a batch that the step takes, in its order."""
        header = next((line for line in self.text.splitlines() if line.lstrip().startswith("func ")), "")
        return _INPUT_NAME.findall(header)


# --- What an execution has for the client, which pulls by name and step what comes in order ---------------------------


CHECK_SECONDS = 1.0


class CallEndedError(Exception):
    """Nobody waits for the answer any more."""


class Outputs:
    """Outputs and checkpoints of the steps that the client has not passed. Thread-safe.

    How many there may be is bounded by the coordinator, which hears which steps are passed.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # of the rest
        self._outputs: dict[int, dict[str, torch.Tensor]] = {}
        self._checkpoints: dict[int, Sequence[str]] = {}  # where the loaders stand
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
        """All of it has come."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def fail(self, failure: CstorchError) -> None:
        """Nothing more comes. What has come can still be had."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def take_passed(self, step: int) -> tuple[int, list[int]]:
        """The client is done with all steps up to this one, and these are forgotten.

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

    def get(self, name: str, step: int, is_wanted: Callable[[], bool]) -> torch.Tensor:
        """An output, once it is there.

        Raises:
            CstorchError: the execution has failed.
            KeyError: the step has no such output, or the client has passed it.
            CallEndedError: is_wanted() says no.
        """
        self._wait(lambda: step in self._outputs or step <= self._passed, is_wanted)
        with self._changed:
            return self._outputs[step][name]

    def wait_checkpoint(self, step: int, is_wanted: Callable[[], bool]) -> Sequence[str]:
        """Until a checkpoint can be read; returns where the loaders stand. Raises as get."""
        self._wait(lambda: step in self._checkpoints or step <= self._passed, is_wanted)
        with self._changed:
            return self._checkpoints[step]

    def wait_finished(self, is_wanted: Callable[[], bool]) -> None:
        """Until all steps are done. Raises CstorchError, CallEndedError."""
        self._wait(lambda: self._finished, is_wanted)

    def _wait(self, is_there: Callable[[], bool], is_wanted: Callable[[], bool]) -> None:
        with self._changed:
            while not is_there():
                if self._failure is not None:
                    raise self._failure
                if self._finished:
                    return
                if not is_wanted():
                    raise CallEndedError
                self._changed.wait(CHECK_SECONDS)


# --- One execution: what the client asks for, call by call, on one Execute stream of the coordinator ------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What is run: steps are counted from 1."""

    loader: str
    num_steps: int
    activation_steps: int
    checkpoint_steps: Sequence[int]


class VendorExecution:
    """Begins when it is made: the cluster has loaded the step, and wants its states."""

    def __init__(self, job: ClientJob, states: States, step: CompiledStep, settings: RunSettings) -> None:
        """Raises CstorchError: the cluster failed, or the input_fn."""
        self._states = states
        self._compiled = step.response
        self._settings = settings
        self._outputs = Outputs()
        self._asked = 0  # the last step that the client has asked for
        self._pump: GuardedThread | None = None
        names = dict.fromkeys(placement.name for placement in step.response.states)
        self.names = [name for name in names if name != COUNTER]
        states.place(step.response.states)
        begin = coordinator_pb2.Begin(
            artifact=step.response.artifact,
            loader=settings.loader,
            num_steps=settings.num_steps,
            activation_steps=settings.activation_steps,
            checkpoint_steps=settings.checkpoint_steps,
            wants_input_states=True,  # the client does not say whether it will ask
        )
        self._stream = ExecutionStream(job, begin)
        try:
            self._wanted = self._stream.receive("state_wanted").state_wanted
            states.connect(self._wanted.shards)
            if COUNTER in self._wanted.missing:  # the compiler's, of which the client knows nothing
                states.write(COUNTER, torch.zeros((), dtype=torch.int64))
        except BaseException:
            self._stream.close()
            raise

    def start(self) -> None:
        """All states are there: let the steps begin. Raises CstorchError."""
        sent = coordinator_pb2.StateSent(attempt=self._wanted.attempt, wrote=True)
        self._stream.send(coordinator_pb2.ExecuteRequest(state_sent=sent))
        if self._stream.receive("started", "state_wanted").HasField("state_wanted"):
            raise ClusterError("a node died before the first step, and the weights with it: start the script again")
        self._pump = GuardedThread(
            self._receive, name="vendor execution", on_defect=lambda error: self.fail(failures.from_defect(error))
        )
        self._pump.start()

    def _receive(self) -> None:
        """Runs in a thread: takes what comes, in order."""
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
        """Nothing more comes, for this reason. From any thread."""
        self._outputs.fail(error)

    def get(self, name: str, step: int, is_wanted: Callable[[], bool]) -> torch.Tensor:
        """An output of a step, or a state as it was after that; once it is there.

        Raises CstorchError, as it failed; CallEndedError: is_wanted() says no.
        """
        self._pass(step - 1)
        self._asked = max(self._asked, step)
        try:
            if name in self._states:
                self._outputs.wait_checkpoint(step, is_wanted)
                return self._states.read(name, step)
            return self._outputs.get(name, step, is_wanted)
        except KeyError:
            what = "is no checkpoint step" if name in self._states else f"has no output {name!r}"
            raise InternalError(f"step {step} of {self._settings.num_steps} {what}, or was asked for before") from None

    def input_states(self, step: int, is_wanted: Callable[[], bool]) -> Sequence[str]:
        """Where the loaders of all workers stand after a checkpoint step, as the client reads it.

        Raises UsageError: one of them cannot be resumed; else as get.
        """
        self._pass(step - 1)
        try:
            states = self._outputs.wait_checkpoint(step, is_wanted)
        except KeyError:
            raise InternalError(f"step {step} is no checkpoint step, or the client is beyond it") from None
        if not all(states):
            raise UsageError(
                "the loader that the input_fn returns in the workers is not restartable: it needs state_dict, "
                "load_state_dict, aggregate_state_dict and deaggregate_state_dict there too"
            )
        return states

    def finish(self, is_wanted: Callable[[], bool]) -> None:
        """The client wants nothing more: wait for the last step, or end the steps that it does not want.

        Raises CstorchError, CallEndedError.
        """
        if not self._compiled.outputs or self._asked >= self._settings.num_steps:
            self._pass(self._settings.num_steps)
            self._outputs.wait_finished(is_wanted)
        self.close()

    def close(self) -> None:
        """End it, where it has not ended."""
        self._outputs.fail(ClusterError("the execution was ended"))
        self._stream.close()
        if self._pump is not None:
            self._pump.join()

    def _pass(self, step: int) -> None:
        """Only by its next request does the client say that it is done with a step."""
        shown, checkpoints = self._outputs.take_passed(step)
        for taken in checkpoints:
            request = coordinator_pb2.CheckpointReleased(step=taken)
            self._stream.send(coordinator_pb2.ExecuteRequest(checkpoint_released=request))
        if shown:
            self._stream.send(coordinator_pb2.ExecuteRequest(consumed=coordinator_pb2.Consumed(step=shown)))


def _text(state: bytes) -> str:
    """What a worker's process has sent, whoever that is: hex, which only the client reads; or nothing."""
    text = json.loads(state) if state else ""
    if not isinstance(text, str):
        raise ClusterError("a worker sent something else than the state of a loader")
    bytes.fromhex(text)
    return text
