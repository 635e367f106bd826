"""The management service and the vendor gateway of a cluster: supervised processes that announce their addresses."""

import contextlib
import dataclasses
import json
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from waferbox.cluster.launcher import Launcher, Process
from waferbox.cluster.supervised_process import SupervisedProcess
from waferbox.host.descriptors import readable
from waferbox.roles import MANAGEMENT, VENDOR_GATEWAY
from waferbox.rpc.address import split_address


class _OwnerSocket:
    """A socket in which a process announces its addresses by lines of JSON, and sees the end of its owner.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self.reader: socket.SocketIO | None = None  # None before the first start, and after `close`
        self._ours: socket.socket | None = None

    def start(self, launcher: Launcher, module: str, arguments: Sequence[str]) -> Process:
        """Starts a process with a new socket. Raises SpawnError."""
        self.close()
        self._ours, theirs = socket.socketpair()
        self.reader = self._ours.makefile("rb", buffering=0)
        with theirs:  # closed, so that the lines end with the process
            return launcher.start(module, [*arguments, "--announce-fd", "3"], [theirs.fileno()])

    def request_end(self) -> None:
        """Shows the process the end of its owner; its lines can still be read."""
        if self._ours is not None:
            with contextlib.suppress(OSError):  # the process has ended
                self._ours.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self._ours is not None and self.reader is not None:
            self.reader.close()
            self._ours.close()
            self.reader = self._ours = None


# --- The management service -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManagementSettings:
    """The options of a management service; a port of 0 is any free port."""

    listen: str
    page: str | None  # host:port; None: nowhere
    next_free: bool  # if the port of `listen` is taken, the next one that is free is used
    page_next_free: bool  # the same of the port of `page`
    metrics_port: int | None  # None: nowhere
    cache_root: str | None
    compile_root: str | None

    def arguments(self) -> Sequence[str]:
        given = {
            "--listen": self.listen,
            "--page": self.page,
            "--metrics-port": self.metrics_port,
            "--cache-root": self.cache_root,
            "--compile-root": self.compile_root,
        }
        words = [word for option, value in given.items() if value is not None for word in (option, str(value))]
        switches = {"--next-free": self.next_free, "--page-next-free": self.page_next_free}
        return [*words, *(option for option, is_on in switches.items() if is_on)]


class ManagementProcess:
    """The management service. It announces its addresses, and an orderly end, by lines of JSON in a socket.

    A restarted service gets the addresses of the first. Not thread-safe.
    """

    def __init__(self, launcher: Launcher, settings: ManagementSettings) -> None:
        """Starts the service. Raises SpawnError."""
        self._launcher = launcher
        self._settings = settings
        self.address = ""  # empty until the service has announced it
        self.page = ""  # URL
        self.is_over = False  # the service has announced an orderly end
        self._socket = _OwnerSocket()
        self.supervised = SupervisedProcess(MANAGEMENT.module, self._start)

    def event_sources(self) -> Sequence[socket.SocketIO | Process]:
        """The objects that become readable when restart_if_ended has work to do."""
        process = self.supervised.process
        return [*self._readers(), *([] if process is None else [process])]

    def restart_if_ended(self) -> Sequence[str]:
        """Reads announcements, and restarts the service if it has died; returns messages for the user."""
        process = self.supervised.process
        is_running = process is not None and process.poll() is None
        # After the poll: an ended process has written all its announcements.
        self.read_announcements()
        return [] if is_running or self.is_over else self.supervised.restart_if_ended()

    def read_announcements(self) -> None:
        """Reads all announcements that were written until now."""
        while readable(self._readers(), 0.0):
            self._read()

    def end(self, seconds: float) -> None:
        """Ends the service and all jobs; returns when the jobs have ended, or after so many seconds."""
        if self.supervised.process is None:
            return
        self._socket.request_end()  # a signal would leave the jobs to a restarted service
        deadline = time.monotonic() + seconds
        # The socket is closed when the service has ended without an announcement.
        while self._socket.reader is not None and not self.is_over:
            if not readable([self._socket.reader], max(0.0, deadline - time.monotonic())):
                return
            self._read()

    def close(self) -> None:
        """Ends the service if it still runs, and closes the socket."""
        self.supervised.close()
        self._socket.close()

    def _readers(self) -> Sequence[socket.SocketIO]:
        return [] if self._socket.reader is None else [self._socket.reader]

    def _read(self) -> None:
        """Reads the next line."""
        assert self._socket.reader is not None
        line = self._socket.reader.readline()
        if not line:
            self._socket.close()
            return
        announced = json.loads(line)
        if "ended" in announced:
            self.is_over = True
        else:
            self._note_addresses(announced["management"], announced["page"], announced["metrics"])

    def _note_addresses(self, address: str, page: str, metrics: str) -> None:
        """Puts the announced ports into the settings, for restarts."""
        self.address, self.page = address, page
        old = self._settings
        self._settings = dataclasses.replace(
            old,
            listen=_with_port(old.listen, address),
            page=None if old.page is None else _with_port(old.page, urlsplit(page).netloc),
            next_free=False,
            page_next_free=False,
            metrics_port=split_address(metrics)[1] if metrics else None,
        )

    def _start(self) -> Process:
        return self._socket.start(self._launcher, MANAGEMENT.module, self._settings.arguments())


def _with_port(listen: str, address: str) -> str:
    """The host of `listen` with the port of `address`."""
    return f"{split_address(listen, any_port=True)[0]}:{split_address(address)[1]}"


# --- The vendor gateway -----------------------------------------------------------------------------------------------


class VendorGatewayProcess:
    """The vendor gateway, which announces its address by a line of JSON in a socket. Not thread-safe."""

    def __init__(self, launcher: Launcher, management: str, interpreter: str) -> None:
        """Starts the gateway.

        Args:
            launcher: starts it.
            management: the address of the management service.
            interpreter: the Python of the environment of the vendor's client.

        Raises:
            SpawnError: the process cannot be started.
        """
        self._launcher = launcher
        self._management = management
        self._interpreter = interpreter
        self._listen = "127.0.0.1:0"
        self._socket = _OwnerSocket()
        self._config: Path | None = None
        self.supervised = SupervisedProcess(VENDOR_GATEWAY.module, self._start)

    def read_address(self, seconds: float) -> str:
        """Waits for the address of the gateway, which restarts keep; empty if it is not announced in time."""
        process, reader = self.supervised.process, self._socket.reader
        assert reader is not None
        assert process is not None
        if not readable([reader, process], seconds) or not (line := reader.readline()):
            return ""
        self._listen = str(json.loads(line)["address"])
        return self._listen

    def write_config(self) -> Path:
        """Writes a file for CSCONFIG_PATH of the vendor's client. Raises OSError."""
        # The client needs no certificate for a cluster without namespaces, and does not check that localhost is up.
        server = f"localhost:{self._listen.rpartition(':')[2]}"
        cluster = {"name": "waferbox", "server": server, "authority": server, "namespaces": []}
        context = {"name": "waferbox", "cluster": "waferbox"}
        described = {"currentContext": "waferbox", "contexts": [context], "clusters": [cluster]}
        descriptor, name = tempfile.mkstemp(prefix="waferbox-", suffix=".csconfig")
        self._config = Path(name)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(described, file, indent=1)
        return self._config

    def close(self) -> None:
        """Ends the gateway, and removes its file."""
        self.supervised.close()
        self._socket.close()
        if self._config is not None:
            self._config.unlink(missing_ok=True)

    def _start(self) -> Process:
        arguments = ["--management", self._management, "--listen", self._listen, "--input-python", self._interpreter]
        return self._socket.start(self._launcher, VENDOR_GATEWAY.module, arguments)
