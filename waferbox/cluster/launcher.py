"""Which processes a cluster consists of, and who starts them: by default a fork server, as children of its own."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from waferbox import settings
from waferbox.launch.fork_server_process import COORDINATOR_PRELOAD, ROLES_PRELOAD, ForkServerProcess
from waferbox.launch.spawn import SpawnError, spawn, spawn_python
from waferbox.roles import MANAGEMENT, MEMORYX, SWARMX, WAFER, WORKER
from waferbox.runtime.swarmx_tree import tree_size
from waferbox.security.tokens import without_tokens

# --- Which processes a cluster consists of ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Which processes a cluster consists of, beside its management service."""

    wafers: int = 1
    memoryx: int = 1
    workers: int | None = None  # in all; None: one for each wafer
    swarmx: int | None = None  # None: as many as a tree over the wafers has
    listen: str = "127.0.0.1:0"  # the management service
    page: str | None = None  # where management serves a page, as host:port; None: nowhere
    metrics: bool = False  # every process serves figures for Prometheus, at any port
    threads: int | None = None  # of a wafer; None: its share of the cores
    state_dir: str | None = None  # where MemoryX keeps weights and optimizer state; None: in memory
    memory_limit: str | None = None  # of each shard of MemoryX, such as "8g"; the rest is in state_dir
    cache_root: str | None = None  # None: the management service's default
    vendor_python: str | None = None  # serve the vendor's client, whose environment has this interpreter
    compile_root: str | None = None  # below which scripts may name folders for artifacts; None: the cache root alone

    @property
    def roles(self) -> dict[str, int]:
        """How many processes of each role module."""
        return {
            MEMORYX.module: self.memoryx,
            SWARMX.module: tree_size(self.wafers) if self.swarmx is None else self.swarmx,
            WAFER.module: self.wafers,
            WORKER.module: self.wafers if self.workers is None else self.workers,
        }


# ----------------------------------------------------------------------------------------------------------------------
# Who starts the processes of a cluster. The embedded cluster starts them as children of its own, by a fork server


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
        os.environ.setdefault(settings.LOG_LEVEL.name, "warning")
        self._fork_server = ForkServerProcess(
            ROLES_PRELOAD,
            {**without_tokens(os.environ), "OMP_WAIT_POLICY": "PASSIVE"},
            when_idle=COORDINATOR_PRELOAD,
        )
        os.environ[settings.FORK_SERVER.name] = self._fork_server.name

    def start(self, module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> Process:
        # The management service needs no torch: it is there before the fork server has imported it.
        return (spawn_python if module == MANAGEMENT.module else spawn)(module, arguments, fds)

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
        os.environ.pop(settings.FORK_SERVER.name, None)
