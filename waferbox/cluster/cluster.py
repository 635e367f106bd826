"""A cluster of role processes: it restarts those that end, and ends those that hang. A launcher starts them."""

import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import grpc

from waferbox import deadlines
from waferbox.cluster.launcher import ClusterSettings, Launcher
from waferbox.cluster.service_processes import ManagementProcess, ManagementSettings, VendorGatewayProcess
from waferbox.cluster.supervised_process import EXITED_TOO_OFTEN, RestartBackoff, SupervisedProcess, described
from waferbox.host.descriptors import readable
from waferbox.input_process.temporary_folder import remove_abandoned_folders
from waferbox.launch.local_clusters import ClusterError, ClusterStopped
from waferbox.launch.spawn import ForkServerLost, SpawnError
from waferbox.roles import MEMORYX, WAFER
from waferbox.rpc.address import split_address
from waferbox.rpc.server import make_channel
from waferbox.runtime.progress import IDLE_PARTS
from waferbox.security.tokens import Kind, own_clusters_token
from waferbox.settings import HANG_SECONDS
from wsc.v1 import management_pb2, management_pb2_grpc

# --- Processes that hang ----------------------------------------------------------------------------------------------


ProcessKey = tuple[str, int]  # a process's host, empty for this one, and its id there

CHECK_SECONDS = 5.0  # between two checks of the running processes


class Liveness:
    """Finds processes that run but are no longer registered: their interpreters hang, or they are suspended.

    Management considers them dead. The cluster ends them, so that others can replace them. Not thread-safe.
    """

    # Checks are counted, not seconds: after a suspension of this process no other process counts as silent.

    def __init__(self, seconds: float) -> None:
        """seconds: how long a process that was a node may be unregistered."""
        self.seconds = seconds
        self._silent: dict[ProcessKey, int] = {}  # checks since a process was last registered

    def find_silent(self, running: Collection[ProcessKey], registered: Iterable[ProcessKey]) -> list[ProcessKey]:
        """Compares the running processes with those registered at management; returns those unregistered too long."""
        for key in registered:
            self._silent[key] = -1
        self._silent = {key: checks + 1 for key, checks in self._silent.items() if key in running}
        return [key for key, checks in self._silent.items() if checks * CHECK_SECONDS >= self.seconds]


# --- The cluster ------------------------------------------------------------------------------------------------------


