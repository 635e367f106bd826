"""A role's job for the event loop of its node: a thread executes the commands, which may block."""

import logging
from functools import partial

from waferbox.host.threads import CancellationToken, SerialThread
from waferbox.runtime.node_job import NodeJob
from wsc.v1 import node_pb2, observation_pb2

logger = logging.getLogger(__name__)


class ThreadedJob:
    """A NodeJob as an AttachedJob (waferbox.runtime.node_service). Used in one event loop, except for `report`."""

    def __init__(self, job: NodeJob) -> None:
        self._job = job
        self._thread = SerialThread("commands")

    def report(self) -> observation_pb2.NodeReport | None:
        return self._job.report()

    def check_progress(self) -> None:
        self._job.check_progress()

    async def execute(
        self, command: node_pb2.AttachRequest, cancellation: CancellationToken
    ) -> node_pb2.AttachResponse | None:
        return await self._thread.run(partial(_execute, self._job, command, cancellation))

    async def close(self) -> None:
        try:
            await self._thread.run(self._job.close)
        finally:
            self._thread.close()


def _execute(
    job: NodeJob, request: node_pb2.AttachRequest, cancellation: CancellationToken
) -> node_pb2.AttachResponse | None:
    match request.WhichOneof("kind"):
        case "prepare_input":
            job.prepare_input(request.prepare_input)
        case "load":
            missing = job.load(request.load, cancellation)
            loaded = node_pb2.Loaded(epoch=request.load.epoch, missing_states=missing)
            return node_pb2.AttachResponse(loaded=loaded)
        case "start":
            job.start(request.start)
        case "stop":
            job.stop(request.stop.epoch)
            return node_pb2.AttachResponse(stopped=node_pb2.Stopped(epoch=request.stop.epoch))
        case "release_snapshot":
            job.release_snapshot(request.release_snapshot.step)
        case "keep_recovery_point":
            job.keep_recovery_point(request.keep_recovery_point)
        case "drop_recovery_points":
            job.drop_recovery_points(request.drop_recovery_points.before)
        case "copy_recovery_point":
            job.copy_recovery_point(request.copy_recovery_point)
        case "trace":
            job.trace(request.trace)
        case kind:
            logger.warning("a message that this node does not know: %s", kind)
    return None
