"""Links of the data path, on whichever lane: messages in, messages out, and the windows that bound both.

The two lanes are `socket_lane`, within a host, and `grpc_lane`, between hosts.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from waferbox.links.frame import INLINE_BYTES, Frame, FrameError, FrameKind
from waferbox.links.shared_memory import SharedMemory, Slice, view_as_tensor

if TYPE_CHECKING:
    import torch

# Bound of a send: credit that the receiver grants, in groups, or the receiver's acknowledgements of steps.
Window: TypeAlias = Literal["credit", "ack"]

# The largest group that is accepted before `expect` has named the sizes.
UNEXPECTED_BYTES: Final = 64 * 1024 * 1024

# Bounds of the messages that a link holds for its receiver. Both exceed every window, so a correct peer meets neither.
MIN_HELD_BYTES: Final = 1024 * 1024 * 1024
HELD_STEPS: Final = 64
# The memory of a message beside its payload: a peer can also send many empty ones.
_MESSAGE_BYTES: Final = 256


class LinkLost(ConnectionError):
    """Raised where the peer has died or closed the link, or sends what cannot be trusted."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"the link to {peer} is lost: {reason}")
        self.peer = peer


@dataclass(slots=True, eq=False)
class Message:
    """A group of one step, whole or a chunk of it, which either lies in shared memory or has arrived as bytes."""

    link: "Link"
    group: int
    step: int
    nbytes: int
    memory: SharedMemory | None = None
    offset: int = 0
    payload: memoryview | None = None
    stays_bytes: bool = False  # on every link that forwards it, since its sender overwrites the group at once
    begin: int = 0  # of a chunk, in its group
    total: int | None = None  # bytes of the group of which this is a chunk; None: it is a whole group

    @property
    def group_bytes(self) -> int:
        """The bytes of the whole group."""
        return self.nbytes if self.total is None else self.total

    @property
    def end(self) -> int:
        """Where the bytes of this message end, in the group."""
        return self.begin + self.nbytes

    @property
    def is_last(self) -> bool:
        """Whether the group ends with it."""
        return self.end == self.group_bytes

    @property
    def view(self) -> memoryview:
        """The bytes of the message."""
        if self.memory is not None:
            return self.memory.view(self.offset, self.nbytes)
        assert self.payload is not None
        return self.payload

    def tensor(self, dtype: "torch.dtype", shape: tuple[int, ...], offset: int) -> "torch.Tensor":
        """A tensor that views the bytes of the message, from `offset` bytes after its start."""
        if self.memory is not None and self.memory.whole:
            return self.memory.tensor(dtype, shape, self.offset + offset)
        return view_as_tensor(self.view, dtype, shape, offset)


