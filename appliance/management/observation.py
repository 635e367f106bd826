"""The service Observation: what can be seen of a job, while it runs and for a while afterwards."""

import queue
from collections.abc import Callable, Iterator

import grpc

from appliance.job_history import KINDS, JobHistory, TooSlow, lots
from appliance.management.coordination import Coordination
from appliance.management.jobs import JobTable
from wsc.v1 import observation_pb2, observation_pb2_grpc

MAX_TRACED_STEPS = 1000


class ObservationService(observation_pb2_grpc.ObservationServicer):
    """Serves Observation for the jobs of a management service."""

    def __init__(self, jobs: JobTable, coordination_of: Callable[[str], Coordination | None]) -> None:
        """coordination_of: the stream of a job's coordinator, by the job's name, while there is one."""
        self._jobs = jobs
        self._coordination_of = coordination_of

    def WatchJob(
        self, request: observation_pb2.WatchJobRequest, context: grpc.ServicerContext
    ) -> Iterator[observation_pb2.JobEvents]:
        history = self._history(request.job, context)
        unknown = [kind for kind in request.kinds if kind not in KINDS]
        if unknown:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"there is no kind {unknown[0]!r}, but there are {', '.join(KINDS)}"
            )
        kinds = list(dict.fromkeys(request.kinds)) or KINDS
        if not request.follow:
            yield from lots(history.kept(kinds))
            return
        watcher = history.watch(kinds, request.after)
        if not context.add_callback(lambda: history.unwatch(watcher)):
            history.unwatch(watcher)
        try:
            for lot in watcher.lots():
                yield from lots(lot)
        except TooSlow:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "more happens than this watcher takes")

    def TraceJob(
        self, request: observation_pb2.TraceJobRequest, context: grpc.ServicerContext
    ) -> Iterator[observation_pb2.TraceJobResponse]:
        self._history(request.job, context)
        if not 1 <= request.num_steps <= MAX_TRACED_STEPS:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a trace is of 1 to {MAX_TRACED_STEPS} steps")
        coordination = self._coordination_of(request.job)
        if coordination is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{request.job} is not running")
            return
        taken: queue.SimpleQueue[observation_pb2.Spans | None] = queue.SimpleQueue()
        if not coordination.trace(request, taken.put):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{request.job} is being traced already")
        # If the client leaves, the coordinator goes on to the end of the trace, and nobody listens.
        if not context.add_callback(lambda: taken.put(None)):
            return
        for spans in iter(taken.get, None):
            if spans.refusal:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{request.job} cannot be traced: {spans.refusal}")
            yield observation_pb2.TraceJobResponse(spans=spans.spans)
            if spans.last:
                return
        context.abort(grpc.StatusCode.ABORTED, f"{request.job} ended before the steps were over")

    def _history(self, name: str, context: grpc.ServicerContext) -> JobHistory:
        job = self._jobs.find(name)
        if job is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"there is no job {name!r}")
        return job.history
