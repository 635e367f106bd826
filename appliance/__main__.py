"""`python -m appliance`: the management service."""

from waferbox.host.event_loop import SteadyClock
from waferbox.launch.installation import begin_process

if __name__ == "__main__":
    begin_process()  # before the imports, one of which is gRPC

import argparse
import asyncio
import contextlib
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from grpc_health.v1 import health, health_pb2_grpc

from appliance.coordinator.processes import HostProcesses
from appliance.coordinator.record import OrphanedJobs, sweep_records
from appliance.coordinator.settings import CoordinatorHome, sweep_artifacts
from appliance.finished_jobs import FinishedJobs
from appliance.management.service import ManagementService
from appliance.management.supervisor import ManagementSettings
from appliance.page.server import PageServer
from appliance.page.source import ServiceSource
from appliance.page.stored_source import StoredSource
from waferbox.host.descriptors import raise_descriptor_limit
from waferbox.host.folders import cache_root
from waferbox.launch.fork_server_process import COORDINATOR_PRELOAD, own_fork_server
from waferbox.launch.stop_signals import on_stop_signal
from waferbox.roles import MANAGEMENT
from waferbox.rpc.address import bind, listen, split_address
from waferbox.rpc.async_server import AsyncServer, make_async_channel
from waferbox.runtime.logs import set_up_logging
from waferbox.settings import IDLE_SECONDS
from wsc.v1 import management_pb2_grpc, observation_pb2_grpc

STOP_SECONDS = 1.0
METRICS_SECONDS = 10.0

logger = logging.getLogger("appliance")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m appliance", description="The management service of a cluster.")
    parser.add_argument("--listen", default="127.0.0.1:9000", metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument(
        "--cache-root",
        type=Path,
        default=cache_root(),
        metavar="DIR",
        help="compiled artifacts; default: %(default)s",
    )
    parser.add_argument(
        "--compile-root",
        type=Path,
        metavar="DIR",
        help="let scripts have their artifacts in folders below this one; default: below the cache root alone",
    )
    parser.add_argument(
        "--next-free",
        action="store_true",
        help="if the port of --listen is taken, take the next one that is free",
    )
    parser.add_argument("--page", metavar="HOST:PORT", help="serve a page to look at there; port 0: any; default: none")
    parser.add_argument("--page-next-free", action="store_true", help="the same for the port of --page")
    parser.add_argument(
        "--metrics-port", type=int, metavar="N", help="serve figures for Prometheus; 0: at any port; default: at none"
    )
    parser.add_argument(
        "--announce-fd",
        type=int,
        metavar="N",
        help="write the addresses to this descriptor, as a line of JSON, for the owner of the cluster: when the owner "
        "ends its side, the jobs end too, and a second line reports their end",
    )
    return parser.parse_args(argv)


async def _supervise(service: ManagementService, home: CoordinatorHome) -> None:
    """Makes the service supervise its jobs, in its event loop."""
    orphans = OrphanedJobs(home.cache_root, home.management)
    service.start(home.management, HostProcesses(home, make_async_channel), orphans)


async def _watch(descriptor: int, on_end: Callable[[], object]) -> None:
    """Makes the event loop call on_end when the other side of a socket ends, which sends nothing."""
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(descriptor)
        on_end()

    loop.add_reader(descriptor, ended)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM, SIGINT, a Shutdown call or the end of the cluster's owner.

    The signals leave the jobs to a successor; the others end them.
    """
    options = parse_arguments(argv)
    set_up_logging()
    over: queue.SimpleQueue[bool] = queue.SimpleQueue()  # whether to end the jobs
    defects: list[Exception] = []

    def defect(error: Exception) -> None:
        defects.append(error)
        over.put(False)

    sweep_records(options.cache_root.absolute())
    raise_descriptor_limit()  # each node and each coordinator has a connection
    settings = ManagementSettings(
        cache_root=options.cache_root.absolute(),
        compile_root=None if options.compile_root is None else options.compile_root.absolute(),
        idle_seconds=IDLE_SECONDS.get(),
    )
    clock = SteadyClock()
    finished = FinishedJobs(settings.cache_root)
    service = ManagementService(settings, lambda: over.put(True), defect, clock, finished=finished)
    with contextlib.ExitStack() as open_parts:
        server = AsyncServer(on_defect=defect, owner_of=service.owner_of, clock=clock)
        # Last to run: the reader of the announcement sees its end and ends the nodes, whose streams the stop waits for.
        open_parts.callback(server.stop, STOP_SECONDS)
        host = split_address(options.listen, any_port=True)[0]
        try:
            address = listen(partial(bind, server.server), options.listen, next_free=options.next_free)
            page = None
            if options.page is not None:
                page = listen(PageServer, options.page, next_free=options.page_next_free)
        except OSError as error:
            logger.error("%s", error)
            return 1
        management_pb2_grpc.add_ManagementServicer_to_server(service, server.server)
        observation_pb2_grpc.add_ObservationServicer_to_server(service.observation, server.server)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server.server)  # type: ignore[attr-defined]  # not in the stubs

        if threading.current_thread() is threading.main_thread():
            open_parts.enter_context(on_stop_signal(lambda: over.put(False), on_defect=defect))
        if options.metrics_port is not None:
            from appliance.management.metrics import ManagementCollector
            from waferbox.runtime.metrics import MetricsServer

            try:
                collector = ManagementCollector(lambda: server.loop.run(service.state(), METRICS_SECONDS))
                metrics = MetricsServer(collector, MANAGEMENT.name, host, options.metrics_port)
            except OSError as error:
                logger.error("no figures can be served at port %d: %s", options.metrics_port, error)
                return 1
            open_parts.callback(metrics.close)
            service.metrics = metrics.address
        home = CoordinatorHome(
            management=address,
            host=host,
            cache_root=settings.cache_root,
            compile_root=settings.compile_root,
            terminated="its cluster went down, or its coordinator alone was terminated: start the cluster again if it "
            "does not run, then the script from its last checkpoint",
        )
        server.start()
        server.loop.run(_supervise(service, home))
        if page is not None:
            page.start(StoredSource(ServiceSource(service, server), finished))
        # Here, since the cluster waits for management, and coordinators start later.
        open_parts.enter_context(own_fork_server(COORDINATOR_PRELOAD))
        announce_to = os.devnull if options.announce_fd is None else options.announce_fd
        with open(announce_to, "wb", buffering=0) as announced:

            def announce(**told: object) -> None:
                with contextlib.suppress(BrokenPipeError):  # the launcher has ended, which `_watch` notices
                    announced.write(json.dumps(told).encode() + b"\n")

            announce(management=address, page="" if page is None else page.url, metrics=service.metrics)
            if options.announce_fd is not None:
                server.loop.run(_watch(options.announce_fd, lambda: over.put(True)))
            sweep_artifacts(settings.cache_root)  # here, so that no script waits for it
            end_jobs = over.get()
            if page is not None:
                page.close()
            server.loop.run(service.close(end_jobs=end_jobs))
            if end_jobs:
                announce(ended=True)
    if defects:
        logger.error("the management service has ended by a defect: %r", defects[0])
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
