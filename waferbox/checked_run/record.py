"""The record of a checked run: what the client library writes in the script's process, and `waferbox check` reads.

A record is a folder. Its file `events` has one JSON object a line, each an event of this module; the files of tensors
that events name are in the form of safetensors. The script's process finds the folder by the environment variable
WAFERBOX_CHECK, which has a `RunSettings` as JSON.
"""

import dataclasses
import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

EVENTS: Final = "events"
INPUT: Final = "input."  # what the names of a batch's tensors begin with


class Way(enum.StrEnum):
    """A way to run a script for a check."""

    CLUSTER = "cluster"  # on an embedded cluster with one wafer
    TRACE = "trace"  # traced and lowered only, as with validate_only
    TORCH = "torch"  # by plain PyTorch on the CPU
    DOUBLE = "double"  # the same in float64: the judge of what is rounding
    HALF = "half"  # the same with autocast: the judge of what is rounding in half precision


class Question(enum.StrEnum):
    """A question that a check answers."""

    TRACE = "trace"
    PROGRAM = "program"
    VALUES = "values"
    HALF = "half"
    WAFERS = "wafers"
    MEMORY = "memory"
    TIME = "time"
    INPUT = "input"
    RESUME = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a checked run.

    Attributes:
        way: how the steps run.
        folder: the folder of the record.
        steps: the most steps of one execution.
        executions: the most executions; the process ends, with status 0, when it begins another.
        observed: steps, as execution and step, whose operations plain PyTorch records one by one.
        loss_scale: the first value of a dynamic loss scale; None: the script's.
        parent: the process that checks, with which the script ends; 0: none.
    """

    way: Way
    folder: str
    steps: int
    executions: int
    observed: tuple[tuple[int, int], ...] = ()
    loss_scale: float | None = None
    parent: int = 0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RunSettings":
        """Raises ValueError: the text is no such object."""
        try:
            fields = json.loads(text)
            observed = tuple((execution, step) for execution, step in fields["observed"])
            return cls(**{**fields, "way": Way(fields["way"]), "observed": observed})
        except (TypeError, KeyError) as error:
            raise ValueError(text) from error


# --- Events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionBegun:
    """An execution begins.

    Attributes:
        execution: its number in the run, from 1.
        steps: the steps that the check runs.
        asked_steps: the steps that the script asks for.
    """

    execution: int
    steps: int
    asked_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The step of an execution is traced and lowered.

    Attributes:
        execution: number of the execution.
        path: the file with the step as CIRH.
        function: the name of the traced function, with its line, such as "training_step (train.py:40)".
        trains: whether an optimizer steps in it.
        half: the half type of mixed precision; empty: float32.
        optimization_level: how much is computed in half precision, 0 to 2.
        half_gradients: whether gradients travel in half precision.
        trace_seconds: the time of the trace.
        num_csx: the wafers that the script asks for.
        input_line: the line of the input_fn; empty: it is not known.
    """

    execution: int
    path: str
    function: str
    trains: bool
    half: str
    optimization_level: int
    half_gradients: bool
    trace_seconds: float
    num_csx: int
    input_line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The client library has found something while the script ran.

    Attributes:
        question: the question that it answers.
        line: the script's line, such as "train.py:53"; empty: none is known.
        message: what is wrong, and the way out.
        is_error: whether the real system would stop there, rather than train wrongly.
    """

    question: Question
    line: str
    message: str
    is_error: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """A step is over, or the first one begins.

    Attributes:
        execution: number of the execution.
        step: number of the step, from 1; 0: before the first.
        path: a file with the outputs and states after the step, sampled: `output.N` and the names of the states; by
            plain PyTorch also the batch, `input.N`.
    """

    execution: int
    step: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObserved:
    """Plain PyTorch has recorded the operations of a step.

    Attributes:
        execution: number of the execution.
        step: number of the step, from 1.
        path: a file with what the step begins with, whole: `input.N`, and the states by name; and with a row of
            `moments` for each floating point tensor that an operation made.
        counter: the counter of random numbers.
    """

    execution: int
    step: int
    path: str
    counter: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InputMeasured:
    """The input of an execution, run alone in the script's process.

    Attributes:
        execution: number of the execution.
        batches: the batches that were timed; the first one is not.
        rows: the rows of a batch.
        seconds: the time of these batches.
        line: the script's line at which most of this time is spent; empty: it is not known.
        nbytes: the bytes of a batch.
        is_restartable: whether the loader can go back to a position.
    """

    execution: int
    batches: int
    rows: int
    seconds: float
    line: str
    nbytes: int
    is_restartable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailed:
    """The script ended with an error.

    Attributes:
        type: the class of the error.
        message: its message.
        line: the script's innermost line.
        traceback: the whole traceback.
        is_ours: whether the client library raised it.
        executions: the executions that had ended before.
        in_step: whether a traced function was running.
    """

    type: str
    message: str
    line: str
    traceback: str
    is_ours: bool
    executions: int
    in_step: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionEnded:
    """An execution has run its steps.

    Attributes:
        execution: its number.
        seconds: from the begin of the first step to the end of the last.
    """

    execution: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """The script has saved its first checkpoint.

    Attributes:
        line: the script's line.
    """

    line: str


Event = (
    ExecutionBegun
    | Program
    | Found
    | StepValues
    | StepObserved
    | InputMeasured
    | RunFailed
    | ExecutionEnded
    | CheckpointSaved
)
_CLASSES: Final = {each.__name__: each for each in get_args(Event)}


def append(folder: Path, event: Event) -> None:
    """Appends an event to the record in a folder, whole even if the process dies next."""
    line = json.dumps({"kind": type(event).__name__, **dataclasses.asdict(event)})
    with (folder / EVENTS).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read(folder: Path) -> Iterator[Event]:
    """Yields the events of a record, in order."""
    path = folder / EVENTS
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        fields: dict[str, Any] = json.loads(line)
        kind = _CLASSES[fields.pop("kind")]
        if kind is Found:
            fields["question"] = Question(fields["question"])
        yield kind(**fields)
