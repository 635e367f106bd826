"""A cluster: how many of each role, started by a launcher, there until it is closed; processes that hang are ended."""

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
from waferbox.launch.spawn import SpawnError
from waferbox.roles import MEMORYX, WAFER
from waferbox.rpc.address import split_address
from waferbox.rpc.server import make_channel
from waferbox.runtime.progress import IDLE_PARTS
from waferbox.security.tokens import Kind, own_clusters_token
from waferbox.settings import HANG_SECONDS
from wsc.v1 import management_pb2, management_pb2_grpc

# ----------------------------------------------------------------------------------------------------------------------
# Which processes of a cluster live and are no nodes any more: their interpreters hang, or they are suspended
#
# Management has taken them for dead; their launcher has to end them, so that others can have their places.


ProcessKey = tuple[str, int]  # its host, empty for this one, and its process id there

LOOK_SECONDS = 5.0  # between two looks


class Liveness:
    """Counts looks rather than seconds: while this process is suspended nobody falls silent. Not thread-safe."""

    def __init__(self, seconds: float) -> None:
        """seconds: that a process which was a node may be none."""
        self.seconds = seconds
        self._silent: dict[ProcessKey, int] = {}  # looks, of those that have been nodes

    def look(self, running: Collection[ProcessKey], registered: Iterable[ProcessKey]) -> list[ProcessKey]:
        """Those that are to run, and those that management knows. Returns who has been silent too long."""
        for key in registered:
            self._silent[key] = -1
        self._silent = {key: looks + 1 for key, looks in self._silent.items() if key in running}
        return [key for key, looks in self._silent.items() if looks * LOOK_SECONDS >= self.seconds]


# --- A cluster: how many of each role, started by a launcher, there until it is closed --------------------------------


class ClusterError(RuntimeError):
    """The cluster did not start, or did not stay."""


