"""The process of an ingress: its server, its registration, its coordinators."""

import asyncio
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from appliance.coordinator.processes import HostProcesses
from appliance.coordinator.record import OrphanedJobs, is_kept
from appliance.coordinator.settings import CoordinatorHome
from appliance.ingress.coordinators import Coordinators, report_orphaned_jobs
from appliance.ingress.gateway import Gateway
from appliance.ingress.targets import Targets
from waferbox import deadlines
from waferbox.links.socket_names import host_id
from waferbox.roles import INGRESS
from waferbox.rpc.address import bind, split_address
from waferbox.rpc.async_server import AsyncServer, make_async_channel
from waferbox.rpc.server import LARGE_MESSAGE_BYTES
from waferbox.rpc.vanished_hosts import VanishedHosts
from waferbox.runtime.registration import Registration
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import ingress_pb2_grpc, management_pb2, node_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSettings:
    """The settings that an ingress starts with."""

    management: str  # host:port
    cache_root: Path  # the artifacts of the compiler are below it
    compile_root: Path | None = None  # scripts may name folders below it; None: below the cache root only
    listen: str = "127.0.0.1:0"
    metrics_port: int | None = None  # 0: any; None: no endpoint


class Ingress:
    """An ingress, as a waferbox.runtime.node.Serving. Raises OSError if it cannot listen."""

    def __init__(self, settings: IngressSettings) -> None:
        self.refusal = ""
        self._reporting: asyncio.Task[None] | None = None  # of orphaned jobs, to management
        self._over = threading.Event()
        self._closed = False
        self._server = AsyncServer(on_defect=self._defect, max_message_bytes=LARGE_MESSAGE_BYTES, for_scripts=True)
        server = self._server.server
        self.address = bind(server, settings.listen)
        self._vanished_hosts = VanishedHosts(self.address, self._defect)
        host = split_address(settings.listen, any_port=True)[0]
        self._channel, self._targets = self._server.loop.run(_reach(settings.management))
        home = CoordinatorHome(
            management=settings.management,
            host=host,
            cache_root=settings.cache_root,
            compile_root=settings.compile_root,
            terminated=f"the ingress at {self.address}, where its coordinator ran, went down, or the cluster did: "
            "start that again, then the script from its last checkpoint",
            ingress=self.address,
        )
        self._coordinators = Coordinators(
            HostProcesses(home, make_async_channel), lambda job: is_kept(settings.cache_root, job)
        )
        ingress_pb2_grpc.add_IngressServicer_to_server(self._coordinators, server)
        Gateway(settings.management, self._channel, self._targets).add_to_server(server)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)  # type: ignore[attr-defined]  # not in the stubs
        self._orphaned = OrphanedJobs(settings.cache_root, settings.management, self.address)
        self._metrics = None
        if settings.metrics_port is not None:
            from appliance.ingress.metrics import IngressCollector
            from waferbox.runtime.metrics import MetricsServer

            self._metrics = MetricsServer(
                IngressCollector(self._coordinators.count), INGRESS.name, host, settings.metrics_port
            )
        self._registration = Registration(settings.management, self._hello, self._refused, make_async_channel)

    def start(self) -> None:
        self._server.start()
        self._server.loop.run(self._start_tasks())

    def end(self) -> None:
        self._over.set()

    def wait(self) -> None:
        self._over.wait()

    def close(self) -> None:
        """Ends the coordinators, whose clients are notified through this process, then all else; idempotent."""
        if not self._closed:
            self._closed = True
            self._server.loop.run(self._end_calls())
            self._server.stop(0)
        if self._metrics is not None:
            self._metrics.close()

    async def _start_tasks(self) -> None:
        def reported(task: "asyncio.Task[None]") -> None:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, Exception):
                self._defect(error)

        self._reporting = asyncio.create_task(report_orphaned_jobs(self._orphaned, self._channel))
        self._reporting.add_done_callback(reported)
        self._vanished_hosts.start()
        self._registration.start()

    async def _end_calls(self) -> None:
        self._vanished_hosts.close()
        await self._registration.close()
        if self._reporting is not None:
            self._reporting.cancel()
        await self._coordinators.close()
        await self._server.server.stop(deadlines.END.server_grace)
        await self._targets.close()
        await self._channel.close(None)

    def _hello(self) -> management_pb2.RegisterRequest:
        return management_pb2.RegisterRequest(
            role=node_pb2.ROLE_INGRESS,
            address=self.address,
            host=host_id(),
            version=WIRE_VERSION,
            process_id=os.getpid(),
            metrics="" if self._metrics is None else self._metrics.address,
        )

    def _defect(self, error: Exception) -> None:
        self._refused(f"a defect of the server: {error!r}")

    def _refused(self, message: str) -> None:
        self.refusal = message
        self._over.set()


async def _reach(management: str) -> tuple[grpc.aio.Channel, Targets]:
    """Makes a channel to management, and the targets that management lists; in the event loop that uses them."""
    channel = make_async_channel(management)
    return channel, Targets(channel)
