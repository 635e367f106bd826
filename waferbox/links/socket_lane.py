"""The lane within one host: references on a Unix SOCK_SEQPACKET socket, the payload in shared memory."""

import array
import contextlib
import os
import socket
from collections import deque
from typing import Final

from waferbox.links.frame import HEADER_BYTES, Frame, FrameError, FrameKind, parse
from waferbox.links.link import Link, LinkLost, Message
from waferbox.links.shared_memory import SharedMemory, Slice

# --- Relay buffers ----------------------------------------------------------------------------------------------------


ARENA_BYTES: Final = 16 * 1024 * 1024
ALIGNMENT: Final = 64


class RelayBuffers:
    """Shared memory of a link for groups that reached this process as bytes and are forwarded by reference.

    One buffer for each group is enough, as it is for the group's first sender: it overwrites its own buffer only after
    the group has been read. Groups that may run further ahead stay bytes. Used by one thread.
    """

    def __init__(self) -> None:
        self._arenas: list[SharedMemory] = []
        self._free = 0  # bytes at the end of the last arena
        self._buffers: dict[int, Slice] = {}  # by group

    def copy(self, message: Message) -> Slice:
        """Copies a message into the buffer of its group, and returns the place."""
        nbytes = message.group_bytes
        buffer = self._buffers.get(message.group)
        if buffer is None or buffer.nbytes != nbytes:
            buffer = self._buffers[message.group] = self._allocate(nbytes)
        place = Slice(buffer.memory, buffer.offset + message.begin, message.nbytes)
        place.view[:] = message.view
        return place

    def close(self) -> None:
        """Frees the memory."""
        self._buffers.clear()
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()
        self._free = 0

    def _allocate(self, nbytes: int) -> Slice:
        rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if rounded > self._free:
            self._free = max(ARENA_BYTES, rounded)
            self._arenas.append(SharedMemory.create(self._free))
        arena = self._arenas[-1]
        buffer = Slice(arena, arena.nbytes - self._free, nbytes)
        self._free -= rounded
        return buffer


# --- The lane ---------------------------------------------------------------------------------------------------------
#
# A hop costs a fraction of a gRPC message. The descriptors of shared memory travel over the same socket, which proves
# that both ends see the same memory. The death of a peer is an end of file.


CHUNK_BYTES: Final = 128 * 1024
MAX_SEGMENTS: Final = 1024
# Room for a window of frames; the kernel may allow less.
SEND_BUFFER_BYTES: Final = 4 * 1024 * 1024
_DESCRIPTOR_BYTES: Final = array.array("i").itemsize
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_DESCRIPTOR_BYTES)


class SocketLink(Link):
    """A link over a connected SEQPACKET socket, which it owns. Used by one thread."""

    def __init__(self, name: str, connection: socket.socket) -> None:
        super().__init__(name)
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._socket = connection
        self._descriptor = connection.fileno()
        self._receive_buffer = bytearray(HEADER_BYTES + CHUNK_BYTES)
        self._receive_buffers = [self._receive_buffer]
        self._receive_view = memoryview(self._receive_buffer)
        self._outgoing: deque[tuple[bytes, memoryview | None, SharedMemory | None]] = deque()
        self._shared: dict[SharedMemory, int] = {}
        self._next_number = 0
        self._mapped: dict[int, SharedMemory] = {}
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
            header, payload, memory = outgoing[0]
            try:
                if memory is not None:
                    socket.send_fds(self._socket, [header], [memory.fileno()])
                elif payload is not None:
                    self._socket.sendmsg((header, payload))
                else:
                    self._socket.send(header)
            except BlockingIOError:
                return False
            except OSError as error:
                outgoing.clear()
                # The peer may have closed the link in good order: its last frames are still to be read.
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
        for memory in self._mapped.values():
            memory.close()
        self._mapped.clear()
        self._shared.clear()
        self._relay.close()

    # --- Sending ------------------------------------------------------------------------------------------------------

    def _queue(self, frame: Frame, payload: memoryview | None = None) -> None:
        self._outgoing.append((frame.header(payload or b""), payload, None))

    def _queue_reference(self, group: int, step: int, payload: Slice) -> None:
        number = self._shared.get(payload.memory)
        if number is None:
            number = self._share(payload.memory)
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

    def _queue_part(self, group: int, step: int, payload: Slice, begin: int, end: int) -> None:
        if end == payload.nbytes:  # a reference names a whole group
            self._queue_reference(group, step, payload)

    def _queue_copy(self, message: Message) -> None:
        if message.memory is None:
            place = self._relay.copy(message)
            # The next link that forwards the message finds it in shared memory.
            message.memory, message.offset = place.memory, place.offset
        if message.is_last:
            whole = Slice(message.memory, message.offset - message.begin, message.group_bytes)
            self._queue_reference(message.group, message.step, whole)

    def _share(self, memory: SharedMemory) -> int:
        """Queues the descriptor of shared memory, and releases of memory that was closed; returns its number."""
        for other in [other for other in self._shared if other.closed]:
            self._queue(Frame(FrameKind.RELEASE, memory=self._shared.pop(other)))
        self._next_number += 1
        number = self._shared[memory] = self._next_number
        header = Frame(FrameKind.SHARE, memory=number, length=memory.nbytes).header()
        self._outgoing.append((header, None, memory))
        return number

    # --- Receiving ----------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        try:
            count, ancillary, flags, _ = self._socket.recvmsg_into(
                self._receive_buffers, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # The peer closed its socket with unread frames. Its own frames are still to be read, then the end of file.
            return True
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from error
        if ancillary:
            self._take_memory(count, ancillary)
            return True
        if count == 0:
            # An end of file, which is in good order only after a CLOSE.
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
            self._take_reference(frame, self._mapped.get(frame.memory))
        elif kind is FrameKind.BYTES or kind is FrameKind.COPY:
            self._take_bytes(frame, payload, lasts=False)
        elif kind is FrameKind.RELEASE:
            memory = self._mapped.pop(frame.memory, None)
            if memory is not None:
                memory.close()
        else:
            self._control(frame)
        return True

    def _take_memory(self, count: int, ancillary: list[tuple[int, int, bytes]]) -> None:
        """Takes a frame with file descriptors; each of them is owned by this link, or closed."""
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % _DESCRIPTOR_BYTES])
        owned = list(descriptors)
        try:
            frame, _ = parse(self._receive_view[:count])
            fits = frame.kind is FrameKind.SHARE and frame.memory not in self._mapped
            if len(owned) != 1 or not fits or len(self._mapped) >= MAX_SEGMENTS:
                raise self._lost("it shared a memory that it may not share")
            self._mapped[frame.memory] = SharedMemory.from_fd(owned.pop(), frame.length)
        except (FrameError, ValueError) as error:
            raise LinkLost(self.name, str(error)) from error
        finally:
            for descriptor in owned:
                os.close(descriptor)
