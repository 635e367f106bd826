"""The vendor gateway of a cluster as its owner sees it: where it is, that it stays there, and a file that names it."""

import json
import os
import tempfile
from pathlib import Path
from typing import IO

from nodes.launch.descriptors import readable
from waferbox.cluster.launcher import Launcher, Process
from waferbox.cluster.place import Place


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
        self.place = Place("vendor_gateway", self._start)

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
