"""Who may look at a page or at figures over HTTP, from beyond this machine: who shows the token of a viewer."""

import base64
import binascii
from typing import Final

from interconnect.security.own_tokens import cluster_secret
from interconnect.security.tokens import Kind

LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
CHALLENGE: Final = ("WWW-Authenticate", 'Basic realm="waferbox: the password is a token of waferbox token --view"')


def may_look(authorization: str) -> bool:
    """Whether the header Authorization of a request shows such a token: as Bearer, or as the password of Basic."""
    scheme, _, shown = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            shown = base64.b64decode(shown, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return False
    elif scheme.lower() != "bearer":
        return False
    caller = cluster_secret().caller(shown)
    return caller is not None and caller.kind in (Kind.VIEWER, Kind.ADMIN)
