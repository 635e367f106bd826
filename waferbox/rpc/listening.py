"""What listens at an address where no server of the cluster answers."""

import socket

from waferbox import deadlines, settings
from waferbox.rpc.address import split_address


def open_connection(address: str) -> socket.socket:
    """Returns a connection to the process that listens at host:port. Raises OSError."""
    host, port = split_address(address)
    return socket.create_connection((host.strip("[]"), port), deadlines.JOB_CREATION.connect)


def other_listener(address: str, what: str) -> str:
    """Returns what to do if a process listens at an address and does not answer as it should; empty: none listens.

    what: the kind of the server that should answer.
    """
    try:
        open_connection(address).close()
    except OSError:
        return ""
    return (
        f"what listens at {address} does not answer as a {what} does: check the port, which `waferbox up` printed (the "
        f"page has another); if the cluster uses TLS, {settings.TLS_DIR.name} must name a folder with its "
        "certificates, and else none"
    )
