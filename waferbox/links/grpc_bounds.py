"""What a link on the gRPC lane holds at most at either end, for who plans memory: this file imports no grpc."""

from typing import Final

# A message has one of a group's chunks, or small frames.
CHUNK_BYTES: Final = 1024 * 1024
# Bytes that may wait for gRPC; more than what keeps a link busy, and less than what hurts.
MAX_QUEUED_BYTES: Final = 16 * CHUNK_BYTES
# Copies of a message while gRPC passes it on: what came from the socket, what that is joined to, and the result.
_COPIES_IN_GRPC: Final = 3


def sending_bytes(nbytes: int) -> int:
    """The most that the sending end holds where groups of so many bytes may be sent and not taken."""
    queued = min(nbytes, MAX_QUEUED_BYTES + CHUNK_BYTES)  # a chunk is queued while there is room for any
    return queued + _in_grpc(nbytes)


def receiving_bytes(nbytes: int, largest: int, *, at_once: bool = False) -> int:
    """The most that the receiving end holds where groups of so many bytes may have come and not been taken.

    Args:
        largest: the bytes of the largest group.
        at_once: whether chunks are put together as they come. Else all may wait until a kernel has ended, and freed
            chunks leave no holes that the groups fit which they are put together to.
    """
    chunks = 0 if largest <= CHUNK_BYTES else largest if at_once else nbytes
    return nbytes + chunks + _in_grpc(largest)


def _in_grpc(largest: int) -> int:
    return _COPIES_IN_GRPC * min(largest, CHUNK_BYTES)
