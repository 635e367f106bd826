"""The messages between a worker and the process of its input_fn, and the process's end of the socket.

A message is one JSON object: the fields of its class, and the name of the class as "kind". The process is the user's
and may send anything, so `decode` checks every field.
"""

import dataclasses
import functools
import json
import socket
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

MESSAGE_BYTES = 128 * 1024
ARGUMENTS_BYTES = 8 * 1024 * 1024  # the most of a script's sys.argv; Linux passes 6 MiB at most to a program
STATE_BYTES = 4 * 1024 * 1024  # the most of a loader's state, as text
DIGEST_BYTES = 16
MOST_DIGESTS = 64  # the most of a batch

INPUT_VARIABLE = "WAFERBOX_INPUT"


class MessageError(ValueError):
    """Raised for a text that is no message, or for an unexpected message."""


# --- Worker to process ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InputSettings:
    """The number of a worker among those of the job, and the number formats that the script has chosen.

    The process also keeps them as JSON text in the environment variable INPUT_VARIABLE, for the client library in the
    input_fn. A loader may spawn processes of its own, which inherit the environment and no modules.

    Attributes:
        worker: the number of the worker among those of its wafer, from 0.
        num_workers: the workers of each wafer, at least 1.
        wafer: the number of the wafer, from 0.
        num_csx: the wafers of the job, at least 1.
        half_type: such as "bfloat16"; empty: the default of the client library.
        mixed_precision: whether steps are compiled for mixed precision.
    """

    worker: int
    num_workers: int
    wafer: int
    num_csx: int
    half_type: str
    mixed_precision: bool

    @property
    def rank(self) -> int:
        """The number of the worker among all of the job."""
        return self.wafer * self.num_workers + self.worker

    @property
    def num_streamers(self) -> int:
        """The workers of the job."""
        return self.num_csx * self.num_workers


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Make the loader. Two file descriptors come with it: the pickled builder, and sys.argv of the script, a JSON list.

    Attributes:
        settings: the settings of the job that the input_fn can read.
        python_paths: the folders that come first in sys.path.
        last_python_paths: the folders that come last in sys.path, after those of this process's interpreter.
        interpreter_python_paths: sys.path of the script from the first folder of its interpreter on. It is used in
            place of these, with its order, if the standard library is the same.
        working_directory: the script's; ignored on a host that does not have it.
        redivided: whether the job has lost wafers, so that a part that the input_fn makes has the wrong size.
        input_names: the tensors that the step takes, by name; empty: all, in the order of the first batch.
        vendor_builder: whether the builder comes from the vendor's client.
    """

    settings: InputSettings
    python_paths: tuple[str, ...]
    last_python_paths: tuple[str, ...]
    interpreter_python_paths: tuple[str, ...]
    working_directory: str
    redivided: bool
    input_names: tuple[str, ...]
    vendor_builder: bool


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """A tensor of a batch: the name of its torch dtype, its shape, and its offset in a slot."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """A batch as the step was compiled for it, and the ring of slots that batches are written to.

    Attributes:
        members: the tensors; the micro-batches of one tensor follow each other.
        global_rows: the rows of the batch of all wafers.
        local_rows: the rows of one wafer.
        micro_batches: the parts that a wafer's rows are divided into.
        slot_bytes: the size of a slot.
        num_slots: the slots of the ring.
    """

    members: tuple[TensorLayout, ...]
    global_rows: int
    local_rows: int
    micro_batches: int
    slot_bytes: int
    num_slots: int


@dataclass(frozen=True, kw_only=True)
class Load:
    """Begin an execution. One or two file descriptors come with it: the ring, and a JSON list of loader states.

    Attributes:
        layout: the batches and the ring.
        done_steps: steps of the execution whose batches are not needed. With the states of all workers' loaders after
            them the loader is resumed, else their batches are skipped.
        state_steps: the steps before that of the worker's first batch after which the loader's state is sent.
    """

    layout: BatchLayout
    done_steps: int
    state_steps: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Fill:
    """Write the worker's next batch to a slot.

    Attributes:
        slot: the number of the slot.
        state_steps: the steps, from that of the batch to before that of the worker's next, after which the loader's
            state is sent.
        recovery_step: one more such step, or 0. Its state is empty where the loader cannot be resumed.
    """

    slot: int
    state_steps: tuple[int, ...]
    recovery_step: int


# --- Process to worker ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A slot has its batch. All digests are in hex.

    Attributes:
        slot: the number of the slot.
        digests: of tensors of the first batch: they show whether wafers get the same samples.
        first_batch: the layout and the values of the first batch of the execution, by the first worker, once; both are
            empty otherwise.
    """

    slot: int
    digests: tuple[str, ...]
    first_batch: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class State:
    """The loader's state after a step. A file descriptor comes with it: the state, as JSON text."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The input_fn or its loader has failed; no message follows.

    Attributes:
        message: what is wrong, for the user.
        traceback: the user's part of it; may be empty.
        killed: whether the cause is only that a process of the loader was killed.
    """

    message: str
    traceback: str
    killed: bool


