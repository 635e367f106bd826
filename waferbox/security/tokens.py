"""Tokens, which name their bearer and prove it by the cluster's secret; and the secret and token of this process."""

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
from waferbox.host.folders import cache_root, check_secret_key, read_secret_key, secret_key
from waferbox.settings import SettingError

# --- Tokens -----------------------------------------------------------------------------------------------------------
#
# A token is `kind:name:...:proof`. The proof is a keyed hash of all before it, so a token is good for what it names and
# for nothing else, and the secret itself never travels.


MAX_TOKEN_CHARACTERS: Final = 1024


class Kind(enum.Enum):
    """The kind of a token's bearer. The comments have the names in the token."""

    NODE = "node"  # a process that registers as a node, or an ingress
    MANAGEMENT = "management"  # the management service
    COORDINATOR = "coordinator"  # a coordinator: its job
    LEASE = "lease"  # a coordinator with a lease: job, registration of the node, number of the lease
    MEMBER = "member"  # a node that works for a job, to the other members: job, member
    JOB = "job"  # a script: its job
    USER = "user"  # a user: the name
    ADMIN = "admin"  # the owner of the cluster
    VIEWER = "viewer"  # a person or program that only reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The bearer of a valid token."""

    kind: Kind
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """The first name, a user or a job; empty if there is none."""
        return self.names[0] if self.names else ""


class ClusterSecret:
    """The secret of one cluster, which makes and checks its tokens. Thread-safe."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def token(self, kind: Kind, *names: str) -> str:
        """The token of a bearer of this kind with these names."""
        text = ":".join((kind.value, *(quote(name, safe="") for name in names)))
        return f"{text}:{self._proof(text)}"

    def caller(self, token: str) -> Caller | None:
        """The bearer of a token; None if the token is not one of this cluster."""
        if len(token) > MAX_TOKEN_CHARACTERS or not token.isascii():
            return None
        text, _, proof = token.rpartition(":")
        if not hmac.compare_digest(proof.encode(), self._proof(text).encode()):
            return None
        kind, *names = text.split(":")
        return Caller(kind=Kind(kind), names=tuple(map(unquote, names)))

    def _proof(self, text: str) -> str:
        return hmac.digest(self._key, text.encode(), "sha256").hex()


# --- The secret and the token of this process -------------------------------------------------------------------------


SECRET_FILE: Final = "cluster.key"


def cluster_secret() -> ClusterSecret:
    """The secret of this user's clusters, for their processes; it is made if there is none. Raises SettingError.

    It lies in the file that WAFERBOX_SECRET_FILE names, or in the cache folder; where that is not writable, in the
    folder for temporary files.
    """
    return ClusterSecret(cluster_secret_key())


def cluster_secret_key() -> bytes:
    """The bytes of that secret, to be copied to other hosts. Raises SettingError."""
    return _kept(_secret_files())[1]


def fix_secret_file() -> None:
    """Makes this process, which owns a cluster, and those that it starts use one file, whatever files there are later.

    Raises SettingError.
    """
    os.environ[settings.SECRET_FILE.name] = str(_kept(_secret_files())[0].absolute())


def known_secret() -> ClusterSecret | None:
    """The secret of this user's clusters, for scripts and commands; None if there is none. Raises SettingError."""
    found = _found(_secret_files())
    return None if found is None else ClusterSecret(found[1])


def without_tokens(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process of the cluster, without the user's token: other processes could read it there."""
    withheld = (settings.TOKEN.name, settings.TOKEN_FILE.name)
    return {name: value for name, value in environment.items() if name not in withheld}


def user_name() -> str:
    """The name of the user of this process; the number in a container without a name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def user_token(address: str, secret_file: str = "") -> str:
    """The token of a script for the cluster at host:port, whose secret may be known; empty if it has none."""
    return _token_of_environment() or _own_token(address, secret_file, Kind.USER)


def command_token(address: str, secret_file: str = "") -> str:
    """The same for a command: the owner's if possible."""
    return _token_of_environment() or _own_token(address, secret_file, Kind.ADMIN)


def own_clusters_token(kind: Kind, secret_file: str = "") -> str:
    """A token for a cluster that this user has started on this machine, whatever token the environment has.

    Args:
        kind: of the bearer, USER or ADMIN.
        secret_file: the file with the cluster's secret; empty: that of the clusters that this process starts.

    Raises:
        SettingError: the file has no secret.
    """
    if not secret_file:
        secret = cluster_secret()
    elif (found := _found((Path(secret_file),))) is not None:
        secret = ClusterSecret(found[1])
    else:
        raise SettingError(
            f"{secret_file} has not the cluster's secret any more, without which the cluster can only be killed: start "
            "another"
        )
    return _token(secret, kind)


def _token(secret: ClusterSecret, kind: Kind) -> str:
    return secret.token(kind, *((user_name(),) if kind is Kind.USER else ()))


def _token_of_environment() -> str:
    """The token that the environment of this process has, or names; empty if there is none."""
    if token := settings.TOKEN.get():
        if not token.isascii():
            raise SettingError(f"{settings.TOKEN.name} is no token: `waferbox token` prints one")
        return token
    if file := settings.TOKEN_FILE.get():
        try:
            return file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"{settings.TOKEN_FILE.name} names {file}, which has no token: {error}") from error
    return ""


def _own_token(address: str, secret_file: str, kind: Kind) -> str:
    """The token for a cluster of this user on this machine; empty if the address is of another machine."""
    if secret_file:
        return own_clusters_token(kind, secret_file)
    # No other machine gets a token of the clusters here, whatever address a script was given.
    secret = known_secret() if is_here(address.rpartition(":")[0].strip("[]")) else None
    return "" if secret is None else _token(secret, kind)


def is_here(host: str) -> bool:
    """Whether a host is this machine, which can listen at its own addresses alone."""
    if host in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except (OSError, UnicodeError):
        return False
    return True


def _found(paths: Sequence[Path]) -> tuple[Path, bytes] | None:
    """The first file that has a key, and the key; None if there is none.

    Raises SettingError: the first file is no key, or others may know it, or may have changed it. Behind it is the
    folder for temporary files, where anybody can put a file, which is no key unless it is this user's alone.
    """
    try:
        check_secret_key(paths[0])
    except OSError as error:
        raise SettingError(str(error)) from error
    keys = ((path, read_secret_key(path)) for path in paths)
    return next(((path, key) for path, key in keys if key is not None), None)


@functools.lru_cache(maxsize=8)
def _kept(paths: Sequence[Path]) -> tuple[Path, bytes]:
    """The first file that has a key, or else the first that can be written, with a new one; and the key."""
    if (found := _found(paths)) is not None:
        return found
    for path in paths[:-1]:
        with contextlib.suppress(OSError):
            return path, secret_key(path)
    try:
        return paths[-1], secret_key(paths[-1])
    except OSError as error:
        raise SettingError(
            f"no secret of the cluster can be made in {paths[-1]}: {error.strerror or error}; "
            f"name another file by {settings.SECRET_FILE.name}"
        ) from error


def _secret_files() -> tuple[Path, ...]:
    """The files that the secret may lie in."""
    if named := settings.SECRET_FILE.get():
        return (named,)
    temporary = Path(tempfile.gettempdir()) / f"waferbox-{os.getuid()}"
    return cache_root() / SECRET_FILE, temporary / SECRET_FILE
