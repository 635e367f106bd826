"""The process that runs a user's input_fn for a worker, under the user's interpreter.

Only the standard library and the torch found there are needed: this file is also run by its path, under an interpreter
that has no Waferbox. It speaks with its worker over a SEQPACKET socket, one JSON object a message:

    worker -> child   prepare {python_paths, working_directory, num_workers, worker, ...}   + fd: the pickled builder
    worker -> child   load {members, global_rows, local_rows, slot_bytes, num_slots}        + fd: the ring of slots
    worker -> child   fill {slot}           put this worker's next batch into a slot
    child -> worker   filled {slot}         | failed {message, traceback}, after which nothing follows

The child ends when its end of the socket is closed.
"""

import argparse
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

    def __init__(self, prepare: dict[str, Any], load: dict[str, Any]) -> None:
        self._wafer: int = prepare["wafer"]
        self._worker: int = prepare["worker"]
        self._num_workers: int = prepare["num_workers"]
        self._global_rows: int = load["global_rows"]
        self._local_rows: int = load["local_rows"]
        self._members: list[dict[str, Any]] = load["members"]

    def own(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        """The tensors of this worker's batches, cut to its wafer's rows, in the order of the plan."""
        from torch.utils import _pytree as pytree

        torch = sys.modules["torch"]
        for number, batch in enumerate(batches):
            tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
            if len(tensors) != len(self._members):
                raise InputFailure(
                    f"batch {number} of the input_fn has {len(tensors)} tensors, but the step was compiled for "
                    f"{len(self._members)}: every batch must have the structure of the first"
                )
            rows = self._rows(number, tensors)
            is_sharded = rows == self._local_rows and (rows < self._global_rows or _rank_was_asked())
            if not is_sharded and number % self._num_workers != self._worker:
                continue
            first_row = 0 if is_sharded else self._wafer * self._local_rows
            yield [
                self._cut(number, index, tensor, member, first_row)
                for index, (tensor, member) in enumerate(zip(tensors, self._members))  # noqa: B905 - checked above
            ]

    def _rows(self, number: int, tensors: Sequence[Any]) -> int:
        rows = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
        if len(rows) != 1 or None in rows:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise InputFailure(f"the tensors of batch {number} differ in their first dimension, the batch: {shapes}")
        (count,) = rows
        if count not in (self._global_rows, self._local_rows):
            raise InputFailure(
                f"batch {number} of the input_fn has {count} rows, but the step was compiled for {self._global_rows}: "
                "every batch must have the size of the first; drop_last=True in the torch DataLoader leaves out a "
                "smaller last one"
            )
        return int(count)

    def _cut(self, number: int, index: int, tensor: Any, member: dict[str, Any], first_row: int) -> Any:
        part = tensor.detach()[first_row : first_row + self._local_rows]
        dtype = str(part.dtype).removeprefix("torch.")
        if dtype != member["dtype"] or list(part.shape) != member["shape"]:
            raise InputFailure(
                f"tensor {index} of batch {number} is {dtype} with {list(part.shape)[1:]} per sample, but the step was "
                f"compiled for {member['dtype']} with {member['shape'][1:]}: every batch must be like the first"
            )
        return part


def endless(loader: Any) -> Iterator[Any]:
    """Batches of one pass after the other. InputFailure when a pass gives nothing, or there can be no second."""
    count = 0
    while True:
        before = count
        iterator = iter(loader)
        for batch in iterator:
            count += 1
            yield batch
        if count == before or iterator is loader:
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


def build(prepare: dict[str, Any], builder: bytes) -> Any:
    """Call the user's input_fn; returns the loader. The random generators are then as they were on the client."""
    for path in reversed(prepare["python_paths"]):
        if path not in sys.path:
            sys.path.insert(0, path)
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
    except Exception as error:  # the user's code; it is reported
        raise InputFailure(f"the input_fn raised {_summary(error)}", _user_traceback(error)) from error
    if not hasattr(loader, "__iter__"):
        raise InputFailure(f"the input_fn returned {type(loader).__name__}, which is not an iterable of batches")
    return loader


def _set_random_state(state: dict[str, Any]) -> None:
    torch = sys.modules["torch"]
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    random.setstate(state["python"])
    sys.modules["numpy"].random.set_state(state["numpy"])  # imported with the state, an array


def _rank_was_asked() -> bool:
    distributed = sys.modules.get("cstorch.distributed")
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
        loader = build(prepare, file.read())
    load, (ring_file,) = channel.receive("load")
    ring = Ring(ring_file, load)
    batches = Selection(prepare, load).own(endless(loader))
    while True:
        try:
            tensors = next(batches)
        except InputFailure as failure:
            _fail_when_asked(channel, failure)
        except Exception as error:  # noqa: BLE001 - the user's code; it is reported
            message = f"the input_fn's loader raised {_summary(error)}"
            _fail_when_asked(channel, InputFailure(message, _user_traceback(error)))
        fill, _ = channel.receive("fill")
        ring.write(fill["slot"], tensors)
        channel.send(kind="filled", slot=fill["slot"])


def _fail_when_asked(channel: Channel, failure: InputFailure) -> None:
    # The batch may never be needed: the steps can be over.
    channel.receive("fill")
    raise failure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.child")
    parser.add_argument("--socket", type=int, required=True, metavar="FD", help="the socket to the worker")
    arguments = parser.parse_args(argv)
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