class Cluster:
    """A running cluster. A context manager; on leaving it nothing is left."""

    def __init__(self, settings: ClusterSettings, launcher: Launcher, stop_requests: Sequence[int] = ()) -> None:
        """Start it, and wait until all nodes have registered. Raises ClusterError. The launcher is the cluster's.

        stop_requests: descriptors; when one becomes readable, the cluster is not wanted any more.
        """
        self._launcher = launcher
        self._stop_requests = stop_requests
        self._launcher_backoff = RestartBackoff()
        self._places: list[SupervisedProcess] = []
        self._management: ManagementProcess | None = None
        self._vendor_gateway: VendorGatewayProcess | None = None
        self.vendor_config = ""  # a file for CSCONFIG_PATH of the vendor's client; empty: it is not served
        try:
            management = self._start_management(settings)
            self.management, self.page = management.address, management.page
            modules = [module for module, count in settings.roles.items() for _ in range(count)]
            listen = launcher.listen(settings.listen.rpartition(":")[0])
            with ThreadPoolExecutor(max_workers=len(modules)) as pool:
                self._places += pool.map(lambda module: self._make_place(module, listen, settings), modules)
            self._check_wanted()
            self._wait_until_registered(len(modules))
            if settings.vendor_python is not None:
                self._start_vendor_gateway(settings.vendor_python)
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

    def supervise(self, on_given_up: Callable[[str], None]) -> None:
        """Until it is asked to stop, or somebody shuts it down; what ends otherwise meanwhile is started again.

        on_given_up(message): a node's process ends again and again, and is not started any more.

        Raises:
            ClusterError: the management service ends again and again, or what starts the nodes.
        """
        assert self._management is not None
        liveness, look_at = Liveness(HANG_SECONDS.get() / IDLE_PARTS), time.monotonic() + LOOK_SECONDS
        while True:
            running = [place.process for place in self._places if place.process is not None]
            waited_for = [*self._stop_requests, self._launcher, *self._management.waited_for(), *running]
            seconds = min(self._seconds_to_restart(), max(0.0, look_at - time.monotonic()))
            if not readable(waited_for, seconds).isdisjoint(self._stop_requests):
                return
            if time.monotonic() >= look_at:
                self._end_silent(liveness)
                look_at = time.monotonic() + LOOK_SECONDS
            messages = self._management.restart_if_ended()
            if self._management.place.given_up:
                raise ClusterError(*messages)
            if self._management.is_over:
                return
            tell(messages)
            if (cause := self._launcher.end()) and not self._restart_launcher(cause):
                return
            for place in self._places:
                if place.given_up:
                    continue
                tell(messages := place.restart_if_ended())
                if place.given_up:
                    on_given_up(*messages)

    def _restart_launcher(self, cause: str) -> bool:
        """Have another that can start processes; those that the one before had started have ended. False: not wanted.

        Raises ClusterError.
        """
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
        tell([f"{cause}, and all nodes with it; another is started, and starts them again"])
        for place in self._places:
            place.reset_backoff()
        return readable([*self._stop_requests, ready], None).isdisjoint(self._stop_requests)

    def _end_silent(self, liveness: Liveness) -> None:
        """The processes that live and have not been nodes for too long."""
        request = management_pb2.ListNodesRequest()
        with make_channel(self.management, own_clusters_token(Kind.ADMIN)) as channel:
            try:
                nodes = (
                    management_pb2_grpc.ManagementStub(channel)
                    .ListNodes(request, timeout=deadlines.QUERIES.supervision)
                    .nodes
                )
            except grpc.RpcError:
                return  # nobody can be a node now
        running = (place for place in self._places if place.process is not None and place.process.poll() is None)
        places = {(place.process.host, place.process.pid): place for place in running if place.process is not None}
        # The numbers of processes here are known without their host, as such processes are.
        here = [("", node.process_id) for node in nodes]
        anywhere = [(split_address(node.address)[0], node.process_id) for node in nodes]
        for key in liveness.look(places.keys(), [*here, *anywhere]):
            places[key].replace(f"lived, and was no node for {liveness.seconds:g} s: it was ended")

    def _seconds_to_restart(self) -> float:
        """Until the next process is to be started again; infinite if none is."""
        assert self._management is not None
        places = [self._management.place, *self._places]
        times = [place.restart_at for place in places if place.restart_at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else math.inf

    def close(self) -> None:
        """End all processes."""
        if self._management is not None:
            self._management.end(deadlines.END.jobs)  # first, so that jobs end as cancelled and not for want of nodes
        if self._vendor_gateway is not None:
            self._vendor_gateway.close()
        self._launcher.close()
        for place in self._places:
            place.close()
        if self._management is not None:
            self._management.close()

    def _start_management(self, settings: ClusterSettings) -> ManagementProcess:
        """Once it is there."""
        management = self._management = ManagementProcess(
            self._launcher,
            ManagementSettings(
                listen=settings.listen,
                page=settings.page,
                metrics_port=0 if settings.metrics else None,
                cache_root=settings.cache_root,
                compile_root=settings.compile_root,
            ),
        )
        if not readable([*management.waited_for(), self._launcher, *self._stop_requests], deadlines.START.management):
            raise ClusterError(f"the management service did not start within {deadlines.START.management:g} s")
        self._check_wanted()
        management.take_in()
        if not management.address:
            raise ClusterError(f"the management service did not start at {settings.listen}; its messages say why")
        return management

    def _start_vendor_gateway(self, interpreter: str) -> None:
        """Once it listens."""
        gateway = self._vendor_gateway = VendorGatewayProcess(self._launcher, self.management, interpreter)
        if not gateway.take_address(deadlines.START.vendor_gateway):
            raise ClusterError("the gateway for the vendor's client did not start; its messages say why")
        self.vendor_config = str(gateway.write_config())
        self._places.append(gateway.place)

    def _check_wanted(self) -> None:
        if readable(self._stop_requests, 0.0):
            raise ClusterError("it was told to end while it started")
        if cause := self._launcher.end():
            raise ClusterError(cause)

    def _make_place(self, module: str, listen: str, settings: ClusterSettings) -> SupervisedProcess:
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
                self._check_wanted()
                try:
                    nodes = stub.ListNodes(request, timeout=deadlines.QUERIES.nodes, wait_for_ready=True).nodes
                except grpc.RpcError as error:
                    raise ClusterError("the management service does not answer; its messages say why") from error
                if len(nodes) >= count:
                    return
                for place in self._places:
                    if place.process is not None and (status := place.process.poll()) is not None:
                        who = f"{place.module} ({described(place.process)})"
                        raise ClusterError(f"{who} ended with status {status} while the cluster started")
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"only {len(nodes)} of {count} nodes registered within {deadlines.START.nodes:g} s"
                    )


def tell(messages: Sequence[str]) -> None:
    """Users, on the terminal of whoever owns the cluster."""
    for message in messages:
        print(f"waferbox: {message}", file=sys.stderr, flush=True)


def _metrics_arguments(settings: ClusterSettings) -> list[str]:
    return ["--metrics-port", "0"] if settings.metrics else []
