"""The lane between hosts: frames as raw bytes on one gRPC stream in each direction.

The messages of the stream are not protobuf but header and payload, joined once. A reader thread moves messages from the
stream to the incoming queue and wakes the hub; gRPC drains the outgoing queue. Both queues are bounded in bytes. The
rest of a larger group waits in its sender's memory; a full incoming queue stops the reader, and with it the peer.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import SimpleQueue
from typing import Final, NoReturn

import grpc

from waferbox import deadlines
from waferbox.host.threads import GuardedThread
from waferbox.links.frame import HEADER_BYTES, Frame, FrameError, FrameKind, parse
from waferbox.links.grpc_bounds import CHUNK_BYTES, MAX_QUEUED_BYTES
from waferbox.links.link import HELD_STEPS, Link, Message
from waferbox.links.shared_memory import Slice

METHOD: Final = "/wsc.v1.Link/Stream"
MAX_MESSAGE_BYTES: Final = CHUNK_BYTES + HEADER_BYTES
# Small frames that wait for gRPC are joined: a message costs the same for a few bytes and for many.
SMALL_FRAME_BYTES: Final = 8 * 1024
MAX_JOINED: Final = 64
# The incoming queue has room for the groups of so many steps, and for at least so many bytes, since the hub's thread
# takes none while it computes. A peer that sends more has to wait.
MIN_INCOMING_BYTES: Final = 64 * 1024 * 1024
INCOMING_STEPS: Final = 8


class GrpcLink(Link):
    """A link over one bidirectional stream. Used by its hub's thread, beside a reader thread and gRPC's own."""

    def __init__(self, name: str, abandon: Callable[[], None]) -> None:
        """abandon: ends the stream and frees its resources; called last."""
        super().__init__(name)
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._incoming: deque[bytes] = deque()
        self._arrived_bytes = 0  # written by the reader
        self._taken_bytes = 0  # of the incoming queue; written by the hub's thread
        self._max_incoming_bytes = MIN_INCOMING_BYTES
        self._room = threading.Condition()  # in the incoming queue
        self._reader_waits = False  # for room
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        # Groups, from an offset to another.
        self._unqueued: deque[tuple[FrameKind, int, int, memoryview, int, int]] = deque()
        self._queued_bytes = 0
        self._drained_bytes = 0
        self._wants_room = False  # a sender waits for bytes to be drained
        self._over = False  # the stream has ended, and all its messages are in _incoming
        self._abandon = abandon
        self._closed = False
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._defect: Exception | None = None  # that ended the reader

    @property
    def lane(self) -> str:
        return "grpc"

    @property
    def blocked(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._event

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for gRPC."""
        return self._queued_bytes - self._drained_bytes

    def outgoing(self) -> Iterator[bytes]:
        """The messages for gRPC to send, until the link is closed."""
        held: deque[bytes | None] = deque()
        while True:
            if not held:
                held.append(self._outgoing.get())
            while len(held) < MAX_JOINED and not self._outgoing.empty():
                held.append(self._outgoing.get())
            message = held.popleft()
            if message is None:
                return
            if held and _is_small(message) and _is_small(held[0]):
                joined = [message]
                while held and (following := held[0]) is not None and _is_small(following):
                    joined.append(following)
                    held.popleft()
                message = b"".join(joined)
            yield message
            self._drained_bytes += len(message)
            if self._wants_room and self._has_room():
                self._wake()

    def end_outgoing(self) -> None:
        """Ends the stream of outgoing messages. May be called from any thread."""
        self._outgoing.put(None)

    def read_from(self, messages: Iterable[bytes]) -> None:
        """Starts the reader thread, which puts the peer's messages into the incoming queue."""
        self._reader = GuardedThread(
            lambda: self._read(messages), name=f"link-{self.name}", on_defect=self._reader_failed
        )
        self._reader.start()

    def flush(self) -> bool:
        if self._over and not self._closed:
            while self._incoming:
                self.poll()
            self._raise_over()
        self._wants_room = False
        if self._fill_queue():
            return True
        self._wants_room = True
        return self._fill_queue()  # again: bytes that were drained before the flag was set have woken nobody

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._unqueued.clear()
        self._queue(Frame(FrameKind.CLOSE))
        self.end_outgoing()
        self._let_reader_continue()
        # A stream in good order ends when the peer has taken what was sent.
        assert self._reader is not None
        self._reader.join(deadlines.LINKS.close)
        self._abandon()
        self._reader.join()
        with self._lock:
            os.close(self._event)
            self._event = -1
        self._incoming.clear()

    # --- Sending ------------------------------------------------------------------------------------------------------

    def _queue(self, frame: Frame, payload: memoryview | None = None) -> None:
        self._put(frame.header() if payload is None else b"".join((frame.header(payload), payload)))

    def _put(self, message: bytes) -> None:
        self._queued_bytes += len(message)
        self._outgoing.put(message)

    def _queue_reference(self, group: int, step: int, payload: Slice) -> None:
        self._queue_bytes(FrameKind.COPY, group, step, payload.view)

    def _queue_bytes(self, kind: FrameKind, group: int, step: int, payload: memoryview) -> None:
        self._unqueued.append((kind, group, step, payload, 0, len(payload)))
        self._fill_queue()

    def _queue_part(self, group: int, step: int, payload: Slice, begin: int, end: int) -> None:
        self._unqueued.append((FrameKind.COPY, group, step, payload.view, begin, end))
        self._fill_queue()

    def _fill_queue(self) -> bool:
        """Queues chunks while there is room. Returns whether all chunks are queued and there is still room."""
        unqueued = self._unqueued
        while unqueued and self._has_room():
            kind, group, step, payload, offset, end = unqueued[0]
            chunk = payload[offset : min(end, offset + CHUNK_BYTES)]
            self._queue(Frame(kind, group, 0, step, offset, len(chunk), len(payload)), chunk)
            if offset + len(chunk) < end:
                unqueued[0] = (kind, group, step, payload, offset + len(chunk), end)
            else:
                unqueued.popleft()
        return not unqueued and self._has_room()

    def _queue_copy(self, message: Message) -> None:
        view = message.payload  # also where a link has copied it to shared memory since
        assert view is not None, "it arrived as bytes"
        frame = view.obj
        if isinstance(frame, bytes) and len(frame) == HEADER_BYTES + len(view):
            self._put(frame)  # unchanged, with the checksum that it has
        elif message.total is None:
            self._queue_bytes(FrameKind.COPY, message.group, message.step, view)
        else:
            header = Frame(FrameKind.COPY, message.group, 0, message.step, message.begin, len(view), message.total)
            self._queue(header, view)

    def _has_room(self) -> bool:
        return self.queued_bytes <= MAX_QUEUED_BYTES

    # --- Receiving ----------------------------------------------------------------------------------------------------

    def expect(self, sizes: Mapping[int, int], *, steps: int = HELD_STEPS) -> None:
        super().expect(sizes, steps=steps)
        self._max_incoming_bytes = max(MIN_INCOMING_BYTES, INCOMING_STEPS * sum(sizes.values()))

    def poll(self) -> bool:
        woken = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
            woken = True  # possibly because there is room to send, so a waiting sender has to look again
        over = self._over  # read before the queue: no message comes after it is set
        incoming = self._incoming
        if not incoming:
            if over and not self.ended:
                self._wake()  # so that all later waits end too
                self._raise_over()
            return woken
        # Only what is here now: a peer that sends without end must not keep this thread.
        for _ in range(len(incoming)):
            message = incoming.popleft()
            self._taken_bytes += len(message)
            try:
                self._take_message(message)
            except FrameError as error:
                raise self._damaged(error) from error
        if self._reader_waits:
            self._let_reader_continue()
        return True

    def _take_message(self, message: bytes) -> None:
        """Takes the frames of a message."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise FrameError("a message is larger than any may be")
        rest = memoryview(message)
        while rest:
            frame, payload = parse(rest)
            rest = rest[HEADER_BYTES + len(payload) :]
            if frame.kind is FrameKind.BYTES or frame.kind is FrameKind.COPY:
                self._take_bytes(frame, payload, lasts=True)
            else:
                self._control(frame)

    def _read(self, messages: Iterable[bytes]) -> None:
        # A stream that breaks is over too, which the hub's thread reports.
        with contextlib.suppress(grpc.RpcError):
            for message in messages:
                if self._closed:
                    continue  # until the stream ends, which close waits for
                self._arrived_bytes += len(message)
                self._incoming.append(message)
                self._wake()
                if self._is_full():
                    self._wait_for_room()
        self._end_incoming()

    def _is_full(self) -> bool:
        return self._arrived_bytes - self._taken_bytes > self._max_incoming_bytes

    def _wait_for_room(self) -> None:
        with self._room:
            # Set before the look at the counters: `poll` changes them before it looks at this.
            self._reader_waits = True
            self._room.wait_for(lambda: self._closed or not self._is_full())
            self._reader_waits = False

    def _let_reader_continue(self) -> None:
        with self._room:
            self._room.notify()

    def _reader_failed(self, defect: Exception) -> None:
        self._defect = defect
        self._end_incoming()

    def _end_incoming(self) -> None:
        self._over = True
        self.end_outgoing()
        self._wake()

    def _raise_over(self) -> NoReturn:
        if self._defect is not None:
            raise RuntimeError(f"the reader of the link to {self.name} failed") from self._defect
        raise self._lost("the process is gone")

    def _wake(self) -> None:
        with self._lock:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)


def _is_small(frame: bytes | None) -> bool:
    return frame is not None and len(frame) <= SMALL_FRAME_BYTES
