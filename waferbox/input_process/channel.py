"""The child's end of the socket to its worker."""

import json
import socket
from typing import Any

MESSAGE_BYTES = 128 * 1024
DIGEST_BYTES = 16
MOST_DIGESTS = 64  # of a batch


class Channel:
    """The child's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def receive(self, kind: str) -> tuple[dict[str, Any], list[int]]:
        """The next message, of this kind, with its file descriptors. SystemExit when the worker is gone."""
        data, descriptors, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 2)
        if not data:
            raise SystemExit(0)
        message = json.loads(data)
        assert message["kind"] == kind, message
        return message, descriptors

    def send_file(self, file_descriptor: int, **message: Any) -> None:
        """Send a message with a file. SystemExit when the worker is gone."""
        try:
            socket.send_fds(self._connection, [json.dumps(message).encode()], [file_descriptor])
        except (BrokenPipeError, ConnectionResetError):
            raise SystemExit(0) from None

    def wait_for_end(self) -> None:
        """Until the worker closes its end. Closing ours with messages unread would take away those under way to it."""
        while self._connection.recv(MESSAGE_BYTES):
            pass

    def send(self, **message: Any) -> None:
        """Send a message. SystemExit when the worker is gone."""
        try:
            self._connection.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            raise SystemExit(0) from None
