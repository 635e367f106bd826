"""The process that runs a user's input_fn for a worker, under the user's interpreter.

Only the standard library and the torch found there are needed: this file is also run by its path, under an interpreter
that has no Waferbox. It speaks with its worker over a SEQPACKET socket, one JSON object a message:

    worker -> child   prepare {python_paths, last_python_paths, worker, num_workers, ...}  + fd: the pickled builder
    worker -> child   load {members, global_rows, local_rows, slot_bytes, num_slots, state_steps}  + fd: the ring
    worker -> child   fill {slot, state_steps}   put this worker's next batch into a slot
    child -> worker   filled {slot}         | failed {message, traceback}, after which nothing follows
    child -> worker   state {step}          + fd: the state of a restartable loader after a step, as JSON text

state_steps are the steps, from that of the batch (or the first) to before that of this worker's next, after which the
state is wanted. Nobody but the client reads a state, and it must not have to trust it: plain data, no pickle. A value
is what it is in JSON, or a list that begins with a word: ["list", ...], ["tuple", ...], ["dict", [key, value], ...],
["bytes", base64], ["tensor", dtype, shape, base64], ["array", dtype, shape, base64].

The child ends when its end of the socket is closed.
"""

import argparse
import base64
import ctypes
import json
import mmap
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

MESSAGE_BYTES = 128 * 1024
TRACEBACK_CHARACTERS = 20_000
STATE_BYTES = 4 * 1024 * 1024  # of a loader's state, as text

_PR_SET_PDEATHSIG = 1


