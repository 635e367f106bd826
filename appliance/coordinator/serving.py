"""The work of a coordinator's process: serves one job, from its start to its last report."""

import asyncio
import enum
import logging
import os
from typing import Any

from appliance.coordinator.compilation import Compile
from appliance.coordinator.execution.output_links import ListenedLinks
from appliance.coordinator.job import CoordinatedJob
from appliance.coordinator.management_link import ManagementLink, ManagementLost, ProcessIdentity
from appliance.coordinator.nodes.topology import COORDINATOR
from appliance.coordinator.record import JobRecord, RecordLost, RecordTaken, record_folder
from appliance.coordinator.service import CoordinatorService
from appliance.coordinator.settings import TAKEN_STATUS, CoordinatorSettings
from waferbox import deadlines
from waferbox.host.clock import SystemClock
from waferbox.host.event_loop import from_any_thread
from waferbox.launch.spawn import process_started
from waferbox.links.listener import LinkListener
from waferbox.links.socket_names import host_id
from waferbox.rpc.address import bind
from waferbox.rpc.async_server import make_async_channel, make_async_server
from waferbox.rpc.server import LARGE_MESSAGE_BYTES, make_server
from waferbox.runtime.outbox import JobLogHandler
from wsc.v1 import coordinator_pb2_grpc, node_pb2

TICK_SECONDS = 1.0

logger = logging.getLogger(__name__)


class Event(enum.Enum):
    """An event that the main coroutine of a coordinator waits for."""

    TERMINATE = enum.auto()  # the process must end
    OVER = enum.auto()  # the job is over
    CUT_OFF = enum.auto()  # the connection to the script broke, and a successor must wait for the script


class CutOff(Exception):
    """Raised when the process must end at once and leave everything as it is."""


async def serve_job(settings: CoordinatorSettings, compile_step: Compile, events: "asyncio.Queue[Event]") -> int:
    """Serves the job until it is over; returns the exit status. Raises CutOff."""
    server = make_async_server(job=settings.job, for_scripts=True, max_message_bytes=LARGE_MESSAGE_BYTES)
    address = bind(server, settings.listen)
    # The links from other hosts are streams of bytes, which threads receive.
    link_server = make_server(job=settings.job)

    def report(defect: Exception) -> None:
        job.verdict.report_defect(defect)

    listener = LinkListener(bind(link_server, settings.listen), from_any_thread(report))
    listener.add_to_server(link_server)
    record = JobRecord(record_folder(settings.cache_root, settings.job))
    try:
        if settings.restarted:
            record.hold()
        else:
            # Before the address is sent, so that there is a record whenever this process dies.
            record.begin(is_kept=settings.may_restart)
        identity = ProcessIdentity(process_id=os.getpid(), process_started=process_started(os.getpid()), host=host_id())
        management = ManagementLink(settings, address, make_async_channel, identity, SystemClock())
        request = await management.hello()
    except (ManagementLost, RecordTaken) as error:
        logger.error("%s", error)
        listener.close()
        record.close()
        return TAKEN_STATUS if isinstance(error, RecordTaken) else 1
    lost = None
    try:
        if settings.restarted:
            record.take_over()
    except RecordLost as error:
        lost = node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=f"the coordinator has died, and {error}")
    job = CoordinatedJob(
        settings,
        request,
        management,
        ListenedLinks(listener),
        make_async_channel,
        compile_step,
        record,
        SystemClock(),
        on_over=lambda: events.put_nowait(Event.OVER),
        on_cut_off=lambda: events.put_nowait(Event.CUT_OFF),
    )
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(CoordinatorService(job, SystemClock()), server)

    def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # A callback or a timer, but none of gRPC, whose callbacks serve all event loops of a process.
        if "handle" in context and "PollerCompletionQueue" not in repr(context["handle"]):
            report(context["exception"])
        loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(failed)
    link_server.start()
    await server.start()
    job.start()
    if lost is not None:
        job.verdict.report(lost)
    with JobLogHandler(COORDINATOR, from_any_thread(job.observation.log)):
        while (event := await _next(events)) is not Event.OVER:
            if event is Event.TERMINATE:
                job.terminate()
            if event is Event.CUT_OFF:
                raise CutOff
            try:
                job.tick()
            except Exception as error:
                logger.exception("a defect in a tick of %s", settings.job)
                job.verdict.report_defect(error)
        await job.close()
    if job.verdict.failure is not None:
        # A script that connects later would not receive the failure.
        await job.session.wait_until_open(deadlines.END.last_messages)
    await server.stop(deadlines.END.last_messages)
    link_server.stop(None)
    listener.close()
    return 0


async def _next(events: "asyncio.Queue[Event]") -> Event | None:
    """Returns the next event; None if there is none within a second."""
    try:
        async with asyncio.timeout(TICK_SECONDS):
            return await events.get()
    except TimeoutError:
        return None
