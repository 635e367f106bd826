"""The work of a coordinator's process: serves one job, from its start to its last report."""

import enum
import logging
import queue

from appliance.coordinator.compilation import Compile
from appliance.coordinator.job import CoordinatedJob
from appliance.coordinator.management_link import ManagementLink, ManagementLost
from appliance.coordinator.nodes.topology import COORDINATOR
from appliance.coordinator.record import JobRecord, RecordLost, RecordTaken, record_folder
from appliance.coordinator.service import CoordinatorService
from appliance.coordinator.settings import TAKEN_STATUS, CoordinatorSettings
from waferbox import deadlines
from waferbox.links.listener import LinkListener
from waferbox.rpc.address import bind
from waferbox.rpc.server import make_server
from waferbox.runtime.outbox import JobLogHandler
from wsc.v1 import coordinator_pb2_grpc, node_pb2

TICK_SECONDS = 1.0

logger = logging.getLogger(__name__)


class Event(enum.Enum):
    """An event that the main thread of a coordinator waits for."""

    TERMINATE = enum.auto()  # the process must end
    OVER = enum.auto()  # the job is over
    CUT_OFF = enum.auto()  # the connection to the script broke, and a successor must wait for the script


class CutOff(Exception):
    """Raised when the process must end at once and leave everything as it is."""


def serve_job(settings: CoordinatorSettings, compile_step: Compile, events: "queue.SimpleQueue[Event]") -> int:
    """Serves the job until it is over; returns the exit status. Raises CutOff."""
    server = make_server(for_scripts=True, job=settings.job)
    address = bind(server, settings.listen)
    listener = LinkListener(address, lambda defect: job.verdict.report_defect(defect))
    listener.add_to_server(server)
    record = JobRecord(record_folder(settings.cache_root, settings.job))
    try:
        if settings.restarted:
            record.hold()
        else:
            # Before the address is sent, so that there is a record whenever this process dies.
            record.begin(is_kept=settings.may_restart)
        management = ManagementLink(settings, address)
        request = management.hello()
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
        listener,
        compile_step,
        record,
        on_over=lambda: events.put(Event.OVER),
        on_cut_off=lambda: events.put(Event.CUT_OFF),
    )
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(CoordinatorService(job), server)
    server.start()
    job.start()
    if lost is not None:
        job.verdict.report(lost)
    with JobLogHandler(COORDINATOR, job.observation.log):
        while (event := _next(events)) is not Event.OVER:
            if event is Event.TERMINATE:
                job.terminate()
            if event is Event.CUT_OFF:
                raise CutOff
            try:
                job.tick()
            except Exception as error:
                logger.exception("a defect in a tick of %s", settings.job)
                job.verdict.report_defect(error)
        job.close()
    if job.verdict.failure is not None:
        # A script that connects later would not receive the failure.
        job.session.wait_until_open(deadlines.END.last_messages)
    server.stop(deadlines.END.last_messages).wait()
    listener.close()
    return 0


def _next(events: "queue.SimpleQueue[Event]") -> Event | None:
    """Returns the next event; None if there is none within a second."""
    try:
        return events.get(timeout=TICK_SECONDS)
    except queue.Empty:
        return None
