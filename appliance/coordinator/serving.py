"""What a coordinator's process does: serve one job, from its start to its last report."""

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
    """What the main thread of a coordinator waits for."""

    TERMINATE = enum.auto()  # somebody wants the process to end
    OVER = enum.auto()  # the job is over
    CUT_OFF = enum.auto()  # from the script, for which another process is to wait


class CutOff(Exception):
    """The process is to end at once, and leave everything as it is."""


def serve_job(settings: CoordinatorSettings, compile_step: Compile, events: "queue.SimpleQueue[Event]") -> int:
    """Serve the job until it is over; returns the exit status. Raises CutOff."""
    server = make_server(for_scripts=True, job=settings.job)
    address = bind(server, settings.listen)
    listener = LinkListener(address, lambda defect: job.verdict.report_defect(defect))
    listener.add_to_server(server)
    record = JobRecord(record_folder(settings.cache_root, settings.job))
    try:
        if settings.restarted:
            record.hold()
        else:
            record.begin(is_kept=settings.may_restart)  # before anybody can know of us: there is one whenever we die
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
    """The next event; None when there is none for a while."""
    try:
        return events.get(timeout=TICK_SECONDS)
    except queue.Empty:
        return None
