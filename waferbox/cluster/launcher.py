"""Who starts the processes of a cluster. The embedded cluster starts them as children of its own, by a fork server."""

import os
from collections.abc import Sequence
from typing import Protocol

from interconnect.security.own_tokens import without_tokens
from nodes.launch.fork_server_process import COORDINATOR_PRELOAD, ROLES_PRELOAD, ForkServerProcess
from nodes.launch.process import SOCKET_VARIABLE
from nodes.launch.spawn import SpawnError, spawn, spawn_python
from nodes.telemetry.terminal_log import LEVEL_VARIABLE


class Process(Protocol):
    """A process of the cluster, as its launcher knows it."""

    @property
    def pid(self) -> int:
        """On its host; 0: it is not known yet."""

    @property
    def host(self) -> str:
        """The host part of the address where it listens, if it can be on another host; else empty."""

    def fileno(self) -> int:
        """Readable once it has ended."""

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""

    def terminate(self) -> None:
        """Ask it to end."""

    def close(self) -> int:
        """End it; returns the exit status."""


class Launcher(Protocol):
    """Starts role processes: here, or wherever."""

    def start(self, module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> Process:
        """Start `python -m module arguments`. The descriptors are 3, 4, ... there."""

    def listen(self, management_host: str) -> str:
        """Where a role process is to listen if management listens at that host. Raises SpawnError."""

    def fileno(self) -> int:
        """Readable once nothing can be started any more, and what was started by it has ended with it."""

    def end(self) -> str:
        """What has happened then, for the user; empty before."""

    def restart(self) -> int:
        """Be able to start processes again, after that; what was started before has ended. Raises SpawnError.

        Returns the descriptor that is readable once processes can be started at once.
        """

    def close(self) -> None:
        """The last: what was started and still runs may be ended with it."""


class ForkingLauncher:
    """Children of this process and of a fork server, which dies with this process, and they with it."""

    def __init__(self) -> None:
        # The terminal is the script's: it hears of what is wrong, and the job's log has the rest. libgomp spins when it
        # waits, unless told before torch is imported: ruinous where roles outnumber cores.
        os.environ.setdefault(LEVEL_VARIABLE, "warning")
        self._fork_server = ForkServerProcess(
            ROLES_PRELOAD,
            {**without_tokens(os.environ), "OMP_WAIT_POLICY": "PASSIVE"},
            when_idle=COORDINATOR_PRELOAD,
        )
        os.environ[SOCKET_VARIABLE] = self._fork_server.name

    def start(self, module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> Process:
        # The management service needs no torch: it is there before the fork server has imported it.
        return (spawn_python if module == "appliance" else spawn)(module, arguments, fds)

    def listen(self, management_host: str) -> str:
        return f"{management_host}:0"

    def fileno(self) -> int:
        return self._fork_server.fileno()

    def end(self) -> str:
        return self._fork_server.end()

    def restart(self) -> int:
        try:
            self._fork_server.restart()
        except OSError as error:
            raise SpawnError(f"the fork server could not be started again: {error}") from error
        return self._fork_server.ready_fileno()

    def close(self) -> None:
        self._fork_server.close()
        os.environ.pop(SOCKET_VARIABLE, None)
