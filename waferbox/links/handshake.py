"""The handshake of a new link, on either lane.

Each end proves that it knows the link's token by a keyed hash of the end's name; the token itself is not sent. So a
process that has taken the name of a listener's socket cannot pass for either end.
"""

import hmac
import os
import socket
import struct
from typing import Final

from waferbox.links.frame import HEADER_BYTES, Frame, FrameError, FrameKind, parse

# The largest proof that is accepted, and the largest message with a proof.
MAX_PROOF_BYTES: Final = 1024
MAX_HELLO_BYTES: Final = HEADER_BYTES + MAX_PROOF_BYTES
PROOF_KEY: Final = "wsc-proof"  # in the metadata of a gRPC stream
NAME_KEY: Final = "wsc-name"
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket runs as the user of this process."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.getuid())


def dialler_proof(token: str) -> str:
    """The proof of the dialling end, which also identifies the link to the listener."""
    return _proof(token, "dialler")


def proof_of(hello: bytes) -> str:
    """The proof in a dialler's first message. Raises FrameError."""
    frame, payload = parse(hello)
    if frame.kind is not FrameKind.HELLO:
        raise FrameError("the caller does not introduce itself")
    try:
        return bytes(payload).decode()
    except UnicodeDecodeError as error:
        raise FrameError("the caller's proof is no text") from error


def hello(token: str) -> tuple[bytes, memoryview]:
    """The dialler's first message."""
    return _message(dialler_proof(token))


def is_accepting(answer: bytes, token: str) -> bool:
    """Whether the listener's first message proves that it has the link's token. Raises FrameError."""
    return hmac.compare_digest(proof_of(answer).encode(), _proof(token, "listener").encode())


def acceptance(token: str) -> bytes:
    """The listener's first message, which accepts the link."""
    return b"".join(_message(_proof(token, "listener")))


def _proof(token: str, end: str) -> str:
    return hmac.digest(token.encode(), end.encode(), "sha256").hex()


def _message(proof: str) -> tuple[bytes, memoryview]:
    payload = memoryview(proof.encode())
    return Frame(FrameKind.HELLO, length=len(payload)).header(payload), payload
