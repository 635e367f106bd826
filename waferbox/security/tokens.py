"""Tokens: text that says who bears it, proved by the cluster's secret; and which secret and which token this process
has.
"""

import contextlib
import enum
import functools
import getpass
import hmac
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from waferbox import settings
from waferbox.host.folders import cache_root, read_secret_key, secret_key

# ----------------------------------------------------------------------------------------------------------------------
# Tokens: text that says who bears it, and proves that it was made by somebody who has the cluster's secret
#
# A token is `kind:name:...:proof`. The proof is a keyed hash of all before it, so a token is good for what it names and
# for nothing else, and the secret itself never travels.


MAX_TOKEN_CHARACTERS: Final = 1024


class Kind(enum.Enum):
    """What the bearer of a token is."""

    NODE = "node"  # a process that registers as a node, or an ingress
    MANAGEMENT = "management"  # the management service
    COORDINATOR = "coordinator"  # of the job that is named
    LEASE = "lease"  # a coordinator that was given a node: job, instance of the node, number of the lease
    MEMBER = "member"  # a node that works for a job, to the others: job, member
    JOB = "job"  # the script whose job is named
    USER = "user"  # the user who is named
    ADMIN = "admin"  # the owner of the cluster
    VIEWER = "viewer"  # somebody who may look, and change nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who bears a valid token."""

    kind: Kind
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """The first of its names: a user or a job; empty where there is none."""
        return self.names[0] if self.names else ""


class ClusterSecret:
    """Makes and checks the tokens of one cluster."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def token(self, kind: Kind, *names: str) -> str:
        """The token of whoever is so and is called so."""
        text = ":".join((kind.value, *(quote(name, safe="") for name in names)))
        return f"{text}:{self._proof(text)}"

    def caller(self, token: str) -> Caller | None:
        """Who bears the token; None if it is not one of this cluster."""
        if len(token) > MAX_TOKEN_CHARACTERS or not token.isascii():
            return None
        text, _, proof = token.rpartition(":")
        if not hmac.compare_digest(proof.encode(), self._proof(text).encode()):
            return None
        kind, *names = text.split(":")
        return Caller(kind=Kind(kind), names=tuple(map(unquote, names)))

    def _proof(self, text: str) -> str:
        return hmac.digest(self._key, text.encode(), "sha256").hex()


# ----------------------------------------------------------------------------------------------------------------------
# Which secret and which token this process has: from its environment, or from a file that its user alone may read


SECRET_FILE: Final = "cluster.key"


def cluster_secret() -> ClusterSecret:
    """The secret of the clusters of this user, for their processes; it is made where there is none. Raises OSError.

    It lies in the file that $WAFERBOX_SECRET_FILE names, or in the cache folder; where that takes nothing, in the
    folder for temporary files.
    """
    return ClusterSecret(cluster_secret_key())


def cluster_secret_key() -> bytes:
    """What that secret is made of, for who takes it to other hosts. Raises OSError."""
    return _kept_key(_places())


def known_secret() -> ClusterSecret | None:
    """The same for users' processes: None where there is none."""
    keys = (read_secret_key(path) for path in _places())
    return next((ClusterSecret(key) for key in keys if key is not None), None)


def without_tokens(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process of the cluster: what a user shows is not for it, and can be read while it runs."""
    withheld = (settings.TOKEN.name, settings.TOKEN_FILE.name)
    return {name: value for name, value in environment.items() if name not in withheld}


def user_name() -> str:
    """Who runs this process, by name; in a container there may be none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def user_token(address: str) -> str:
    """What a script shows the cluster at host:port; empty if it has nothing to show."""
    return _own_token(address, Kind.USER, user_name())


def command_token(address: str) -> str:
    """What a command shows the cluster at host:port, as its owner where it can; empty if it has nothing to show."""
    return _own_token(address, Kind.ADMIN)


def own_clusters_token(kind: Kind) -> str:
    """What is shown to a cluster that this user started here, whatever token he was given for another."""
    return cluster_secret().token(kind, *((user_name(),) if kind is Kind.USER else ()))


def _own_token(address: str, kind: Kind, *names: str) -> str:
    """The token that was given to this process, or else one for a cluster of this machine."""
    if token := settings.TOKEN.get():
        return token
    if file := settings.TOKEN_FILE.get():
        return file.read_text(encoding="ascii").strip()
    # Nobody elsewhere is shown a token of the clusters here, whatever address a script was given.
    secret = known_secret() if is_here(address.rpartition(":")[0].strip("[]")) else None
    return "" if secret is None else secret.token(kind, *names)


def is_here(host: str) -> bool:
    """Whether a host is this machine: its address can be listened at."""
    if host in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except (OSError, UnicodeError):
        return False
    return True


@functools.lru_cache(maxsize=8)
def _kept_key(places: Sequence[Path]) -> bytes:
    for path in places:
        if (key := read_secret_key(path)) is not None:
            return key
    for path in places[:-1]:
        with contextlib.suppress(OSError):
            return secret_key(path)
    return secret_key(places[-1])


def _places() -> tuple[Path, ...]:
    """Where the secret may lie: the first that has it, or else that takes it."""
    if named := settings.SECRET_FILE.get():
        return (named,)
    temporary = Path(tempfile.gettempdir()) / f"waferbox-{os.getuid()}"
    return cache_root() / SECRET_FILE, temporary / SECRET_FILE