class Cluster:
    """A running cluster, and the context manager that ends its processes. Not thread-safe."""

    def __init__(self, settings: ClusterSettings, launcher: Launcher, stop_requests: Sequence[int] = ()) -> None:
        """Starts the cluster and waits until all nodes have registered.

        Args:
            settings: the processes of the cluster.
            launcher: starts them; `close` closes it.
            stop_requests: descriptors; one that becomes readable requests the end of the cluster.

        Raises:
            ClusterError: the cluster did not start, or was stopped meanwhile.
        """
        self._launcher = launcher
        self._stop_requests = stop_requests
        self._launcher_backoff = RestartBackoff()
        self._supervised: list[SupervisedProcess] = []
        self._management: ManagementProcess | None = None
        self._vendor_gateway: VendorGatewayProcess | None = None
        self.vendor_config = ""  # path of a file for CSCONFIG_PATH of the vendor's client; empty: it is not served
        try:
            management = self._start_management(settings)
            self.management, self.page = management.address, management.page
            modules = [module for module, count in settings.roles.items() for _ in range(count)]
            listen = launcher.listen(settings.listen.rpartition(":")[0])
            self._start_all(modules, listen, settings)
            self._check_not_stopped()
            self._wait_until_registered(len(modules))
            if settings.vendor_python is not None:
                self._start_vendor_gateway(settings.vendor_python)
        except SpawnError as error:
            # The launcher's own end explains more than the failed start that follows from it.
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

    def supervise(self, on_given_up: Callable[[str], None]) -> None:
        """Restarts processes that end, until a stop request or a shutdown of the cluster.

        Args:
            on_given_up: called with a message when a node's process has ended too often and is not restarted.

        Raises:
            ClusterError: the management service or the launcher has ended too often.
        """
        assert self._management is not None
        liveness, check_at = Liveness(HANG_SECONDS.get() / IDLE_PARTS), time.monotonic() + CHECK_SECONDS
        while True:
            running = [supervised.process for supervised in self._supervised if supervised.process is not None]
            sources = [*self._stop_requests, self._launcher, *self._management.event_sources(), *running]
            seconds = min(self._seconds_to_restart(), max(0.0, check_at - time.monotonic()))
            if not readable(sources, seconds).isdisjoint(self._stop_requests):
                return
            if time.monotonic() >= check_at:
                self._end_silent(liveness)
                check_at = time.monotonic() + CHECK_SECONDS
            messages = self._management.restart_if_ended()
            if self._management.supervised.given_up:
                raise ClusterError(*messages)
            if self._management.is_over:
                return  # the nodes end with the cluster, and must not be restarted
            print_messages(messages)
            if (cause := self._launcher.end()) and not self._restart_launcher(cause):
                return
            for supervised in self._supervised:
                if supervised.given_up:
                    continue
                print_messages(messages := supervised.restart_if_ended())
                if supervised.given_up:
                    on_given_up(*messages)

    def _restart_launcher(self, cause: str) -> bool:
        """Restarts the launcher, which ended with its processes. False after a stop request. Raises ClusterError."""
        while True:
            delay = self._launcher_backoff.end()
            if delay is None:
                raise ClusterError(f"{cause}, {EXITED_TOO_OFTEN}: it is not started again")
            if readable(self._stop_requests, delay):
                return False
            self._launcher_backoff.begin()
            try:
                ready = self._launcher.restart()
                break
            except SpawnError as error:
                cause = str(error)
        print_messages([f"{cause}, and all nodes with it; another is started, and starts them again"])
        for supervised in self._supervised:
            supervised.reset_backoff()
        return readable([*self._stop_requests, ready], None).isdisjoint(self._stop_requests)

    def _end_silent(self, liveness: Liveness) -> None:
        """Ends the processes that run but have been unregistered too long."""
        request = management_pb2.ListNodesRequest()
        with make_channel(self.management, own_clusters_token(Kind.ADMIN)) as channel:
            try:
                nodes = (
                    management_pb2_grpc.ManagementStub(channel)
                    .ListNodes(request, timeout=deadlines.QUERIES.supervision)
                    .nodes
                )
            except grpc.RpcError:
                return  # without management no process can be registered
        running: dict[ProcessKey, SupervisedProcess] = {}
        for supervised in self._supervised:
            process = supervised.process
            if process is not None and process.poll() is None:
                running[process.host, process.pid] = supervised
        # A process of this host has the key with an empty host, another the key with its address: list both.
        here = [("", node.process_id) for node in nodes]
        anywhere = [(split_address(node.address)[0], node.process_id) for node in nodes]
        for key in liveness.find_silent(running.keys(), [*here, *anywhere]):
            running[key].replace(f"ran unregistered for {liveness.seconds:g} s and was ended")

    def _seconds_to_restart(self) -> float:
        """Seconds until the next process is to be restarted; infinite if none is."""
        assert self._management is not None
        processes = [self._management.supervised, *self._supervised]
        times = [supervised.restart_at for supervised in processes if supervised.restart_at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else math.inf

    def close(self) -> None:
        """Ends all processes, and removes what killed ones have left."""
        if self._management is not None:
            self._management.end(deadlines.END.jobs)  # first, so that jobs end as cancelled, not as failed
        if self._vendor_gateway is not None:
            self._vendor_gateway.close()
        self._launcher.close()
        for supervised in self._supervised:
            supervised.close()
        if self._management is not None:
            self._management.close()
        remove_abandoned_folders()

    def _start_management(self, settings: ClusterSettings) -> ManagementProcess:
        """Starts the management service and waits until it listens."""
        management = self._management = ManagementProcess(
            self._launcher,
            ManagementSettings(
                listen=settings.listen,
                page=settings.page,
                next_free=settings.next_free,
                page_next_free=settings.page_next_free,
                metrics_port=0 if settings.metrics else None,
                cache_root=settings.cache_root,
                compile_root=settings.compile_root,
            ),
        )
        deadline = time.monotonic() + deadlines.START.management
        while not management.address:
            if time.monotonic() > deadline:
                raise ClusterError(f"the management service did not start within {deadlines.START.management:g} s")
            seconds = min(self._seconds_to_restart(), max(0.0, deadline - time.monotonic()))
            readable([*management.event_sources(), self._launcher, *self._stop_requests], seconds)
            self._check_not_stopped()
            status = None if management.supervised.process is None else management.supervised.process.poll()
            management.read_announcements()
            if not management.address and status is not None and status >= 0:
                raise ClusterError(
                    f"the management service did not start at {settings.listen}; its messages have the cause"
                )
            self._restart_killed()
        return management

    def _start_vendor_gateway(self, interpreter: str) -> None:
        """Starts the vendor gateway and waits until it listens."""
        gateway = self._vendor_gateway = VendorGatewayProcess(self._launcher, self.management, interpreter)
        if not gateway.read_address(deadlines.START.vendor_gateway):
            raise ClusterError("the gateway for the vendor's client did not start; see its messages")
        self.vendor_config = str(gateway.write_config())
        self._supervised.append(gateway.supervised)

    def _check_not_stopped(self) -> None:
        if readable(self._stop_requests, 0.0):
            raise ClusterStopped

    def _start_all(self, modules: Sequence[str], listen: str, settings: ClusterSettings) -> None:
        """Starts all processes of nodes, and again after a death of the fork server."""
        with ThreadPoolExecutor(max_workers=len(modules)) as pool:
            while True:
                try:
                    self._supervised += pool.map(
                        lambda module: self._start_supervised(module, listen, settings), modules
                    )
                except ForkServerLost:
                    if not readable([self._launcher], deadlines.FORK_SERVER.own_end):
                        raise
                else:
                    return
                for supervised in self._supervised:
                    supervised.close()
                self._supervised.clear()
                self._check_not_stopped()
                self._restart_killed()

    def _start_supervised(self, module: str, listen: str, settings: ClusterSettings) -> SupervisedProcess:
        arguments = ["--management", self.management, "--listen", listen, *_metrics_arguments(settings)]
        if module == WAFER.module:
            share = max(1, len(os.sched_getaffinity(0)) // settings.wafers)
            arguments += ["--threads", str(share if settings.threads is None else settings.threads)]
        if module == MEMORYX.module and settings.state_dir is not None:
            arguments += ["--state-dir", settings.state_dir]
        if module == MEMORYX.module and settings.memory_limit is not None:
            arguments += ["--memory-limit", settings.memory_limit]
        return SupervisedProcess(module, lambda: self._launcher.start(module, arguments))

    def _wait_until_registered(self, count: int) -> None:
        deadline = time.monotonic() + deadlines.START.nodes
        request = management_pb2.ListNodesRequest(at_least=count, wait_seconds=deadlines.QUERIES.nodes_wait)
        with make_channel(self.management, own_clusters_token(Kind.ADMIN)) as channel:
            stub = management_pb2_grpc.ManagementStub(channel)
            while True:
                self._check_not_stopped()
                self._restart_killed()
                nodes: Sequence[management_pb2.NodeInfo] = []
                try:
                    nodes = stub.ListNodes(request, timeout=deadlines.QUERIES.nodes, wait_for_ready=True).nodes
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise ClusterError("the management service does not answer; see its messages") from error
                if len(nodes) >= count:
                    return
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"only {len(nodes)} of {count} nodes registered within {deadlines.START.nodes:g} s"
                    )

    def _restart_killed(self) -> None:
        """Restarts the launcher and processes that a signal has ended while the cluster starts.

        Raises:
            ClusterError: one has ended by itself, or too often; or the cluster was stopped meanwhile.
        """
        assert self._management is not None
        cause = self._launcher.end()
        if cause and not self._launcher.was_killed:
            raise ClusterError(cause)
        if cause and not self._restart_launcher(cause):
            raise ClusterStopped
        for supervised in (self._management.supervised, *self._supervised):
            process = supervised.process
            if process is not None and (status := process.poll()) is not None and status >= 0:
                name = f"{supervised.module} ({described(process)})"
                raise ClusterError(f"{name} ended with status {status} while the cluster started")
        restarts = (self._management.restart_if_ended, *(one.restart_if_ended for one in self._supervised))
        messages = [message for restart in restarts for message in restart()]
        if self._management.supervised.given_up or any(supervised.given_up for supervised in self._supervised):
            raise ClusterError("; ".join(messages))
        print_messages(messages)


def print_messages(messages: Sequence[str]) -> None:
    """Prints messages for the owner of the cluster on standard error."""
    for message in messages:
        print(f"waferbox: {message}", file=sys.stderr, flush=True)


def _metrics_arguments(settings: ClusterSettings) -> list[str]:
    return ["--metrics-port", "0"] if settings.metrics else []
