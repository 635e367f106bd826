"""The work of a coordinator: serves one job, from its start to its last report."""

import asyncio
import enum
import logging
from typing import Any, Protocol

from appliance.coordinator.compilation import Compile
from appliance.coordinator.job import CoordinatedJob, JobHost
from appliance.coordinator.management_link import ManagementLink, ManagementLost
from appliance.coordinator.nodes.topology import COORDINATOR
from appliance.coordinator.record import JobRecord, RecordLost, RecordTaken
from appliance.coordinator.service import CoordinatorService
from appliance.coordinator.settings import TAKEN_STATUS, CoordinatorSettings
from waferbox import deadlines
from waferbox.host.event_loop import from_any_thread
from waferbox.runtime.outbox import JobLogHandler
from wsc.v1 import node_pb2

TICK_SECONDS = 1.0

logger = logging.getLogger(__name__)


class Event(enum.Enum):
    """An event that the main coroutine of a coordinator waits for."""

    TERMINATE = enum.auto()  # the process must end, with its cluster or without a successor
    OVER = enum.auto()  # the job is over
    CUT_OFF = enum.auto()  # the connection to the script broke, and a successor must wait for the script


class CutOff(Exception):
    """Raised when the process must end at once and leave everything as it is."""


class CoordinatorHost(JobHost, Protocol):
    """What a coordinator uses of its process and its host.

    Attributes:
        address: of the coordinator's server.
    """

    address: str

    async def serve(self, service: CoordinatorService) -> None:
        """Begins to serve."""

    async def stop(self, grace_seconds: float) -> None:
        """Ends the server, and the calls under way after so many seconds."""


async def serve_job(
    settings: CoordinatorSettings,
    compile_step: Compile,
    events: "asyncio.Queue[Event]",
    host: CoordinatorHost,
    record: JobRecord,
) -> int:
    """Serves the job until it is over.

    Args:
        settings: of the coordinator.
        compile_step: the compiler.
        events: the orders to this coordinator, which adds its own events.
        host: of the coordinator.
        record: of the job.

    Returns:
        The exit status of the process.

    Raises:
        CutOff: the script is cut off.
    """
    try:
        if settings.restarted:
            record.hold()
        else:
            # Before the address is sent, so that there is a record whenever this process dies.
            record.begin(is_kept=settings.may_restart)
        management = ManagementLink(settings, host.address, host.open_channel, host.identity, host.clock)
        request = await management.hello()
    except (ManagementLost, RecordTaken) as error:
        logger.error("%s", error)
        record.close()
        return TAKEN_STATUS if isinstance(error, RecordTaken) else 1
    lost = None
    try:
        if settings.restarted:
            record.take_over()
            management.continue_from(record.hello)
    except RecordLost as error:
        # It was removed if an earlier coordinator has ended the job and could not report it, or is lost.
        message = f"the job was over, or has lost its coordinator for good: another was started, and {error}"
        lost = node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=message)
    job = CoordinatedJob(
        settings,
        request,
        management,
        host,
        compile_step,
        record,
        on_over=lambda: events.put_nowait(Event.OVER),
        on_cut_off=lambda: events.put_nowait(Event.CUT_OFF),
    )
    _report_defects(job)
    await host.serve(CoordinatorService(job, host.clock))
    job.start()
    if lost is not None:
        job.verdict.report(lost)
    elif record.end is not None:
        job.end_as(record.end)
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
    await host.stop(deadlines.END.last_messages)
    return 0


def _report_defects(job: CoordinatedJob) -> None:
    """Ends the job after an unexpected exception in a callback or a timer of the event loop."""

    def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # Callbacks of gRPC serve all event loops of a process.
        if "handle" in context and "PollerCompletionQueue" not in repr(context["handle"]):
            job.verdict.report_defect(context["exception"])
        loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(failed)


async def _next(events: "asyncio.Queue[Event]") -> Event | None:
    """Returns the next event; None if there is none within a second."""
    try:
        async with asyncio.timeout(TICK_SECONDS):
            return await events.get()
    except TimeoutError:
        return None
