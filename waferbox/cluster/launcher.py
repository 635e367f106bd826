"""The settings of a cluster, the interface of launchers, and the launcher of this machine."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from waferbox import settings
from waferbox.launch.fork_server_process import COORDINATOR_PRELOAD, ROLES_PRELOAD, ForkServerProcess
from waferbox.launch.spawn import SpawnError, spawn, spawn_python
from waferbox.roles import MANAGEMENT, MEMORYX, SWARMX, WAFER, WORKER
from waferbox.runtime.swarmx_trees import tree_size
from waferbox.security.tokens import without_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """The number of processes of each role in a cluster, and their options."""

    wafers: int = 1
    memoryx: int | None = None  # None: one
    workers: int | None = None  # in total; None: one for each wafer
    swarmx: int | None = None  # None: as many as a tree over the wafers has
    listen: str = "127.0.0.1:0"  # address of the management service
    page: str | None = None  # address of management's page, as host:port; None: no page
    next_free: bool = False  # if the port of `listen` is taken, the next one that is free is used
    page_next_free: bool = False  # the same of the port of `page`
    metrics: bool = False  # whether every process serves metrics for Prometheus, at any port
    threads: int | None = None  # of each wafer; None: its share of the cores
    state_dir: str | None = None  # folder for weights and optimizer state of MemoryX; None: they are in memory
    memory_limit: str | None = None  # of each shard of MemoryX, such as "8g"; the rest is in state_dir
    cache_root: str | None = None  # None: the management service's default
    vendor_python: str | None = None  # interpreter of the environment of the vendor's client; None: it is not served
    compile_root: str | None = None  # scripts may name folders for artifacts below it; None: in the cache root only

    @property
    def roles(self) -> dict[str, int]:
        """The number of processes of each role module."""
        return {
            MEMORYX.module: 1 if self.memoryx is None else self.memoryx,
            SWARMX.module: tree_size(self.wafers) if self.swarmx is None else self.swarmx,
            WAFER.module: self.wafers,
            WORKER.module: self.wafers if self.workers is None else self.workers,
        }

    def over_hosts(self, num_hosts: int) -> "ClusterSettings":
        """Returns the settings with a shard and a SwarmX node for each host with wafers, where they give no number.

        The link of a host then carries about the same bytes whatever the number of hosts (docs/roles/swarmx.md).
        """
        count = min(num_hosts, self.wafers)
        if count == 1:
            return self
        memoryx = count if self.memoryx is None else self.memoryx
        swarmx = max(count, tree_size(self.wafers)) if self.swarmx is None else self.swarmx
        return replace(self, memoryx=memoryx, swarmx=swarmx)


class Process(Protocol):
    """A process that a launcher has started."""

    @property
    def pid(self) -> int:
        """Its id on its host; 0 while that is unknown."""

    @property
    def host(self) -> str:
        """The host part of its address, if it may be on another host; else empty."""

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended."""

    def poll(self) -> int | None:
        """The exit status; None while the process runs."""

    def terminate(self) -> None:
        """Requests the end of the process."""

    def close(self) -> int:
        """Ends the process; returns the exit status."""


class Launcher(Protocol):
    """Starts role processes, on this host or on others."""

    def start(self, module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> Process:
        """Starts `python -m module arguments`, in which the descriptors are 3, 4, ... Raises SpawnError."""

    def listen(self, management_host: str) -> str:
        """The address at which role processes listen if management listens at that host. Raises SpawnError."""

    def fileno(self) -> int:
        """A descriptor that is readable once the launcher has ended, and its processes with it."""

    def end(self) -> str:
        """The cause of the launcher's end, for the user; empty while it runs."""

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended the launcher."""

    def restart(self) -> int:
        """Restarts the launcher after its end; it can start processes afterwards. Raises SpawnError.

        Returns:
            A descriptor that is readable once processes start without delay.
        """

    def close(self) -> None:
        """Ends the launcher, and possibly processes that still run. The last call."""


class ForkingLauncher:
    """Starts children of this process, and of a fork server. All of them die with this process."""

    def __init__(self) -> None:
        # The terminal belongs to the script: it shows warnings only, and the job's log has the rest. libgomp must not
        # spin while it waits, which is ruinous where roles outnumber cores; it reads its policy when torch is imported.
        os.environ.setdefault(settings.LOG_LEVEL.name, "warning")
        self._fork_server = ForkServerProcess(
            ROLES_PRELOAD,
            {**without_tokens(os.environ), "OMP_WAIT_POLICY": "PASSIVE"},
            when_idle=COORDINATOR_PRELOAD,
        )
        os.environ[settings.FORK_SERVER.name] = self._fork_server.name

    def start(self, module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> Process:
        # The management service needs no torch, and so starts while the fork server imports it.
        return (spawn_python if module == MANAGEMENT.module else spawn)(module, arguments, fds)

    def listen(self, management_host: str) -> str:
        return f"{management_host}:0"

    def fileno(self) -> int:
        return self._fork_server.fileno()

    def end(self) -> str:
        return self._fork_server.end()

    @property
    def was_killed(self) -> bool:
        return (self._fork_server.poll() or 0) < 0

    def restart(self) -> int:
        try:
            self._fork_server.restart()
        except OSError as error:
            raise SpawnError(f"the fork server could not be started again: {error}") from error
        return self._fork_server.ready_fileno()

    def close(self) -> None:
        self._fork_server.close()
        os.environ.pop(settings.FORK_SERVER.name, None)