class InputFailure(Exception):
    """What is wrong with the user's input, in words for the user."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class Selection:
    """Which batches of the loader are this worker's, and which of their rows its wafer's.

    A batch with the rows of the whole step is cut; worker j of k takes every k-th, from the j-th. A batch that has the
    rows of one wafer already, of several, comes from an input_fn that shards by itself: all such batches are this
    worker's. On a single wafer the two look alike: there the input_fn shards if it has asked for its streaming rank.
    """

    def __init__(self, prepare: dict[str, Any], load: dict[str, Any], source: str) -> None:
        """source: what the input_fn is called, and where it is written."""
        self._source = source
        self._wafer: int = prepare["wafer"]
        self._worker: int = prepare["worker"]
        self._num_workers: int = prepare["num_workers"]
        self._global_rows: int = load["global_rows"]
        self._local_rows: int = load["local_rows"]
        self._members: list[dict[str, Any]] = load["members"]

    def own(self, batches: Iterator[Any], position: "Position") -> Iterator[list[Any]]:
        """The tensors of this worker's batches, cut to its wafer's rows, in the order of the plan.

        Where batches are dealt out, the loader's position after a step is behind that step's batch, whoever took it;
        where the input_fn shards, it is behind the last batch of this worker's own.
        """
        from torch.utils import _pytree as pytree

        torch = sys.modules["torch"]
        before_all = position.states(last_step=self._worker)
        num_own = 0
        for number, batch in enumerate(batches):
            tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
            if len(tensors) != len(self._members):
                raise InputFailure(
                    f"batch {number} of the input_fn {self._source} has {len(tensors)} tensors, but the step was "
                    f"compiled for {len(self._members)}: every batch must have the structure of the first"
                )
            rows = self._rows(number, tensors)
            is_sharded = rows == self._local_rows and (rows < self._global_rows or _rank_was_asked())
            if number == 0 and is_sharded:
                position.send(before_all)
            last_step = num_own * self._num_workers + self._worker + self._num_workers if is_sharded else number + 1
            if is_sharded or number % self._num_workers == self._worker:
                num_own += 1
                position.streamed(self._local_rows)
                first_row = 0 if is_sharded else self._wafer * self._local_rows
                yield [
                    self._cut(number, index, tensor, member, first_row)
                    for index, (tensor, member) in enumerate(zip(tensors, self._members))  # noqa: B905 - checked above
                ]
            position.send(position.states(last_step))

    def _rows(self, number: int, tensors: Sequence[Any]) -> int:
        rows = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
        if len(rows) != 1 or None in rows:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise InputFailure(
                f"the tensors of batch {number} of the input_fn {self._source} differ in their first dimension, the "
                f"batch: {shapes}"
            )
        (count,) = rows
        if count not in (self._global_rows, self._local_rows):
            raise InputFailure(
                f"batch {number} of the input_fn {self._source} has {count} rows, but the step was compiled for "
                f"{self._global_rows}: every batch must have the size of the first; drop_last=True in the torch "
                "DataLoader leaves out a smaller last one"
            )
        return int(count)

    def _cut(self, number: int, index: int, tensor: Any, member: dict[str, Any], first_row: int) -> Any:
        part = tensor.detach()[first_row : first_row + self._local_rows]
        dtype = str(part.dtype).removeprefix("torch.")
        if dtype != member["dtype"] or list(part.shape) != member["shape"]:
            raise InputFailure(
                f"tensor {index} of batch {number} of the input_fn {self._source} is {dtype} with "
                f"{list(part.shape)[1:]} per sample, but the step was compiled for {member['dtype']} with "
                f"{member['shape'][1:]}: every batch must be like the first"
            )
        return part


class Position:
    """Where the loader stands: its state, for the checkpoints of the steps for which it is wanted."""

    def __init__(self, loader: Any, channel: "Channel", prepare: dict[str, Any], state_steps: list[int]) -> None:
        self.wanted = state_steps
        self._loader = loader
        self._channel = channel
        self._prepare = prepare
        self._batches = 0
        self._samples = 0

    def streamed(self, rows: int) -> None:
        """A batch with so many rows is this worker's."""
        self._batches += 1
        self._samples += rows

    def states(self, last_step: int) -> list[tuple[int, bytes]]:
        """The loader's state as it is now, for each wanted step up to `last_step`; InputFailure if it has none."""
        return [(step, self._state(step)) for step in self.wanted if step <= last_step]

    def send(self, states: list[tuple[int, bytes]]) -> None:
        """Hand states over: they are not wanted any more."""
        for step, text in states:
            with os.fdopen(os.memfd_create("state", os.MFD_CLOEXEC), "r+b", buffering=0) as file:
                file.write(text)
                self._channel.send_file(file.fileno(), kind="state", step=step)
            self.wanted.remove(step)

    def _state(self, step: int) -> bytes:
        # For cstorch.distributed.get_worker_state.
        os.environ["WAFERBOX_WORKER_STATE"] = json.dumps(
            {
                "local_worker_id": self._prepare["worker"],
                "num_workers_per_csx": self._prepare["num_workers"],
                "num_csx": self._prepare["num_csx"],
                "wse_id": self._prepare["wafer"],
                "appliance_step": step,
                "worker_step": self._batches,
                "samples_streamed": self._samples,
            }
        )
        try:
            text = json.dumps(plain(self._loader.state_dict())).encode()
        except InputFailure:
            raise
        except Exception as error:  # the user's code; it is reported
            raise InputFailure(f"the loader's state_dict raised {_summary(error)}", _user_traceback(error)) from error
        finally:
            os.environ.pop("WAFERBOX_WORKER_STATE", None)
        if len(text) > STATE_BYTES:
            raise InputFailure(
                f"the state of the loader takes {len(text)} bytes, more than {STATE_BYTES}: keep what is large out of "
                "its state_dict; a seed and a count are enough to make an order of samples again"
            )
        return text


