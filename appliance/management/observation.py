"""The service Observation: reports, logs, scalars and traces of a job, while it runs and for a while afterwards."""

from collections.abc import AsyncIterator, Callable

import grpc

from appliance.job_history import KINDS, JobHistory, TooSlow, batches
from appliance.management.coordination import Coordination
from appliance.management.jobs import JobTable
from appliance.management.requests import shown
from waferbox.host.event_loop import Mailbox
from waferbox.rpc.async_server import Context, when_over
from wsc.v1 import observation_pb2, observation_pb2_grpc

MAX_TRACED_STEPS = 1000


class ObservationService(observation_pb2_grpc.ObservationServicer):
    """Serves Observation, in an event loop, for the jobs of a management service."""

    def __init__(self, jobs: JobTable, coordination_of: Callable[[str], Coordination | None]) -> None:
        """coordination_of: returns the stream of a job's coordinator, if there is one, by the job's name."""
        self._jobs = jobs
        self._coordination_of = coordination_of

    async def WatchJob(
        self,
        request: observation_pb2.WatchJobRequest,
        context: Context,
    ) -> AsyncIterator[observation_pb2.JobEvents]:
        history = await self._history(request.job, context)
        unknown = [kind for kind in request.kinds if kind not in KINDS]
        if unknown:
            message = f"there is no kind {shown(unknown[0])}, but there are {', '.join(KINDS)}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        kinds = list(dict.fromkeys(request.kinds)) or KINDS
        if not request.follow:
            for events in batches(history.kept(kinds)):
                yield events
            return
        watcher = history.watch(kinds, request.after)
        when_over(context, lambda: history.unwatch(watcher))
        try:
            async for batch in watcher.batches():
                for events in batches(batch):
                    yield events
        except TooSlow:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this watcher is too slow: too many events wait")

    async def TraceJob(
        self,
        request: observation_pb2.TraceJobRequest,
        context: Context,
    ) -> AsyncIterator[observation_pb2.TraceJobResponse]:
        await self._history(request.job, context)
        if not 1 <= request.num_steps <= MAX_TRACED_STEPS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a trace is of 1 to {MAX_TRACED_STEPS} steps")
        coordination = self._coordination_of(request.job)
        if coordination is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{request.job} is not running")
        taken: Mailbox[observation_pb2.Spans] = Mailbox()
        # If the client leaves, the coordinator completes the trace, and the spans are dropped.
        when_over(context, taken.close)
        if not coordination.trace(request, lambda spans: taken.close() if spans is None else taken.put(spans)):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{request.job} is being traced already")
        async for spans in taken.messages():
            if spans.refusal:
                message = f"{request.job} cannot be traced: {spans.refusal}"
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
            yield observation_pb2.TraceJobResponse(spans=spans.spans)
            if spans.last:
                return
        await context.abort(grpc.StatusCode.ABORTED, f"{request.job} ended before the steps were over")

    async def _history(self, name: str, context: Context) -> JobHistory:
        job = self._jobs.find(name)
        if job is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no job {shown(name)}")
        return job.history
