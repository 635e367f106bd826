"""What a coordinator uses of its process and its host: servers, channels, links and the clock."""

import asyncio
import contextlib
import os

from appliance.coordinator.execution.output_links import ListenedLinks, OutputLinks
from appliance.coordinator.management_link import ProcessIdentity
from appliance.coordinator.nodes.job_nodes import OpenChannel
from appliance.coordinator.service import CoordinatorService
from appliance.coordinator.settings import CoordinatorSettings
from waferbox import deadlines
from waferbox.host.clock import Clock
from waferbox.host.event_loop import from_any_thread
from waferbox.host.oom_kills import oom_kills
from waferbox.launch.spawn import is_running
from waferbox.launch.spawn import process_started as started_at
from waferbox.links.listener import LinkListener
from waferbox.links.socket_names import host_id
from waferbox.rpc.address import bind, split_address
from waferbox.rpc.async_server import make_async_channel, make_async_server
from waferbox.rpc.server import LARGE_MESSAGE_BYTES, make_server
from waferbox.rpc.vanished_hosts import VanishedHosts
from waferbox.runtime.progress import process_report
from waferbox.security.guard import Guard
from wsc.v1 import coordinator_pb2_grpc


class ProcessHost:
    """The CoordinatorHost of a process. To be made in its event loop."""

    def __init__(self, settings: CoordinatorSettings, clock: Clock) -> None:
        """Binds the servers. Raises OSError if that is impossible. clock: of the event loop."""
        self.identity = ProcessIdentity(process_id=os.getpid(), process_started=started_at(os.getpid()), host=host_id())
        self.clock = clock
        self.open_channel: OpenChannel = make_async_channel
        self._server = make_async_server(
            Guard(job=settings.job), max_message_bytes=LARGE_MESSAGE_BYTES, for_scripts=True
        )
        self.address = bind(self._server, settings.listen)
        self._vanished_hosts = VanishedHosts(self.address, self._failed)
        # The links from other hosts are streams of bytes, which threads receive.
        self._link_server = make_server(job=settings.job)
        self._service: CoordinatorService | None = None
        self._listener = LinkListener(bind(self._link_server, settings.listen), from_any_thread(self._failed))
        self._listener.add_to_server(self._link_server)
        self.links: OutputLinks = ListenedLinks(self._listener)

    process_report = staticmethod(process_report)
    oom_kills = staticmethod(oom_kills)

    @staticmethod
    async def is_listening(address: str) -> bool:
        """Whether a process of this host accepts connections at an address."""
        host, port = split_address(address)
        try:
            async with asyncio.timeout(deadlines.COORDINATION.listens):
                _, writer = await asyncio.open_connection(host.strip("[]"), port)
        except TimeoutError:
            return True
        except OSError:
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    def is_running(self, process_id: int, process_started: int) -> bool:
        return is_running(process_id, process_started)

    async def serve(self, service: CoordinatorService) -> None:
        self._service = service
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, self._server)
        self._link_server.start()
        await self._server.start()
        self._vanished_hosts.start()

    async def stop(self, grace_seconds: float) -> None:
        self._vanished_hosts.close()
        await self._server.stop(grace_seconds)
        self._link_server.stop(None)

    def close(self) -> None:
        """Takes no more links; after stop, or instead of serve."""
        self._listener.close()

    def _failed(self, defect: Exception) -> None:
        if self._service is not None:
            self._service.job.verdict.report_defect(defect)
