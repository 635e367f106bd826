"""Management's side of a coordinator's stream: receives requests and reports, sends leased nodes and notices."""

from collections.abc import AsyncIterator, Callable, Sequence

from appliance.management.jobs import ENDED, JobEntry, JobTable
from appliance.management.nodes.job_queue import Waiting
from appliance.management.nodes.registry import NodeRegistry
from appliance.management.requests import problem_of_acquire, problem_of_nodes, problem_of_report
from waferbox.host.clock import Clock, seconds_since_1970
from waferbox.host.event_loop import Mailbox
from waferbox.security.tokens import Kind, cluster_secret
from wsc.v1 import management_pb2, observation_pb2

# --- Lease tokens: they show a node that management gave it to the coordinator's job ----------------------------------


def with_lease(node: management_pb2.NodeInfo, job: str, time_ns: int) -> management_pb2.NodeInfo:
    """Returns the node with the token of a new lease of this time, which is later than all before."""
    leased = management_pb2.NodeInfo()
    leased.CopyFrom(node)
    leased.lease = cluster_secret().token(Kind.LEASE, job, node.instance, str(time_ns))
    return leased


# --- Management's side of the stream ----------------------------------------------------------------------------------


class BadRequest(ValueError):
    """Raised for an invalid message of a coordinator."""


class Coordination:
    """Management's side of one Coordinate stream, and the Waiter of its job. responses() ends with the stream."""

    def __init__(self, job: JobEntry, jobs: JobTable, registry: NodeRegistry, clock: Clock) -> None:
        self._job = job
        self._jobs = jobs
        self._registry = registry
        self._clock = clock
        self._take: Callable[[observation_pb2.Spans | None], None] | None = None  # gets the spans of the current trace
        self._outbox: Mailbox[management_pb2.CoordinateResponse] = Mailbox()
        self.changed()

    def responses(self) -> AsyncIterator[management_pb2.CoordinateResponse]:
        return self._outbox.messages()

    async def read(self, requests: AsyncIterator[management_pb2.CoordinateRequest]) -> None:
        """Handles the coordinator's messages until the end of the stream. Raises BadRequest."""
        try:
            async for request in requests:
                match request.WhichOneof("kind"):
                    case "acquire":
                        _check(problem_of_acquire(request.acquire))
                        self._enqueue(request.acquire)
                    case "replace":
                        _check(problem_of_nodes(request.replace.nodes))
                        self._replace(request.replace)
                    case "reduce":
                        _check(problem_of_nodes(request.reduce.nodes))
                        _check(self._registry.reduce(self._job.name, request.reduce.nodes, self))
                    case "report":
                        _check(problem_of_report(request.report))
                        self.report(request.report)
                    case "events":
                        self._job.history.add(request.events.events)
                    case "spans":
                        self._traced(request.spans)
        finally:
            self.end()

    def changed(self) -> None:
        """Sends the changed job to the coordinator."""
        request = management_pb2.CreateJobRequest()
        request.CopyFrom(self._job.request)
        self._outbox.put(management_pb2.CoordinateResponse(job=request))

    def cancel(self, cause: str = "", *, is_error: bool = False) -> None:
        """Sends the order to end the job. cause and is_error: see CancelNotice."""
        notice = management_pb2.CancelNotice(cause=cause, is_error=is_error)
        self._outbox.put(management_pb2.CoordinateResponse(cancel=notice))

    def preempt(self) -> None:
        """Requests the nodes of the job, which is idle, for others."""
        self._outbox.put(management_pb2.CoordinateResponse(preempt=management_pb2.Preempt()))

    def lost(self, node: management_pb2.NodeInfo) -> None:
        """Reports a lost node to the coordinator."""
        self._outbox.put(management_pb2.CoordinateResponse(lost=node))

    def queued(self, status: management_pb2.QueueStatus) -> None:
        self._outbox.put(management_pb2.CoordinateResponse(queue=self._jobs.with_holders(status)))

    def admitted(self, nodes: Sequence[management_pb2.NodeInfo]) -> None:
        now = seconds_since_1970(self._clock)
        self._job.started = self._job.started or now
        if not self._job.nodes:
            self._job.admitted = now
        self._job.nodes = nodes
        leased = [with_lease(node, self._job.name, self._clock.time_ns()) for node in nodes]
        self._outbox.put(management_pb2.CoordinateResponse(acquired=management_pb2.Acquired(nodes=leased)))

    def refused(self, refusal: str) -> None:
        self._outbox.put(management_pb2.CoordinateResponse(acquired=management_pb2.Acquired(refusal=refusal)))

    def trace(
        self, request: observation_pb2.TraceJobRequest, take: Callable[[observation_pb2.Spans | None], None]
    ) -> bool:
        """Requests a trace of some steps; False during another trace.

        take(spans) is called with spans as they arrive, and with None at the end.
        """
        if self._take is not None:
            return False
        self._take = take
        self._outbox.put(management_pb2.CoordinateResponse(trace=request))
        return True

    def _traced(self, spans: observation_pb2.Spans | None) -> None:
        take = self._take
        if spans is None or spans.last:
            self._take = None
        if take is not None:
            take(spans)

    def end(self) -> None:
        """Ends the stream: the job leaves the queue, and responses() ends."""
        self._traced(None)
        self._registry.leave(self._job.name, self, has_ended=self._job.report.phase in ENDED)
        self._outbox.close()

    def _enqueue(self, wanted: management_pb2.Acquire) -> None:
        job = self._job
        # A preempted job queues behind those that wait already: they have waited while it had nodes.
        created = seconds_since_1970(self._clock) if wanted.former else job.created
        waiting = Waiting(job=job.name, wanted=wanted, priority=job.request.priority, created=created)
        self._registry.enqueue(waiting, self)

    def report(self, report: management_pb2.JobReport) -> None:
        """Takes a report of the job."""
        if report.phase in ENDED:
            # The coordinator still runs for a while, but an ended job must not hold up others in the queue.
            self._registry.leave(self._job.name, self, has_ended=True)
        self._job.take(report, seconds_since_1970(self._clock))
        self._job.pace.add(report, self._clock.monotonic())

    def _replace(self, request: management_pb2.Replace) -> None:
        job, priority = self._job, self._job.request.priority
        _check(self._registry.replace(job.name, request, self, priority=priority, created=job.created))


def _check(problem: str) -> None:
    if problem:
        raise BadRequest(problem)
