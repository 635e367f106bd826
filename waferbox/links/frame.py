"""Frames, the units of transfer on a link: a header of 64 bytes, and for some kinds a payload of raw bytes behind it.

A group is either referred to, where its bytes lie in shared memory that both ends have mapped, or sent as bytes in
chunks. The header has the xxh3 checksums of the payload and of itself.
"""

import struct
from enum import IntEnum
from typing import Final, NamedTuple

import xxhash

# Groups of at most so many bytes travel as bytes on every lane: they cost no more than a reference, and their sender
# may overwrite them at once.
INLINE_BYTES: Final = 32 * 1024

_MAGIC: Final = int.from_bytes(b"WSC1", "little")
_FIELDS: Final = struct.Struct("<IIIIQQQQQ")
_CHECKSUM: Final = struct.Struct("<Q")
_HEADER: Final = struct.Struct(_FIELDS.format + "Q")
HEADER_BYTES: Final = _HEADER.size

_NOTHING: Final = memoryview(b"")

_checksum = xxhash.xxh3_64_intdigest


class FrameKind(IntEnum):
    """The meaning of a frame."""

    HELLO = 1  # the first frame in each direction; its payload proves that the sender has the link's token
    REFERENCE = 2  # a group that lies in shared memory
    BYTES = 3  # a chunk of a group that stays bytes on every link that forwards it
    COPY = 4  # a chunk of a group that is sent as bytes only because this lane cannot refer to it
    SHARE = 5  # shared memory that later references name, with its file descriptor
    RELEASE = 6  # shared memory that no later reference names
    ACK = 7  # everything of the steps up to `step` has been consumed
    CREDIT = 8  # `length` more groups may be sent
    CLOSE = 9  # the sender's last frame


_KINDS: Final = {int(kind): kind for kind in FrameKind}
_WITH_PAYLOAD: Final = frozenset({FrameKind.HELLO, FrameKind.BYTES, FrameKind.COPY})


class FrameError(ConnectionError):
    """Raised for a frame that is damaged or makes no sense: the link cannot be trusted any more."""


class Frame(NamedTuple):
    """The header of a frame.

    Offset and length are those of bytes in the shared memory (REFERENCE), or in the group of `total` bytes (BYTES,
    COPY). A payload of `length` bytes follows the header of HELLO, BYTES and COPY.
    """

    kind: FrameKind
    group: int = 0
    memory: int = 0
    step: int = 0
    offset: int = 0
    length: int = 0
    total: int = 0

    def header(self, payload: "bytes | bytearray | memoryview" = b"") -> bytes:
        """The 64 bytes of the header, with the checksum of the payload that follows it."""
        fields = _FIELDS.pack(_MAGIC, *self, _checksum(payload) if payload else 0)
        return fields + _CHECKSUM.pack(_checksum(fields))


def parse(data: "bytes | bytearray | memoryview") -> tuple[Frame, memoryview]:
    """The frame at the beginning of the data, and its payload.

    Raises:
        FrameError: it is cut off, has another magic number or an unknown kind, or a checksum does not match.
    """
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise FrameError(f"a frame of {len(view)} bytes is shorter than its header")
    magic, number, group, memory, step, offset, length, total, payload_sum, header_sum = _HEADER.unpack_from(view)
    if _checksum(view[: _FIELDS.size]) != header_sum:
        raise FrameError("the checksum of a frame's header does not fit")
    if magic != _MAGIC:
        raise FrameError("a frame of another protocol, or of another version of this one")
    kind = _KINDS.get(number)
    if kind is None:
        raise FrameError(f"a frame of unknown kind {number}")
    if kind not in _WITH_PAYLOAD:
        return Frame(kind, group, memory, step, offset, length, total), _NOTHING
    payload = view[HEADER_BYTES : HEADER_BYTES + length]
    if len(payload) != length:
        raise FrameError(f"a frame has {len(payload)} bytes of its payload of {length}")
    if length and _checksum(payload) != payload_sum:
        raise FrameError("the checksum of a frame's payload does not fit")
    return Frame(kind, group, memory, step, offset, length, total), payload
