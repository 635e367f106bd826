"""The most memory that either end of a link on the gRPC lane holds. The compiler plans with it, without gRPC."""

from typing import Final

# A message has one chunk of a group, or several small frames.
CHUNK_BYTES: Final = 1024 * 1024
# Bytes that may wait for gRPC: enough to keep a link busy, and little in the memory of a process.
MAX_QUEUED_BYTES: Final = 16 * CHUNK_BYTES
# Copies of a message within gRPC: the pieces from the socket, the joined message, and the bytes that Python gets.
_COPIES_IN_GRPC: Final = 3


def sending_bytes(nbytes: int) -> int:
    """The most bytes that the sending end holds, where groups of `nbytes` in all may be sent and not taken."""
    queued = min(nbytes, MAX_QUEUED_BYTES + CHUNK_BYTES)  # a chunk is queued while there is room for any
    return queued + _in_grpc(nbytes)


def receiving_bytes(nbytes: int, largest: int, *, at_once: bool = False) -> int:
    """The most bytes that the receiving end holds, where groups of `nbytes` in all may have come and not been taken.

    Args:
        nbytes: bytes of these groups.
        largest: bytes of the largest group.
        at_once: whether chunks are joined as they arrive. Otherwise all chunks may wait for the end of a kernel, and
            the memory of freed chunks does not fit the groups that are joined from them.
    """
    chunks = 0 if largest <= CHUNK_BYTES else largest if at_once else nbytes
    return nbytes + chunks + _in_grpc(largest)


def _in_grpc(largest: int) -> int:
    return _COPIES_IN_GRPC * min(largest, CHUNK_BYTES)
