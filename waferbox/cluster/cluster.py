"""A cluster: how many of each role, started by a launcher, there until it is closed."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Self

import grpc

from interconnect.rpc.server import make_channel
from interconnect.security.own_tokens import own_clusters_token
from interconnect.security.tokens import Kind
from interconnect.swarmx_tree import tree_size
from nodes.launch.descriptors import readable
from nodes.launch.spawn import SpawnError
from waferbox.cluster.launcher import Launcher, Process
from wsc.v1 import management_pb2, management_pb2_grpc

START_SECONDS = 60.0
STOP_SECONDS = 8.0  # for jobs to end
SHUTDOWN_SECONDS = 3.0  # for those who use a cluster to hear why it ends
LISTEN_SECONDS = 0.5  # between looks at whether all processes live


class ClusterError(RuntimeError):
    """The cluster did not start, or did not stay."""


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
    compile_root: str | None = None  # below which scripts may name folders for artifacts; None: the cache root alone

    @property
    def roles(self) -> dict[str, int]:
        """How many processes of each role module."""
        return {
            "memoryx": self.memoryx,
            "swarmx": tree_size(self.wafers) if self.swarmx is None else self.swarmx,
            "wafer": self.wafers,
            "workers": self.wafers if self.workers is None else self.workers,
        }


class Cluster:
    """A running cluster. A context manager; on leaving it nothing is left."""

    def __init__(self, settings: ClusterSettings, launcher: Launcher, stop_requests: Sequence[int] = ()) -> None:
        """Start it, and wait until all nodes have registered. Raises ClusterError. The launcher is the cluster's.

        stop_requests: descriptors; when one becomes readable, the cluster is not wanted any more.
        """
        self._launcher = launcher
        self._stop_requests = stop_requests
        self.processes: list[tuple[str, Process]] = []
        self._reported: set[int] = set()
        self.announcement: IO[bytes]  # readable when the management service ends
        try:
            self.management, self.page = self._start_management(settings)
            modules = [module for module, count in settings.roles.items() for _ in range(count)]
            listen = f"{settings.listen.rpartition(':')[0]}:0"
            with ThreadPoolExecutor(max_workers=len(modules)) as pool:
                self.processes += pool.map(lambda module: self._start_role(module, listen, settings), modules)
            self._check_wanted()
            self._wait_until_registered(len(modules))
        except SpawnError as error:
            cause = launcher.end() or str(error)
            self.close()
            raise ClusterError(cause) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def supervise(self) -> None:
        """Until it is asked to stop, or the management service ends; says which other processes end meanwhile.

        Raises:
            ClusterError: the launcher has ended, and all nodes with it. Who uses the cluster has been told.
        """
        stops = {*self._stop_requests, self.announcement.fileno()}
        while True:
            processes = [process.fileno() for _, process in self.running()]
            ready = readable([*stops, self._launcher, *processes], None)
            if not ready.isdisjoint(stops):
                return
            if cause := self._launcher.end():
                self._shut_down(cause)
                raise ClusterError(cause)
            for module, pid, status in self.ended():
                print(f"waferbox: {module} (pid {pid}) ended with status {status}", file=sys.stderr, flush=True)

    def _shut_down(self, cause: str) -> None:
        """Have management end, and its jobs with this cause."""
        with (
            make_channel(self.management, own_clusters_token(Kind.ADMIN)) as channel,
            contextlib.suppress(grpc.RpcError),
        ):
            stub = management_pb2_grpc.ManagementStub(channel)
            stub.Shutdown(management_pb2.ShutdownRequest(cause=cause), timeout=SHUTDOWN_SECONDS)
            readable([self.announcement], SHUTDOWN_SECONDS)

    def ended(self) -> Sequence[tuple[str, int, int]]:
        """Module, process and status of those that have ended since the last call."""
        found = []
        for module, process in self.running():
            status = process.poll()
            if status is not None:
                self._reported.add(process.pid)
                found.append((module, process.pid, status))
        return found

    def running(self) -> Sequence[tuple[str, Process]]:
        """Module and process of those that have not been reported as ended."""
        return [(module, process) for module, process in self.processes if process.pid not in self._reported]

    def close(self) -> None:
        """End all processes."""
        for _, management in self.processes[:1]:
            # First, so that jobs end as cancelled and not for want of nodes.
            management.terminate()
            readable([self.announcement], STOP_SECONDS)
        self._launcher.close()
        for _, process in self.processes:
            process.close()
        self.announcement.close()

    def _start_management(self, settings: ClusterSettings) -> tuple[str, str]:
        """Its address, and that of its page, or nothing."""
        reader, writer = os.pipe()
        self.announcement = open(reader, "rb", buffering=0)  # noqa: SIM115 - closed by close
        try:
            arguments = ["--listen", settings.listen, "--announce-fd", "3"]
            if settings.cache_root is not None:
                arguments += ["--cache-root", settings.cache_root]
            if settings.compile_root is not None:
                arguments += ["--compile-root", settings.compile_root]
            if settings.page is not None:
                arguments += ["--page", settings.page]
            arguments += _metrics_arguments(settings)
            process = self._launcher.start("appliance", arguments, [writer])
            self.processes.append(("appliance", process))
        finally:
            os.close(writer)
        if not readable([self.announcement, self._launcher, *self._stop_requests], START_SECONDS):
            raise ClusterError(f"the management service did not start within {START_SECONDS:g} s")
        self._check_wanted()
        line = self.announcement.readline()
        if not line:
            raise ClusterError(f"the management service did not start at {settings.listen}; its messages say why")
        announced = json.loads(line)
        return str(announced["management"]), str(announced["page"])

    def _check_wanted(self) -> None:
        if readable(self._stop_requests, 0.0):
            raise ClusterError("it was told to end while it started")
        if cause := self._launcher.end():
            raise ClusterError(cause)

    def _start_role(self, module: str, listen: str, settings: ClusterSettings) -> tuple[str, Process]:
        arguments = ["--management", self.management, "--listen", listen, *_metrics_arguments(settings)]
        if module == "wafer":
            share = max(1, len(os.sched_getaffinity(0)) // settings.wafers)
            arguments += ["--threads", str(share if settings.threads is None else settings.threads)]
        if module == "memoryx" and settings.state_dir is not None:
            arguments += ["--state-dir", settings.state_dir]
        if module == "memoryx" and settings.memory_limit is not None:
            arguments += ["--memory-limit", settings.memory_limit]
        return module, self._launcher.start(module, arguments)

    def _wait_until_registered(self, count: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        request = management_pb2.ListNodesRequest(at_least=count, wait_seconds=LISTEN_SECONDS)
        with make_channel(self.management, own_clusters_token(Kind.ADMIN)) as channel:
            stub = management_pb2_grpc.ManagementStub(channel)
            while True:
                self._check_wanted()
                try:
                    nodes = stub.ListNodes(request, timeout=10.0, wait_for_ready=True).nodes
                except grpc.RpcError as error:
                    raise ClusterError("the management service does not answer; its messages say why") from error
                if len(nodes) >= count:
                    return
                for module, pid, status in self.ended():
                    raise ClusterError(f"{module} (pid {pid}) ended with status {status} while the cluster started")
                if time.monotonic() > deadline:
                    raise ClusterError(f"only {len(nodes)} of {count} nodes registered within {START_SECONDS:g} s")


def _metrics_arguments(settings: ClusterSettings) -> list[str]:
    return ["--metrics-port", "0"] if settings.metrics else []
