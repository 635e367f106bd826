"""The lane within one host: references on a Unix SOCK_SEQPACKET socket, the payload in shared memory.

A hop costs a fraction of a gRPC message. Segments come as file descriptors over the same socket, which proves that both
ends see the same memory; a peer that dies is an end of file.
"""

import array
import contextlib
import os
import socket
from collections import deque
from typing import Final

from interconnect.links.frame import HEADER_BYTES, Frame, FrameError, FrameKind, parse
from interconnect.links.link import Link, LinkLost, Message
from interconnect.links.relay import RelayBuffers
from interconnect.links.shared_memory import Segment, Slice

CHUNK_BYTES: Final = 128 * 1024
MAX_SEGMENTS: Final = 1024
# Room for a window of frames; the kernel gives what it allows.
SEND_BUFFER_BYTES: Final = 4 * 1024 * 1024
_DESCRIPTOR_BYTES: Final = array.array("i").itemsize
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_DESCRIPTOR_BYTES)


class SocketLink(Link):
    """A link over a connected SEQPACKET socket, which it takes over."""

    def __init__(self, name: str, connection: socket.socket) -> None:
        super().__init__(name)
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._socket = connection
        self._descriptor = connection.fileno()
        self._receive_buffer = bytearray(HEADER_BYTES + CHUNK_BYTES)
        self._receive_buffers = [self._receive_buffer]
        self._receive_view = memoryview(self._receive_buffer)
        self._outgoing: deque[tuple[bytes, memoryview | None, Segment | None]] = deque()
        self._shared: dict[Segment, int] = {}
        self._next_segment = 0
        self._mapped: dict[int, Segment] = {}
        self._relay = RelayBuffers()

    @property
    def lane(self) -> str:
        return "shared memory"

    @property
    def blocked(self) -> bool:
        return bool(self._outgoing)

    def fileno(self) -> int:
        return self._descriptor

    def flush(self) -> bool:
        outgoing = self._outgoing
        while outgoing:
            header, payload, segment = outgoing[0]
            try:
                if segment is not None:
                    socket.send_fds(self._socket, [header], [segment.fileno()])
                elif payload is not None:
                    self._socket.sendmsg((header, payload))
                else:
                    self._socket.send(header)
            except BlockingIOError:
                return False
            except OSError as error:
                outgoing.clear()
                # It may have ended the link in good order: what it said last is still to be read.
                while self.poll():
                    pass
                raise self._lost(f"nothing can be sent ({error.strerror})") from error
            outgoing.popleft()
        return True

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        with contextlib.suppress(OSError, LinkLost):
            self._queue(Frame(FrameKind.CLOSE))
            self.flush()
        self._outgoing.clear()
        self._socket.close()
        for segment in self._mapped.values():
            segment.close()
        self._mapped.clear()
        self._shared.clear()
        self._relay.close()

    # -- sending

    def _queue(self, frame: Frame, payload: memoryview | None = None) -> None:
        self._outgoing.append((frame.header(payload or b""), payload, None))

    def _queue_reference(self, group: int, step: int, payload: Slice) -> None:
        number = self._shared.get(payload.segment)
        if number is None:
            number = self._share(payload.segment)
        nbytes = payload.nbytes
        frame = Frame(FrameKind.REFERENCE, group, number, step, payload.offset, nbytes, nbytes)
        self._outgoing.append((frame.header(), None, None))

    def _queue_bytes(self, kind: FrameKind, group: int, step: int, payload: memoryview) -> None:
        total = len(payload)
        if total <= CHUNK_BYTES:
            self._queue(Frame(kind, group, 0, step, 0, total, total), payload)
            return
        for offset in range(0, total, CHUNK_BYTES):
            chunk = payload[offset : offset + CHUNK_BYTES]
            self._queue(Frame(kind, group, 0, step, offset, len(chunk), total), chunk)

    def _queue_copy(self, message: Message) -> None:
        place = self._relay.place(message.group, message.step, message.view)
        # The next link that the message is passed on to finds it in shared memory.
        message.segment, message.offset = place.segment, place.offset
        self._queue_reference(message.group, message.step, place)

    def _share(self, segment: Segment) -> int:
        """Sends a segment's descriptor, once; and says which of those before are no more."""
        for other in [other for other in self._shared if other.closed]:
            self._queue(Frame(FrameKind.RELEASE, segment=self._shared.pop(other)))
        self._next_segment += 1
        number = self._shared[segment] = self._next_segment
        header = Frame(FrameKind.SEGMENT, segment=number, length=segment.nbytes).header()
        self._outgoing.append((header, None, segment))
        return number

    # -- receiving

    def poll(self) -> bool:
        try:
            count, ancillary, flags, _ = self._socket.recvmsg_into(
                self._receive_buffers, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # It closed with frames of ours unread. What it sent before is still there, and then the end of file.
            return True
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from error
        if ancillary:
            self._take_segment(count, ancillary)
            return True
        if count == 0:
            # An end of file. After a CLOSE it is the orderly end.
            if not self.ended:
                raise self._lost("the process is gone")
            return False
        try:
            if flags & socket.MSG_TRUNC:
                raise FrameError("a frame is larger than any may be")
            frame, payload = parse(self._receive_view[:count])
            if count != HEADER_BYTES + len(payload):
                raise FrameError("there is something behind a frame")
        except FrameError as error:
            raise self._damaged(error) from error
        kind = frame.kind
        if kind is FrameKind.REFERENCE:
            self._take_reference(frame, self._mapped.get(frame.segment))
        elif kind is FrameKind.BYTES or kind is FrameKind.COPY:
            self._take_bytes(frame, payload, lasts=False)
        elif kind is FrameKind.RELEASE:
            segment = self._mapped.pop(frame.segment, None)
            if segment is not None:
                segment.close()
        else:
            self._control(frame)
        return True

    def _take_segment(self, count: int, ancillary: list[tuple[int, int, bytes]]) -> None:
        """A frame with file descriptors; every one of them is owned here, or closed."""
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % _DESCRIPTOR_BYTES])
        owned = list(descriptors)
        try:
            frame, _ = parse(self._receive_view[:count])
            fits = frame.kind is FrameKind.SEGMENT and frame.segment not in self._mapped
            if len(owned) != 1 or not fits or len(self._mapped) >= MAX_SEGMENTS:
                raise self._lost("it shared a segment that it may not share")
            self._mapped[frame.segment] = Segment.from_fd(owned.pop(), frame.length)
        except (FrameError, ValueError) as error:
            raise LinkLost(self.name, str(error)) from error
        finally:
            for descriptor in owned:
                os.close(descriptor)
