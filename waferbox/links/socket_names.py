"""Where the sockets of links within a host have their names.

Processes of one network namespace find each other by abstract names, which leave no file behind. Containers of one host
have namespaces of their own: they find each other by files in a folder that all of them see, a volume in memory, where
WAFERBOX_SOCKETS names one. What a process leaves there that is killed, the next one to listen removes.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from waferbox import settings

logger = logging.getLogger(__name__)

BACKLOG: Final = 1024
YOUNG_SECONDS: Final = 5.0  # for which a socket may have a name already and refuse, as its process is about to listen
_PREFIX: Final = "waferbox-"


class UnusableFolderError(OSError):
    """No socket can have its name in the folder; the message says why, and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketDirectory:
    """Where sockets have names. host: equal for two processes exactly if they can use each other's."""

    host: str
    folder: Path | None  # None: names are abstract

    def address(self, name: str) -> str:
        """Of the socket of this name, as the kernel takes it; a name does not lead out of the folder."""
        return f"\0{name}" if self.folder is None else str(self.folder / Path(name).name)


def host_id() -> str:
    """Equal for two processes exactly if they can use each other's abstract sockets: host, user, network namespace."""
    return _hashed(f"{os.stat('/proc/self/ns/net').st_ino}")


def own_place() -> SocketDirectory:
    """Where this process looks for the sockets of others: in the folder, if there is one."""
    folder = settings.SOCKETS.get()
    if folder:
        with contextlib.suppress(OSError):
            status = os.stat(folder)
            # What the kernel knows the folder by, whatever it is called in each container.
            return SocketDirectory(host=_hashed(f"folder {status.st_dev} {status.st_ino}"), folder=folder)
    return SocketDirectory(host=host_id(), folder=None)


def _hashed(shared: str) -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(f"{boot}/{os.getuid()}/{shared}".encode()).hexdigest()[:16]


class NamedSocket:
    """A socket that listens, under a name that nobody can guess. `close` takes the name away too."""

    def __init__(self) -> None:
        """Where WAFERBOX_SOCKETS names a folder that cannot be used that is logged, and the name is an abstract one."""
        self.name = f"{_PREFIX}{secrets.token_hex(16)}"
        try:
            self.place, self.socket = _listen_in_folder(self.name)
        except UnusableFolderError as error:
            logger.warning("links between containers of this host take gRPC: %s", error)
            self.place = SocketDirectory(host=host_id(), folder=None)
            self.socket = _listen(self.place.address(self.name))

    def close(self) -> None:
        """Nobody can connect any more."""
        if self.place.folder is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.place.address(self.name))
        self.socket.close()


def _listen_in_folder(name: str) -> tuple[SocketDirectory, socket.socket]:
    """Likewise with an abstract name where no folder is named. Raises UnusableFolderError."""
    place = own_place()
    named = settings.SOCKETS.get()
    if place.folder is None and named:
        raise UnusableFolderError(
            f"{settings.SOCKETS.name} names {named}, which is not there; mount it in every container"
        )
    if place.folder is None:
        return place, _listen(place.address(name))
    try:
        status = os.stat(place.folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise UnusableFolderError(
                f"{place.folder}, which {settings.SOCKETS.name} names, must be a folder of user {os.getuid()} that "
                "nobody else may open (mode 0700)"
            )
        _remove_left_sockets(place.folder)
        return place, _listen(place.address(name))
    except UnusableFolderError:
        raise
    except OSError as error:
        raise UnusableFolderError(f"no socket can be made in {place.folder}: {error}") from error


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_left_sockets(folder: Path) -> None:
    """Of processes that are gone: the kernel refuses connections where nobody listens."""
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)
            if time.time() - path.lstat().st_mtime < YOUNG_SECONDS:
                continue
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