class Link(ABC):
    """A link to the process called `name`. Used by one thread, which is its hub's.

    No method but `close` blocks; waiting is the hub's work. Methods raise LinkLost where the link has broken.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.inbox: deque[Message] = deque()
        self.acked_step = 0
        self.granted = 0  # groups that the peer has granted in all
        self.received_bytes = 0  # of groups, those by reference included
        self.sent_bytes = 0  # likewise
        self.ended = False  # the peer has closed the link in good order
        self._credited = 0  # groups sent against credit
        self._credit_limit: int | None = None
        self._ahead_limit: int | None = None
        self._unacked: deque[int] = deque()
        self._expected: Mapping[int, int] | None = None
        self._held_bytes = 0  # of the messages in the inbox
        self._max_held_bytes = MIN_HELD_BYTES
        self._assembling: dict[int, tuple[bytearray, int]] = {}  # group -> its bytes, and how many have arrived
        self._by_chunk: Collection[int] = frozenset()  # the groups whose chunks are messages of their own
        self._arrived: dict[int, int] = {}  # of these, how many bytes have arrived

    # --- Provided by a lane -------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def lane(self) -> str:
        """ "shared memory" or "grpc"."""

    @property
    @abstractmethod
    def blocked(self) -> bool:
        """Whether frames wait until the descriptor is writable, when `flush` sends them."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has work."""

    @abstractmethod
    def poll(self) -> bool:
        """Takes in one or more frames that have arrived, without waiting.

        Returns:
            False if nothing has happened on the link.

        Raises:
            LinkLost: the peer is gone, and has not closed the link.
        """

    @abstractmethod
    def flush(self) -> bool:
        """Sends the frames that wait, without waiting itself.

        Returns:
            False where the sender has to wait, since frames are left.

        Raises:
            LinkLost: the peer takes nothing any more.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the link in good order, and frees its resources. Further calls have no effect."""

    @abstractmethod
    def _queue(self, frame: Frame, payload: memoryview | None = None) -> None:
        """Adds a frame to those that wait to be sent."""

    @abstractmethod
    def _queue_reference(self, group: int, step: int, payload: Slice) -> None:
        """Adds a group that lies in shared memory."""

    @abstractmethod
    def _queue_bytes(self, kind: FrameKind, group: int, step: int, payload: memoryview) -> None:
        """Adds a group as chunks of this kind, BYTES or COPY."""

    @abstractmethod
    def _queue_part(self, group: int, step: int, payload: Slice, begin: int, end: int) -> None:
        """Adds a part of a group that lies in shared memory; parts are added from the first to the last."""

    @abstractmethod
    def _queue_copy(self, message: Message) -> None:
        """Adds a group, or a chunk of one, that arrived as bytes, in the cheapest form of the lane."""

    # --- Sending ------------------------------------------------------------------------------------------------------

    def limit_credit(self, groups: int) -> None:
        """Bounds the groups that are sent with window "credit" and that the peer has not granted back."""
        self._credit_limit = groups

    @property
    def not_taken(self) -> int:
        """Groups, or steps, sent within a window that the peer has not granted back or acknowledged."""
        sent = 0 if self._credit_limit is None else self._credited - self.granted
        return sent + len(self._unacked)

    def limit_ahead(self, steps: int) -> None:
        """Bounds the steps whose groups are sent with window "ack" and that the peer has not acknowledged."""
        self._ahead_limit = steps

    def may_send(self, step: int, window: Window | None) -> bool:
        """Whether the window is open."""
        if window == "credit":
            return self._credit_limit is None or self._credited - self.granted < self._credit_limit
        if window == "ack" and self._ahead_limit is not None:
            while self._unacked and self._unacked[0] <= self.acked_step:
                self._unacked.popleft()
            begun = bool(self._unacked) and self._unacked[-1] == step
            return begun or len(self._unacked) < self._ahead_limit
        return True

    def post(self, group: int, step: int, payload: Slice, *, window: Window | None, as_bytes: bool) -> None:
        """Adds a group to those that wait to be sent; `may_send` must be true. `as_bytes`: as of `Hub.send`."""
        self._count(step, window)
        self.sent_bytes += payload.nbytes
        if as_bytes or payload.nbytes <= INLINE_BYTES:
            self._queue_bytes(FrameKind.BYTES, group, step, payload.view)
        else:
            self._queue_reference(group, step, payload)

    def post_part(self, group: int, step: int, payload: Slice, begin: int, end: int) -> None:
        """Adds a part of a group, of more than INLINE_BYTES, that is ready before the others: these bytes of `payload`.

        A group has no window then. Its parts are added from the first to the last.
        """
        self.sent_bytes += end - begin
        self._queue_part(group, step, payload, begin, end)

    def post_message(self, message: Message, *, window: Window | None) -> None:
        """Adds a message of another link, by reference where this lane can and the message may be, else as bytes."""
        self._count(message.step, window)
        self.sent_bytes += message.nbytes
        if message.total is not None:
            self._queue_copy(message)
        elif message.memory is not None:
            self._queue_reference(message.group, message.step, Slice(message.memory, message.offset, message.nbytes))
        elif message.stays_bytes or message.nbytes <= INLINE_BYTES:
            self._queue_bytes(FrameKind.BYTES, message.group, message.step, message.view)
        else:
            self._queue_copy(message)

    def ack(self, step: int) -> None:
        """Acknowledges that everything of the steps up to this one has been consumed."""
        self._send_control(Frame(FrameKind.ACK, step=step))

    def grant(self, groups: int) -> None:
        """Lets the peer send so many more groups."""
        self._send_control(Frame(FrameKind.CREDIT, length=groups))

    def _send_control(self, frame: Frame) -> None:
        """Sends a frame about received groups, unless the peer has ended the link."""
        if self.ended:
            return
        self._queue(frame)
        try:
            self.flush()
        except LinkLost:
            if not self.ended:
                raise

    def _count(self, step: int, window: Window | None) -> None:
        if window == "credit":
            self._credited += 1
        elif window == "ack" and (not self._unacked or self._unacked[-1] != step):
            self._unacked.append(step)

    # --- Receiving ----------------------------------------------------------------------------------------------------

    def expect(self, sizes: Mapping[int, int], *, steps: int = HELD_STEPS) -> None:
        """Refuses from now on the bytes of other groups, and of these groups in other sizes.

        Args:
            sizes: bytes of each group, by its number.
            steps: most steps of which groups may be in the inbox at once.
        """
        self._expected = sizes
        self._max_held_bytes = max(MIN_HELD_BYTES, steps * sum(sizes.values()))

    def pass_chunks(self, groups: Collection[int]) -> None:
        """Makes a message of each chunk of these groups, as it arrives; only whole groups are messages otherwise."""
        self._by_chunk = groups

    def take(self, index: int = 0) -> Message:
        """Removes a message from the inbox and returns it."""
        message = self.inbox[index]
        del self.inbox[index]
        self._held_bytes -= _MESSAGE_BYTES if message.payload is None else _MESSAGE_BYTES + message.nbytes
        return message

    def _keep(self, message: Message) -> None:
        """Puts a message into the inbox. Raises LinkLost where the inbox then exceeds its bound."""
        self._held_bytes += _MESSAGE_BYTES if message.payload is None else _MESSAGE_BYTES + message.nbytes
        if self._held_bytes > self._max_held_bytes:
            raise self._lost(f"it sent more than its windows allow: {self._held_bytes:,} bytes wait here already")
        self.inbox.append(message)

    def _lost(self, reason: str) -> LinkLost:
        return LinkLost(self.name, "it has closed the link" if self.ended else reason)

    def _damaged(self, error: FrameError) -> LinkLost:
        return LinkLost(self.name, str(error))

    def _control(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.ACK:
                self.acked_step = max(self.acked_step, frame.step)
            case FrameKind.CREDIT:
                self.granted += frame.length
            case FrameKind.CLOSE:
                self.ended = True
            case kind:
                raise self._lost(f"it sent an unexpected frame of kind {kind.name}")

    def _take_bytes(self, frame: Frame, payload: memoryview, *, lasts: bool) -> None:
        """Takes a chunk, which is a whole group or a part of one. lasts: whether the payload's memory stays valid."""
        kind, group, _, step, offset, length, total = frame
        self._check_chunk(group, offset, length, total)
        self.received_bytes += length
        stays_bytes = kind is FrameKind.BYTES
        if length == total or group in self._by_chunk:
            if not lasts:
                payload = memoryview(bytearray(payload))
            message = Message(self, group, step, length, payload=payload, stays_bytes=stays_bytes)
            if length < total:
                message.begin, message.total = offset, total
                self._check_order(message)
            self._keep(message)
            return
        buffer, filled = self._assembling.get(group, (None, 0))
        if offset != filled or length == 0:
            raise self._lost(f"a chunk of group {group} is missing")
        if buffer is None:
            buffer = bytearray(total)
        elif len(buffer) != total:
            raise self._lost(f"the chunks of group {group} have different totals")
        buffer[filled : filled + length] = payload
        filled += length
        if filled < total:
            self._assembling[group] = (buffer, filled)
            return
        del self._assembling[group]
        self._keep(Message(self, group, step, total, payload=memoryview(buffer), stays_bytes=stays_bytes))

    def _check_order(self, chunk: Message) -> None:
        """Checks that a chunk follows the one before. All have the total that is expected of the group."""
        if chunk.begin != self._arrived.get(chunk.group, 0) or chunk.nbytes == 0:
            raise self._lost(f"a chunk of group {chunk.group} is missing")
        self._arrived[chunk.group] = 0 if chunk.is_last else chunk.end

    def _check_chunk(self, group: int, offset: int, length: int, total: int) -> None:
        allowed = UNEXPECTED_BYTES if self._expected is None else self._expected.get(group, -1)
        if total > allowed or (total < allowed and self._expected is not None):
            raise self._lost(f"it sent group {group} with {total} bytes, which is not expected")
        if offset + length > total:
            raise self._lost(f"a chunk of group {group} does not lie in it")

    def _take_reference(self, frame: Frame, memory: SharedMemory | None) -> None:
        if memory is None or frame.offset + frame.length > memory.nbytes:
            raise self._lost(f"a reference to group {frame.group} lies in no memory that was shared")
        self.received_bytes += frame.length
        self._keep(Message(self, frame.group, frame.step, frame.length, memory, frame.offset))
