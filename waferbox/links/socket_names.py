"""The names of the sockets of links within a host.

Processes of one network namespace find each other by abstract names, which leave no file behind. Containers of one host
have namespaces of their own: they find each other by files in a folder that all of them see, a volume in memory, which
WAFERBOX_SOCKETS names. The next process that listens there removes the files of processes that were killed.
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
YOUNG_SECONDS: Final = 5.0  # for which a socket with a name may refuse connections, as its process is about to listen
_PREFIX: Final = "waferbox-"


class UnusableFolderError(OSError):
    """Raised where no socket can have its name in the folder; the message has the reason and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketDirectory:
    """The folder, or the abstract namespace, in which sockets have names.

    Attributes:
        host: equal for two processes exactly if they can use each other's sockets.
        folder: the folder; None for abstract names.
    """

    host: str
    folder: Path | None

    def address(self, name: str) -> str:
        """The address of a socket for the kernel. A peer sends the name, which must not lead out of the folder."""
        return f"\0{name}" if self.folder is None else str(self.folder / Path(name).name)


def host_id() -> str:
    """An identity that processes share exactly if they can use each other's abstract sockets.

    It is of the host, the user and the network namespace.

    Raises:
        FileNotFoundError: /proc is not mounted.
    """
    try:
        namespace = os.stat("/proc/self/ns/net").st_ino
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"/proc must be mounted (`mount -t proc proc /proc`): {error.filename}, which identifies the network "
            "namespace of this process, is not there"
        ) from error
    return _hashed(f"{namespace}")


def own_directory() -> SocketDirectory:
    """The directory in which this process looks for the sockets of others: the folder, if there is one."""
    folder = settings.SOCKETS.get()
    if folder:
        with contextlib.suppress(OSError):
            status = os.stat(folder)
            # The kernel's identity of the folder: its path may differ between containers.
            return SocketDirectory(host=_hashed(f"folder {status.st_dev} {status.st_ino}"), folder=folder)
    return SocketDirectory(host=host_id(), folder=None)


def _hashed(shared: str) -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(f"{boot}/{os.getuid()}/{shared}".encode()).hexdigest()[:16]


class NamedSocket:
    """A listening socket with a name that cannot be guessed. Used by one thread."""

    def __init__(self) -> None:
        """Listens, under an abstract name where the folder that WAFERBOX_SOCKETS names cannot be used."""
        self.name = f"{_PREFIX}{secrets.token_hex(16)}"
        try:
            self.directory, self.socket = _listen_in_folder(self.name)
        except UnusableFolderError as error:
            logger.warning("Links between containers of this host take gRPC: %s", error)
            self.directory = SocketDirectory(host=host_id(), folder=None)
            self.socket = _listen(self.directory.address(self.name))

    def close(self) -> None:
        """Closes the socket and removes its name."""
        if self.directory.folder is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.directory.address(self.name))
        self.socket.close()


def _listen_in_folder(name: str) -> tuple[SocketDirectory, socket.socket]:
    """A listening socket in the folder, or with an abstract name if there is none. Raises UnusableFolderError."""
    directory = own_directory()
    named = settings.SOCKETS.get()
    if directory.folder is None and named:
        raise UnusableFolderError(
            f"{settings.SOCKETS.name} names {named}, which is not there; mount it in every container"
        )
    if directory.folder is None:
        return directory, _listen(directory.address(name))
    try:
        status = os.stat(directory.folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise UnusableFolderError(
                f"{directory.folder}, which {settings.SOCKETS.name} names, must be a folder of user {os.getuid()} that "
                "nobody else may open (mode 0700)"
            )
        _remove_left_sockets(directory.folder)
        return directory, _listen(directory.address(name))
    except UnusableFolderError:
        raise
    except OSError as error:
        raise UnusableFolderError(f"no socket can be made in {directory.folder}: {error}") from error


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
    """Removes the sockets of dead processes, to which the kernel refuses connections."""
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)
            if time.time() - path.lstat().st_mtime < YOUNG_SECONDS:
                continue
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
