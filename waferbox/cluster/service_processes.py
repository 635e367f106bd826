"""The management service and the vendor gateway of a cluster as its owner sees them: where they are, and that they
stay there.
"""

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from waferbox.cluster.launcher import Launcher, Process
from waferbox.cluster.supervised_process import SupervisedProcess
from waferbox.host.descriptors import readable
from waferbox.roles import MANAGEMENT
from waferbox.rpc.address import split_address

# ----------------------------------------------------------------------------------------------------------------------
# The management service of a cluster as its owner sees it: where it is, that it stays there, and when it is over


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManagementSettings:
    """What a management service is told; ports may be 0, for any."""

    listen: str
    page: str | None  # host:port; None: nowhere
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
        return [word for option, value in given.items() if value is not None for word in (option, str(value))]


class ManagementProcess:
    """A place for the service. It says where it is and that it ends in good order by lines of JSON in a pipe."""

    def __init__(self, launcher: Launcher, settings: ManagementSettings) -> None:
        """Start it. Raises SpawnError."""
        self._launcher = launcher
        self._settings = settings
        self.address = ""  # this and the page's, as a URL, once it has said so
        self.page = ""
        self.is_over = False  # it was told to end
        self._pipe: IO[bytes] | None = None
        self.place = SupervisedProcess("appliance", self._start)

    def waited_for(self) -> Sequence[IO[bytes] | Process]:
        """What becomes readable when there is something to restart_if_ended to."""
        process = self.place.process
        return [*self._pipes(), *([] if process is None else [process])]

    def restart_if_ended(self) -> Sequence[str]:
        """Take in what it has said, and start it again if it has died; returns what users should be told."""
        process = self.place.process
        is_running = process is not None and process.poll() is None
        self.take_in()  # all that it said before its end
        return [] if is_running or self.is_over else self.place.restart_if_ended()

    def take_in(self) -> None:
        """What it has said until now."""
        while readable(self._pipes(), 0.0):
            self._read()

    def end(self, seconds: float) -> None:
        """Have it end all jobs and itself; returns when the jobs have ended, or after so many seconds."""
        if self.place.process is None:
            return
        self.place.process.terminate()
        deadline = time.monotonic() + seconds
        # Without a pipe it has ended otherwise, and says no more.
        while self._pipe is not None and not self.is_over:
            if not readable([self._pipe], max(0.0, deadline - time.monotonic())):
                return
            self._read()

    def close(self) -> None:
        """End it, if it has not ended, and forget it."""
        self.place.close()
        self._close_pipe()

    def _pipes(self) -> Sequence[IO[bytes]]:
        return [] if self._pipe is None else [self._pipe]

    def _read(self) -> None:
        """The next line."""
        assert self._pipe is not None
        line = self._pipe.readline()
        if not line:
            self._close_pipe()
            return
        told = json.loads(line)
        if "ended" in told:
            self.is_over = True
        else:
            self._announced(told["management"], told["page"], told["metrics"])

    def _announced(self, address: str, page: str, metrics: str) -> None:
        """Whoever is started in its place has the same addresses."""
        self.address, self.page = address, page
        old = self._settings
        self._settings = dataclasses.replace(
            old,
            listen=_with_port(old.listen, address),
            page=None if old.page is None else _with_port(old.page, urlsplit(page).netloc),
            metrics_port=split_address(metrics)[1] if metrics else None,
        )

    def _start(self) -> Process:
        self._close_pipe()
        reader, writer = os.pipe()
        try:
            self._pipe = open(reader, "rb", buffering=0)  # noqa: SIM115 - closed by _close_pipe
            return self._launcher.start(
                MANAGEMENT.module, [*self._settings.arguments(), "--announce-fd", "3"], [writer]
            )
        finally:
            os.close(writer)

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


def _with_port(listen: str, address: str) -> str:
    """The host of the one with the port of the other."""
    return f"{split_address(listen, any_port=True)[0]}:{split_address(address)[1]}"


# ----------------------------------------------------------------------------------------------------------------------
# The vendor gateway of a cluster as its owner sees it: where it is, that it stays there, and a file that names it


class VendorGatewayProcess:
    """A place for the gateway, which says where it is by a line of JSON in a pipe."""

    def __init__(self, launcher: Launcher, management: str, interpreter: str) -> None:
        """interpreter: of the environment of the vendor's client. Raises SpawnError."""
        self._launcher = launcher
        self._management = management
        self._interpreter = interpreter
        self._listen = "127.0.0.1:0"
        self._pipe: IO[bytes] | None = None
        self._config: Path | None = None
        self.place = SupervisedProcess("vendor_gateway", self._start)

    def take_address(self, seconds: float) -> str:
        """Where it listens, and will if it is started again; empty if it does not say so in time."""
        process = self.place.process
        assert self._pipe is not None
        assert process is not None
        if not readable([self._pipe, process], seconds) or not (line := self._pipe.readline()):
            return ""
        self._listen = str(json.loads(line)["address"])
        return self._listen

    def write_config(self) -> Path:
        """A file for CSCONFIG_PATH of the vendor's client. Raises OSError."""
        # The client asks no certificate of a cluster without namespaces, and trusts that a localhost is there.
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
        """End it, and take its file away."""
        self.place.close()
        self._close_pipe()
        if self._config is not None:
            self._config.unlink(missing_ok=True)

    def _start(self) -> Process:
        self._close_pipe()
        reader, writer = os.pipe()
        try:
            self._pipe = open(reader, "rb", buffering=0)  # noqa: SIM115 - closed by _close_pipe
            arguments = ["--management", self._management, "--listen", self._listen]
            arguments += ["--input-python", self._interpreter, "--announce-fd", "3"]
            return self._launcher.start("vendor_gateway", arguments, [writer])
        finally:
            os.close(writer)

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
