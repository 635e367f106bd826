"""The lane between hosts: frames as raw bytes on one gRPC stream in each direction.

No protobuf: the messages of the stream are header and payload, joined once. A reader thread takes messages off the
stream and wakes the hub; the other direction is a queue that gRPC drains. The queue is bounded in bytes: the rest of a
larger group waits in its sender's memory. What bounds the incoming side are the windows of the link.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Final, NoReturn

import grpc

from waferbox import deadlines
from waferbox.host.threads import GuardedThread
from waferbox.links.frame import HEADER_BYTES, Frame, FrameError, FrameKind, parse
from waferbox.links.grpc_bounds import CHUNK_BYTES, MAX_QUEUED_BYTES
from waferbox.links.link import Link, Message
from waferbox.links.shared_memory import Slice

METHOD: Final = "/wsc.v1.Link/Stream"
MAX_MESSAGE_BYTES: Final = CHUNK_BYTES + HEADER_BYTES
# Frames that wait for gRPC go in one message, where they are small.
SMALL_FRAME_BYTES: Final = 8 * 1024
MAX_JOINED: Final = 64


class GrpcLink(Link):
    """A link over one bidirectional stream."""

    def __init__(self, name: str, abandon: Callable[[], None]) -> None:
        """abandon ends the stream, and gives back what it used; called last."""
        super().__init__(name)
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._incoming: deque[bytes] = deque()
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._unqueued: deque[tuple[FrameKind, int, int, memoryview, int]] = deque()  # groups, from an offset on
        self._queued_bytes = 0
        self._drained_bytes = 0
        self._wants_room = False  # a sender waits for bytes to be drained
        self._over = False  # the stream has ended, and everything that it brought is in _incoming
        self._abandon = abandon
        self._closed = False
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._defect: Exception | None = None  # of the reader

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
        """What waits for gRPC to send it."""
        return self._queued_bytes - self._drained_bytes

    def outgoing(self) -> Iterator[bytes]:
        """What gRPC sends, for it to iterate over; ends when the link is closed."""
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
                # What a message costs is the same for a few bytes and for many.
                few = [message]
                while held and (following := held[0]) is not None and _is_small(following):
                    few.append(following)
                    held.popleft()
                message = b"".join(few)
            yield message
            self._drained_bytes += len(message)
            if self._wants_room and self._has_room():
                self._wake()

    def end_outgoing(self) -> None:
        """Nothing more is sent. From any thread."""
        self._outgoing.put(None)

    def read_from(self, messages: Iterable[bytes]) -> None:
        """Starts the thread that takes in the other direction."""
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
        return self._fill_queue()  # what was drained before that wakes nobody

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._unqueued.clear()
        self._queue(Frame(FrameKind.CLOSE))
        self.end_outgoing()
        # The stream ends in its own time, when the other side has taken what was sent.
        assert self._reader is not None
        self._reader.join(deadlines.LINKS.close)
        self._abandon()
        self._reader.join()
        with self._lock:
            os.close(self._event)
            self._event = -1
        self._incoming.clear()

    # -- sending

    def _queue(self, frame: Frame, payload: memoryview | None = None) -> None:
        self._put(frame.header() if payload is None else b"".join((frame.header(payload), payload)))

    def _put(self, message: bytes) -> None:
        self._queued_bytes += len(message)
        self._outgoing.put(message)

    def _queue_reference(self, group: int, step: int, payload: Slice) -> None:
        self._queue_bytes(FrameKind.COPY, group, step, payload.view)

    def _queue_bytes(self, kind: FrameKind, group: int, step: int, payload: memoryview) -> None:
        self._unqueued.append((kind, group, step, payload, 0))
        self._fill_queue()

    def _fill_queue(self) -> bool:
        """Queues chunks while there is room. Returns whether nothing is left to be queued, and there is room still."""
        unqueued = self._unqueued
        while unqueued and self._has_room():
            kind, group, step, payload, offset = unqueued[0]
            chunk = payload[offset : offset + CHUNK_BYTES]
            self._queue(Frame(kind, group, 0, step, offset, len(chunk), len(payload)), chunk)
            if offset + len(chunk) < len(payload):
                unqueued[0] = (kind, group, step, payload, offset + len(chunk))
            else:
                unqueued.popleft()
        return not unqueued and self._has_room()

    def _queue_copy(self, message: Message) -> None:
        view = message.view
        frame = view.obj
        if isinstance(frame, bytes) and len(frame) == HEADER_BYTES + len(view):
            self._put(frame)  # as it came, with the checksum that it came with
        else:
            self._queue_bytes(FrameKind.COPY, message.group, message.step, view)

    def _has_room(self) -> bool:
        return self.queued_bytes <= MAX_QUEUED_BYTES

    # -- receiving

    def poll(self) -> bool:
        woken = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
            woken = True  # maybe because there is room: who waits for that has to look again
        over = self._over  # before a look at what is there
        incoming = self._incoming
        if not incoming:
            if over and not self.ended:
                self._wake()  # every wait from now on is to end so
                self._raise_over()
            return woken
        while incoming:
            try:
                self._take(incoming.popleft())
            except FrameError as error:
                raise self._damaged(error) from error
        return True

    def _take(self, message: bytes) -> None:
        """The frames of a message."""
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
        # The stream may break: then it is over, as the hub sees.
        with contextlib.suppress(grpc.RpcError):
            for message in messages:
                self._incoming.append(message)
                self._wake()
        self._end_incoming()

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
