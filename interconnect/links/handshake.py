"""What the two ends of a link that is about to be opened show each other, on either lane."""

import hashlib
import os
from pathlib import Path
from typing import Final

from interconnect.links.frame import HEADER_BYTES, Frame, FrameError, FrameKind, parse

# The largest token that is taken, and the message that brings one.
MAX_TOKEN_BYTES: Final = 1024
MAX_HELLO_BYTES: Final = HEADER_BYTES + MAX_TOKEN_BYTES
TOKEN_KEY: Final = "wsc-token"  # in the metadata of a gRPC stream
NAME_KEY: Final = "wsc-name"


def host_id() -> str:
    """Equal for two processes exactly if they can use each other's abstract sockets: host, user, network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    namespace = os.stat("/proc/self/ns/net").st_ino
    return hashlib.sha256(f"{boot}/{os.getuid()}/{namespace}".encode()).hexdigest()[:16]


def token_of(hello: bytes) -> str:
    """The token in a dialler's first message. Raises FrameError."""
    frame, payload = parse(hello)
    if frame.kind is not FrameKind.HELLO:
        raise FrameError("the caller does not introduce itself")
    try:
        return bytes(payload).decode()
    except UnicodeDecodeError as error:
        raise FrameError("the caller's token is no text") from error


def is_welcome(answer: bytes) -> bool:
    """Whether the listener's first message says that it takes the link. Raises FrameError."""
    return parse(answer)[0].kind is FrameKind.HELLO


def welcome() -> bytes:
    """The listener's first message."""
    return Frame(FrameKind.HELLO).header()