def plain(value: Any) -> Any:
    """A state in the form that is described at the top. InputFailure for what has none."""
    torch, numpy = sys.modules["torch"], sys.modules["numpy"]
    if isinstance(value, numpy.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple", *map(plain, value)]
    if isinstance(value, dict):
        return ["dict", *([plain(key), plain(item)] for key, item in value.items())]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return ["tensor", dtype, list(value.shape), base64.b64encode(content).decode()]
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return ["array", value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]
    raise InputFailure(
        f"the state of the loader holds a {type(value).__name__}, which cannot be saved: use numbers, strings, bytes, "
        "tensors, arrays, and lists, tuples and dicts of these"
    )


def endless(loader: Any, max_empty_passes: int) -> Iterator[Any]:
    """Batches of one pass after the other. InputFailure when too many give nothing, or there can be no second."""
    count = num_empty = 0
    while True:
        before = count
        iterator = iter(loader)
        for batch in iterator:
            count += 1
            yield batch
        num_empty = num_empty + 1 if count == before else 0
        if num_empty > max_empty_passes or iterator is loader:
            raise InputFailure(
                f"the loader ran dry after {count} batches and more are needed: it yields nothing, or it is a "
                "generator, which cannot be iterated a second time; let the input_fn return an object with __iter__, "
                "or lower num_steps"
            )


class Ring:
    """The shared memory that batches are written to: slots of equal size, each with all tensors of a batch."""

    def __init__(self, file_descriptor: int, load: dict[str, Any]) -> None:
        torch = sys.modules["torch"]
        memory = mmap.mmap(file_descriptor, load["slot_bytes"] * load["num_slots"])
        os.close(file_descriptor)
        self._slots = [
            [_view(torch, memory, slot * load["slot_bytes"] + member["offset"], member) for member in load["members"]]
            for slot in range(load["num_slots"])
        ]

    def write(self, slot: int, tensors: Sequence[Any]) -> None:
        """Copy a batch into a slot."""
        for view, tensor in zip(self._slots[slot], tensors):  # noqa: B905 - as many as the members
            view.copy_(tensor)


def _view(torch: Any, memory: mmap.mmap, offset: int, member: dict[str, Any]) -> Any:
    count = 1
    for size in member["shape"]:
        count *= size
    if count == 0:
        return torch.empty(member["shape"], dtype=getattr(torch, member["dtype"]))
    flat = torch.frombuffer(memory, dtype=getattr(torch, member["dtype"]), count=count, offset=offset)
    return flat.view(member["shape"])


def build(prepare: dict[str, Any], builder: bytes) -> tuple[Any, str]:
    """Call the user's input_fn, in the state that its random generators had on the client.

    Returns the loader, at the position that the client has loaded, and what the input_fn is called.
    """
    first, last = prepare["python_paths"], prepare["last_python_paths"]
    sys.path[:] = [*first, *(path for path in sys.path if path not in (*first, *last)), *last]
    if os.path.isdir(prepare["working_directory"]):  # it may not exist on another host
        os.chdir(prepare["working_directory"])
    rank = prepare["wafer"] * prepare["num_workers"] + prepare["worker"]
    os.environ["WAFERBOX_STREAMER_RANK"] = str(rank)
    os.environ["WAFERBOX_STREAMER_COUNT"] = str(prepare["num_csx"] * prepare["num_workers"])
    os.environ["WAFERBOX_STREAMER_WAFER"] = str(prepare["wafer"])
    os.environ["WAFERBOX_STREAMER_NUM_CSX"] = str(prepare["num_csx"])
    try:
        import cloudpickle
        import torch  # noqa: F401 - found in sys.modules by what follows
    except ImportError as error:
        raise InputFailure(f"the interpreter {sys.executable} has no {error.name}; install it there") from error
    try:
        recipe = cloudpickle.loads(builder)  # only here: this process is the user's
        _set_random_state(recipe["random_state"])
        loader = recipe["input_fn"](*recipe["args"], **recipe["kwargs"])
        if (position := recipe["position"]) is not None:
            strict = {} if position["strict"] else {"strict": False}
            loader.load_state_dict(loader.deaggregate_state_dict(position["state"], **strict), **strict)
    except Exception as error:  # the user's code; it is reported
        raise InputFailure(f"the input_fn raised {_summary(error)}", _user_traceback(error)) from error
    if not hasattr(loader, "__iter__"):
        raise InputFailure(f"the input_fn returned {type(loader).__name__}, which is not an iterable of batches")
    return loader, _source(recipe["input_fn"])


def _source(function: Any) -> str:
    """A function's name, file and line, as far as it has them."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _set_random_state(state: dict[str, Any]) -> None:
    torch = sys.modules["torch"]
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    random.setstate(state["python"])
    sys.modules["numpy"].random.set_state(state["numpy"])  # imported with the state, an array


def _rank_was_asked() -> bool:
    distributed = sys.modules.get("cstorch.distributed.streaming")
    return distributed is not None and distributed.rank_was_asked()


def _summary(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[-1].strip()


def _user_traceback(error: BaseException) -> str:
    """The traceback from the first frame that is not of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next is not None:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    if len(text) > TRACEBACK_CHARACTERS:
        half = TRACEBACK_CHARACTERS // 2
        text = f"{text[:half]}\n  ...\n{text[-half:]}"
    return text


class Channel:
    """The child's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def receive(self, kind: str) -> tuple[dict[str, Any], list[int]]:
        """The next message, of this kind, with its file descriptors. SystemExit when the worker is gone."""
        data, descriptors, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 1)
        if not data:
            raise SystemExit(0)
        message = json.loads(data)
        assert message["kind"] == kind, message
        return message, descriptors

    def send_file(self, file_descriptor: int, **message: Any) -> None:
        """Send a message with a file. SystemExit when the worker is gone."""
        try:
            socket.send_fds(self._connection, [json.dumps(message).encode()], [file_descriptor])
        except (BrokenPipeError, ConnectionResetError):
            raise SystemExit(0) from None

    def wait_for_end(self) -> None:
        """Until the worker closes its end. Closing ours with messages unread would take away those under way to it."""
        while self._connection.recv(MESSAGE_BYTES):
            pass

    def send(self, **message: Any) -> None:
        """Send a message. SystemExit when the worker is gone."""
        try:
            self._connection.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            raise SystemExit(0) from None


def serve(channel: Channel) -> None:
    """Build the loader, then fill slots for ever; always one batch ahead of what is asked for."""
    prepare, (builder_file,) = channel.receive("prepare")
    with open(builder_file, "rb") as file:
        loader, source = build(prepare, file.read())
    load, (ring_file,) = channel.receive("load")
    ring = Ring(ring_file, load)
    position = Position(loader, channel, prepare, load["state_steps"])
    # A pass that is dealt out among workers, or that ends where it is resumed, may have nothing for this one.
    batches = Selection(prepare, load, source).own(endless(loader, prepare["num_workers"]), position)
    while True:
        try:
            tensors = next(batches)
        except InputFailure as failure:
            _fail_when_asked(channel, failure, position)
        except Exception as error:  # noqa: BLE001 - the user's code; it is reported
            message = f"the loader of the input_fn {source} raised {_summary(error)}"
            _fail_when_asked(channel, InputFailure(message, _user_traceback(error)), position)
        fill, _ = channel.receive("fill")
        position.wanted = fill["state_steps"]
        ring.write(fill["slot"], tensors)
        channel.send(kind="filled", slot=fill["slot"])


def _fail_when_asked(channel: Channel, failure: InputFailure, position: Position) -> None:
    # The batch may never be needed: the steps can be over. A state that is due is waited for.
    if not position.wanted:
        channel.receive("fill")
    raise failure


def redirect(output: int) -> None:
    """Let a descriptor take the place of standard output and error, so that lines come when they are printed."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the interpreter's own
    os.close(output)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.child")
    parser.add_argument("--socket", type=int, required=True, metavar="FD", help="the socket to the worker")
    parser.add_argument("--output", type=int, required=True, metavar="FD", help="for what the user's code prints")
    arguments = parser.parse_args(argv)
    redirect(arguments.output)
    with socket.socket(fileno=arguments.socket) as connection:
        channel = Channel(connection)
        try:
            serve(channel)
        except InputFailure as failure:
            channel.send(kind="failed", message=str(failure), traceback=failure.trace)
            channel.wait_for_end()
    return 0


if __name__ == "__main__":
    # Run by its path: the folder of this file must not hide the user's modules, and nobody has tied it to its parent.
    sys.path.pop(0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sys.exit(main())