# --- JSON -------------------------------------------------------------------------------------------------------------

Message = InputSettings | Prepare | Load | Fill | Filled | State | Failed
M = TypeVar("M", bound=Message)

_CLASSES = {each.__name__: each for each in typing.get_args(Message)}


def encode(message: Message) -> bytes:
    """Returns the JSON text of a message."""
    return json.dumps({"kind": type(message).__name__, **dataclasses.asdict(message)}).encode()


def decode(data: bytes) -> Message:
    """Returns the message with a JSON text.

    Raises:
        MessageError: the text is no message.
    """
    try:
        form = json.loads(data)
        message: Message = _decoded(_CLASSES[form.pop("kind")], form)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise MessageError(f"no message: {data[:200]!r}") from error
    return message


def decode_as(kind: type[M], data: bytes) -> M:
    """Returns the message of a class with a JSON text.

    Raises:
        MessageError: the text is no such message.
    """
    message = decode(data)
    if not isinstance(message, kind):
        raise MessageError(f"no {kind.__name__}: {data[:200]!r}")
    return message


def _decoded(form: Any, value: Any) -> Any:
    """Returns the value of a field of type `form`. Raises TypeError, AttributeError for a value of another type."""
    if isinstance(form, type) and dataclasses.is_dataclass(form):
        types = _field_types(form)
        if value.keys() != types.keys():
            raise TypeError(value)
        return form(**{name: _decoded(types[name], item) for name, item in value.items()})
    if typing.get_origin(form) is tuple:
        if type(value) is not list:
            raise TypeError(value)
        item_form, _ = typing.get_args(form)
        return tuple(_decoded(item_form, item) for item in value)
    if type(value) is not form:  # a bool is an int by isinstance
        raise TypeError(value)
    return value


@functools.cache
def _field_types(form: Any) -> dict[str, Any]:
    return typing.get_type_hints(form)


# --- The socket -------------------------------------------------------------------------------------------------------


class WorkerEnded(BaseException):
    """Raised where the worker has closed its end of the socket, or has died. No error of the user's code."""


class Channel:
    """The process's end of the socket to its worker. Used by one thread. Its methods raise WorkerEnded."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def receive(self, kind: type[M]) -> tuple[M, list[int]]:
        """Returns the next message and its file descriptors. Raises MessageError for one of another class."""
        data, descriptors, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 2)
        if not data:
            raise WorkerEnded
        return decode_as(kind, data), descriptors

    def send(self, message: Message, *descriptors: int) -> None:
        """Sends a message, with copies of file descriptors."""
        try:
            socket.send_fds(self._connection, [encode(message)], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            raise WorkerEnded from None

    def wait_for_end(self) -> None:
        """Waits until the worker closes its end.

        A close of this end with unread messages would discard the messages on their way to the worker.
        """
        while self._connection.recv(MESSAGE_BYTES):
            pass
