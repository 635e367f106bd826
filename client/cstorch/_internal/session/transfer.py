"""Transfers of states between the client and one MemoryX shard: gRPC calls for control, a link for the bytes."""

import concurrent.futures
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import grpc
import torch

from cstorch._internal.session.connecting import connect
from cstorch.distributed.cluster_config import LANES
from cstorch.errors import ClusterError, ClusterUnreachableError, CstorchError
from waferbox import deadlines
from waferbox.host.threads import SerialThread
from waferbox.links.dialling import dial
from waferbox.links.elements import aligned
from waferbox.links.hub import Hub, Stopped
from waferbox.links.link import Link, LinkLost
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.rpc.server import through
from wsc.v1 import coordinator_pb2, node_pb2, node_pb2_grpc

BATCH_BYTES = 64 * 1024 * 1024
BATCH_STATES = 1024
ATTEMPTS = 5  # to use a shard; each waits until the job has all its nodes

_Result = TypeVar("_Result")
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
# A shard discards the token of a link together with the link.
_CUT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAUTHENTICATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A state to be written; `value` returns its value at the time of its transfer."""

    name: str
    nbytes: int
    value: Callable[[], torch.Tensor]


class ShardReplacedError(ClusterError):
    """The shard was replaced, or has lost its states with the coordinator: all of them must be written again."""


class ShardedJob(Protocol):
    """The part of a ClientJob that a connection to a shard needs."""

    @property
    def token(self) -> str: ...
    def locate(self, shard: int, step: int) -> coordinator_pb2.StateShard: ...
    def reason(self, error: Exception, doing: str) -> CstorchError: ...


class ShardConnection:
    """A connection to a shard, opened at its first use and again after a failure. Used by one thread.

    Another thread opens and closes it, and begins its calls: an interrupt within gRPC would leave a call there that its
    channel waits for without end.

    Args:
        shard: The address of the shard, and the name of the job there.
        lane: The lane of the link.
        job: The job of the states; it has the token for the shard, and the cause of a failure.
        gateway: The address through which the shard is reached; empty if directly.
    """

    def __init__(self, shard: coordinator_pb2.StateShard, lane: str, job: ShardedJob, gateway: str = "") -> None:
        self._shard = shard
        self._gateway = gateway
        self._lane = LANES[lane]
        self._job = job
        self._opened: list[_OpenConnection] = []  # one, or none
        self._thread: SerialThread | None = None

    @property
    def address(self) -> str:
        """The address of the shard's StateService."""
        return self._shard.address

    def write(self, states: Sequence[Outgoing]) -> None:
        """Writes one of the `batches` of states; the shard has stored them when this returns.

        Raises:
            ClusterError: The shard is gone or refuses.
        """
        self._use(partial(_OpenConnection.write, states=states), "writing state")

    def initialise(
        self, states: Sequence[node_pb2.InitialState], unstaged: Callable[[], Sequence[node_pb2.InitialState]]
    ) -> None:
        """Orders initial values from the shard, which has stored them when the call returns.

        Args:
            states: The states; the shard has staged those without a program.
            unstaged: Returns the same states, each with its program, for a shard that has lost its staged values.

        Raises:
            ClusterError: The shard is gone or refuses.
        """
        self._use(partial(_OpenConnection.initialise, states=states, unstaged=unstaged), "initialising states")

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, step: int) -> Iterator[torch.Tensor]:
        """Reads one state, in tensors of some rows each: at most BATCH_BYTES, or a single row.

        Args:
            name: The name of the state.
            shape: Its shape.
            dtype: Its element type.
            step: The step of a snapshot, from 1; 0 for the live state.

        Raises:
            ClusterError: The shard is gone or refuses.
        """

        def part(shape: tuple[int, ...], offset: int) -> torch.Tensor:
            return self._use(
                lambda connection: connection.read(name, shape, dtype, step, offset), "reading state", step, reads=True
            )

        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        if not shape or shape[0] * row_bytes <= BATCH_BYTES:
            yield part(shape, 0)
            return
        rows = max(1, BATCH_BYTES // row_bytes)
        for start in range(0, shape[0], rows):
            yield part((min(rows, shape[0] - start), *shape[1:]), start * row_bytes)

    def _use(
        self, use: "Callable[[_OpenConnection], _Result]", doing: str, step: int = 0, *, reads: bool = False
    ) -> "_Result":
        """Makes a call with the open connection, and opens another one if the connection fails and the job does not.

        The connection fails if the shard was replaced, or if this process was suspended for longer than the shard's
        keepalive allows. A failed connection is closed, since it may still contain data of the transfer.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return use(self._connection())
            except (grpc.RpcError, LinkLost, Stopped, ClusterError) as error:
                self.close()
                if attempt == ATTEMPTS or not (_is_cut(error) or _is_missing(error)):
                    raise self._job.reason(error, f"{doing} of MemoryX shard {self._shard.shard}") from None
            except BaseException:
                self.close()
                raise
            before, self._shard = self._shard, self._job.locate(self._shard.shard, step)
            if not reads and self._shard != before:
                raise ShardReplacedError(f"shard {self._shard.shard} of MemoryX was replaced while {doing}")
        raise AssertionError("the last attempt returns or raises")

    def _connection(self) -> "_OpenConnection":
        opened = self._opened
        if not opened:
            thread = self._thread = self._thread or SerialThread("cstorch shard")

            def open_connection() -> None:
                opened.append(_OpenConnection(self._shard, self._lane, self._gateway, self._job.token, thread))

            thread.submit(open_connection).result()
        return opened[0]

    def close(self) -> None:
        """Closes the connection; one that is being opened as soon as it is open."""
        thread, opened = self._thread, self._opened
        self._thread, self._opened = None, []

        def close_opened() -> None:
            for each in opened:
                each.close()

        if thread is not None:
            closed = thread.submit(close_opened)
            thread.close()
            concurrent.futures.wait([closed], deadlines.STATE_TRANSFER.close)


def _is_cut(error: Exception) -> bool:
    """Whether the connection has failed, and not the request."""
    if isinstance(error, grpc.Call):
        return error.code() in _CUT
    return isinstance(error, LinkLost | Stopped | ClusterUnreachableError)


def _is_missing(error: Exception) -> bool:
    """Whether the shard lacks the state, as one does that has just replaced another."""
    return isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.NOT_FOUND


def batches(states: Sequence[Outgoing]) -> Iterator[list[Outgoing]]:
    """Splits states into batches of at most BATCH_BYTES and BATCH_STATES; a larger state is a batch by itself."""
    batch: list[Outgoing] = []
    total = 0
    for state in states:
        if batch and (total + state.nbytes > BATCH_BYTES or len(batch) == BATCH_STATES):
            yield batch
            batch, total = [], 0
        batch.append(state)
        total += aligned(state.nbytes)
    if batch:
        yield batch


class _OpenConnection:
    """A channel and a link to a shard. Raises gRPC's errors, and those of links."""

    def __init__(
        self,
        shard: coordinator_pb2.StateShard,
        lane: "node_pb2.Lane.ValueType",
        gateway: str,
        token: str,
        thread: SerialThread,
    ) -> None:
        """thread: it calls this and `close`, and begins the calls of gRPC."""
        self._thread = thread
        name = f"memoryx-{shard.shard}"
        self._job = shard.job
        self._channel = connect(through(gateway, shard.address), f"MemoryX shard {shard.shard}", token)
        try:
            self._stub = node_pb2_grpc.StateServiceStub(self._channel)
            opened = self._stub.OpenState(
                node_pb2.OpenStateRequest(job=shard.job), timeout=deadlines.STATE_TRANSFER.open
            )
            self._token = opened.token
            opened.endpoint.address = through(gateway, opened.endpoint.address)
            self._link: Link = dial(
                opened.endpoint,
                opened.token,
                name=name,
                own_name="client",
                lane=lane,
                deadline_seconds=deadlines.STATE_TRANSFER.open,
                credential=token,
            )
        except BaseException:
            self._channel.close()
            raise
        self._hub = Hub()
        self._hub.add(self._link)

    def _request(self, names: Sequence[str], step: int) -> node_pb2.TransferStateRequest:
        return node_pb2.TransferStateRequest(job=self._job, token=self._token, names=names, step=step)

    def write(self, states: Sequence[Outgoing]) -> None:
        if len(states) == 1 and states[0].nbytes > BATCH_BYTES:
            self._write_in_parts(states[0])
            return
        offsets = []
        end = 0
        for state in states:
            offsets.append(end)
            end += aligned(state.nbytes)
        memory = SharedMemory.create(max(end, 1))
        try:
            call = self._begin(self._stub.WriteState, self._request([state.name for state in states], 0))
            with self._watching(call):
                for index, (state, offset) in enumerate(zip(states, offsets, strict=True)):
                    value = state.value()
                    memory.tensor(value.dtype, tuple(value.shape), offset).copy_(value)
                    # As bytes: the receiver of a reference maps the shared memory for as long as the link is open.
                    self._hub.send(self._link, index, 0, Slice(memory, offset, state.nbytes), as_bytes=True)
                call.result()
        finally:
            memory.close()

    def _write_in_parts(self, state: Outgoing) -> None:
        """Writes a large state in parts, of which the shard has one in memory at a time."""
        value = state.value().contiguous().view(-1).view(torch.uint8)
        memory = SharedMemory.create(BATCH_BYTES)
        try:
            for offset in range(0, state.nbytes, BATCH_BYTES):
                nbytes = min(BATCH_BYTES, state.nbytes - offset)
                request = self._request([state.name], 0)
                request.part.offset, request.part.nbytes = offset, nbytes
                call = self._begin(self._stub.WriteState, request)
                with self._watching(call):
                    memory.tensor(torch.uint8, (nbytes,), 0).copy_(value[offset : offset + nbytes])
                    self._hub.send(self._link, 0, 0, Slice(memory, 0, nbytes), as_bytes=True)
                    call.result()
        finally:
            memory.close()

    def initialise(
        self, states: Sequence[node_pb2.InitialState], unstaged: Callable[[], Sequence[node_pb2.InitialState]]
    ) -> None:
        request = node_pb2.InitialiseStatesRequest(job=self._job, states=states)
        try:
            self._begin(self._stub.InitialiseStates, request).result()
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DATA_LOSS:  # the staged values are lost
                raise
            request = node_pb2.InitialiseStatesRequest(job=self._job, states=unstaged())
            self._begin(self._stub.InitialiseStates, request).result()

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, step: int, offset: int) -> torch.Tensor:
        """Reads the part of a state that begins `offset` bytes from its start and has this shape."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        self._link.expect({0: nbytes})
        request = self._request([name], step)
        request.part.offset, request.part.nbytes = offset, nbytes
        call = self._begin(self._stub.ReadState, request)
        with self._watching(call):
            message = self._hub.receive(self._link, 0, step)
            value = message.tensor(dtype, shape, 0).clone()
            call.result()
        return value

    def _begin(
        self, method: "grpc.UnaryUnaryMultiCallable[_Request, _Response]", request: _Request
    ) -> "grpc.CallFuture[_Response]":
        return self._thread.submit(partial(method.future, request, timeout=deadlines.STATE_TRANSFER.transfer)).result()

    def _watching(self, call: "grpc.CallFuture[node_pb2.TransferStateResponse]") -> "_Watched":
        return _Watched(call, self._hub)

    def close(self) -> None:
        self._link.close()
        self._hub.close()
        self._channel.close()


class _Watched:
    """Context of a transfer: an error of its call ends the wait on the link, and replaces the error of the link."""

    def __init__(self, call: "grpc.CallFuture[node_pb2.TransferStateResponse]", hub: Hub) -> None:
        self._call = call
        self._hub = hub

    def __enter__(self) -> None:
        self._call.add_done_callback(self._stop_on_error)

    def _stop_on_error(self, call: "grpc.Future[node_pb2.TransferStateResponse]") -> None:
        if call.cancelled() or call.exception() is not None:
            self._hub.stop()

    def _outcome(self) -> grpc.RpcError | None:
        """Returns the error of the call, which has the cause if the shard closed the link to refuse a transfer."""
        try:
            self._call.result(timeout=deadlines.STATE_TRANSFER.reason)
        except grpc.RpcError as reason:
            return reason
        except grpc.FutureTimeoutError:
            pass
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Stopped | LinkLost):
            reason = self._outcome()
            if reason is not None:
                raise reason from None
        if error is not None and not isinstance(error, grpc.RpcError):
            self._call.cancel()  # type: ignore[no-untyped-call]
