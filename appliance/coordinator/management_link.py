"""The coordinator's stream to management: sends requests for nodes and reports, receives nodes and notices.

The job does not depend on the stream. When it breaks, the link opens another as soon as a management service answers at
the same address. Its hello has all that a restarted service needs.
"""

import asyncio
import collections
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import grpc

from appliance.coordinator.nodes.job_nodes import NodesRefused, OpenChannel
from appliance.coordinator.settings import CoordinatorSettings
from waferbox import deadlines
from waferbox.host.clock import Clock, seconds_since_1970
from waferbox.host.event_loop import Changes, Mailbox
from waferbox.runtime.registration import REFUSALS
from waferbox.security.guard import bearer
from waferbox.security.tokens import Kind, cluster_secret
from waferbox.wire_version import MISMATCH_REMEDY, WIRE_VERSION
from wsc.v1 import management_pb2, management_pb2_grpc, observation_pb2

CLOSE_STEP_SECONDS: Final = 0.5

_Responses: TypeAlias = AsyncIterator[management_pb2.CoordinateResponse]


class ManagementLost(NodesRefused):
    """Raised when management does not answer, or refuses the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """The coordinator's process, by which management finds it again.

    Attributes:
        process_id: of the process on its host.
        process_started: when it started, as of `waferbox.launch.spawn.process_started`.
        host: the host, as of `waferbox.links.socket_names.host_id`.
    """

    process_id: int
    process_started: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementCallbacks:
    """The callbacks for management's messages.

    cancel: the job is to end.
    lease_lost: management has lost this node of the job.
    known_as: the hello for a restarted management service at this address has changed.
    queued: the job waits at this position; at position 0 it no longer waits.
    preempt: others wait for the nodes of the job, if it is idle.
    trace: a user has requested a trace.
    history: returns the observations of the job so far.
    management_lost: management is up and refuses the job, for this reason: another attempt would not change that.
    defect: the link has ended with an unexpected exception.
    """

    cancel: Callable[[management_pb2.CancelNotice], None]
    lease_lost: Callable[[management_pb2.NodeInfo], None]
    known_as: Callable[[str, management_pb2.CoordinatorHello], None]
    queued: Callable[[management_pb2.QueueStatus], None]
    preempt: Callable[[], None]
    trace: Callable[[observation_pb2.TraceJobRequest], None]
    history: Callable[[], Iterable[observation_pb2.JobEvents]]
    management_lost: Callable[[str], None]
    defect: Callable[[Exception], None]


@dataclass(slots=True, eq=False)
class _NodeRequest:
    """A request for nodes, until its answer is taken."""

    request: management_pb2.CoordinateRequest
    answer: management_pb2.Acquired | None = None
    abandoned: bool = False  # nothing waits for the answer


class ManagementLink:
    """The coordinator's stream to management. Used in one event loop."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        address: str,
        open_channel: OpenChannel,
        identity: ProcessIdentity,
        clock: Clock,
    ) -> None:
        """Opens the stream; hello gets the first answer.

        Args:
            settings: of the coordinator.
            address: of this coordinator.
            open_channel: opens a channel to an address.
            identity: of this process.
            clock: of this host.
        """
        self._settings = settings
        self._address = address
        self._open_channel = open_channel
        self._identity = identity
        self._clock = clock
        self._changes = Changes()
        self._requests: Mailbox[management_pb2.CoordinateRequest] | None = None  # None: no stream
        self._request: management_pb2.CreateJobRequest | None = None  # the job, as management sent it last
        self._report = management_pb2.JobReport(phase=management_pb2.JOB_PHASE_STARTING)
        self._unanswered: collections.deque[_NodeRequest] = collections.deque()  # unanswered requests, in order
        self._nodes: Sequence[management_pb2.NodeInfo] = ()  # of the job
        self._started = 0.0
        self._lost = ""  # reason why there is no stream
        self._lost_at = 0.0
        self._closing = False
        self._keeping: asyncio.Task[None] | None = None
        self._channel, self._responses = self._open()

    async def hello(self) -> management_pb2.CreateJobRequest:
        """Returns the job as management describes it. Raises ManagementLost."""
        try:
            async with asyncio.timeout(deadlines.JOB_CREATION.hello):
                first = await anext(self._responses, None)
        except grpc.aio.AioRpcError as error:
            raise ManagementLost(f"the management service does not answer: {error.details()}") from error
        except TimeoutError as error:
            raise ManagementLost("the management service does not answer") from error
        if first is None or first.WhichOneof("kind") != "job":
            raise ManagementLost("the management service did not answer hello")
        if first.job.version != WIRE_VERSION:
            # It was installed under the processes of a cluster that runs.
            raise ManagementLost(
                f"this coordinator is of Waferbox version {WIRE_VERSION}, and the management service of version "
                f"{first.job.version or 'unknown'}: {MISMATCH_REMEDY}"
            )
        self._request = first.job
        return first.job

    def continue_from(self, earlier: management_pb2.CoordinatorHello) -> None:
        """Continues the work of the job's earlier coordinator, with the nodes of the last hello that it recorded."""
        self._nodes, self._started = earlier.nodes, earlier.started

    def listen(self, callbacks: ManagementCallbacks) -> None:
        """Begins to receive management's messages."""
        self._send_hello(callbacks)
        self._keeping = asyncio.create_task(self._keep_stream(callbacks), name="management")

        def ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and isinstance(error := task.exception(), Exception):
                callbacks.defect(error)
                self._closing = True
                self._changes.notify()

        self._keeping.add_done_callback(ended)

    @property
    def is_briefly_away(self) -> bool:
        """Whether management does not answer, and not for so long that nothing waits for it any more."""
        return bool(self._lost) and asyncio.get_running_loop().time() < self._away_until

    @property
    def _away_until(self) -> float:
        return self._lost_at + deadlines.COORDINATION.management_away

    async def acquire(self, wanted: management_pb2.Acquire) -> management_pb2.Acquired:
        """Requests nodes; waits as long as the job is in the queue. Raises ManagementLost. For a job without nodes."""
        return await self._await_nodes(management_pb2.CoordinateRequest(acquire=wanted), None)

    async def replace(
        self,
        lost: Iterable[management_pb2.NodeInfo],
        timeout_seconds: float | None = None,
        bound: Iterable[str] = (),
    ) -> management_pb2.Acquired:
        """Returns all nodes of the job, with replacements for the lost ones; waits until there are enough.

        Requests that wait at the same time are answered together.

        Args:
            lost: nodes as they were acquired. Management takes them from the job if it has not noticed their loss.
            timeout_seconds: None: no limit.
            bound: names of the members that only a node on the same host can replace.

        Raises:
            ManagementLost: management is away for long, or refuses; or the link was closed.
            TimeoutError: the time is over. Nodes that management finds later belong to the job, without a notice.
        """
        request = management_pb2.CoordinateRequest(replace=management_pb2.Replace(nodes=lost, bound=bound))
        return await self._await_nodes(request, timeout_seconds)

    async def reduce(
        self, nodes: Iterable[management_pb2.NodeInfo], timeout_seconds: float | None = None
    ) -> management_pb2.Acquired:
        """Reduces the job to these nodes, as the members that they name. Returns and raises as replace.

        Without nodes the job is preempted.
        """
        request = management_pb2.CoordinateRequest(reduce=management_pb2.Reduce(nodes=nodes))
        return await self._await_nodes(request, timeout_seconds)

    async def _await_nodes(
        self, request: management_pb2.CoordinateRequest, timeout_seconds: float | None
    ) -> management_pb2.Acquired:
        pending = _NodeRequest(request)
        loop = asyncio.get_running_loop()
        deadline = math.inf if timeout_seconds is None else loop.time() + timeout_seconds
        self._unanswered.append(pending)
        self._put(request)
        try:
            while pending.answer is None:
                now = loop.time()
                away_until = self._away_until if self._lost else math.inf
                if self._closing or away_until <= now:
                    raise ManagementLost(f"{self._lost or 'the job has ended'}, and the job had no nodes")
                if deadline <= now:
                    raise TimeoutError(self._lost or "management had no free node")
                until = min(deadline, away_until)
                was_lost = self._lost
                await self._changes.until(
                    lambda was_lost=was_lost: pending.answer or self._closing or self._lost != was_lost,  # type: ignore[misc]
                    None if until == math.inf else until - now,
                )
        finally:
            pending.abandoned = True
        return pending.answer

    def report(self, report: management_pb2.JobReport) -> None:
        """Sends a report, now or with the next hello."""
        self._report = report
        self._put(management_pb2.CoordinateRequest(report=report))

    async def close(self, *, wait: bool) -> None:
        """Ends the stream after all reports were sent. wait: for management, if it is away."""
        self._closing = True
        seconds = deadlines.END.report if wait else 0.0 if self._lost else deadlines.END.report_present
        if self._requests is not None:
            self._requests.close()
        self._changes.notify()
        if self._keeping is not None:
            # Counted in steps, as the time in which this process is suspended is no time of management's.
            for _ in range(math.ceil(seconds / CLOSE_STEP_SECONDS)):
                if not self._keeping.done():
                    await asyncio.wait([self._keeping], timeout=CLOSE_STEP_SECONDS)
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        await self._channel.close(None)

    def send(self, request: management_pb2.CoordinateRequest) -> bool:
        """Sends a message that is not part of the hello; False if management is away."""
        self._put(request)
        return self._requests is not None

    def _put(self, request: management_pb2.CoordinateRequest) -> None:
        if self._requests is not None:  # otherwise the next hello contains it
            self._requests.put(request)

    def _open(self, history: Iterable[observation_pb2.JobEvents] = ()) -> tuple[grpc.aio.Channel, _Responses]:
        """Opens a stream, beginning with the hello, on a new channel: a channel that failed waits longer."""
        requests: Mailbox[management_pb2.CoordinateRequest] = Mailbox()
        settings = self._settings
        requests.put(management_pb2.CoordinateRequest(hello=self._hello()))
        self._unanswered = collections.deque(pending for pending in self._unanswered if not pending.abandoned)
        for pending in self._unanswered:
            requests.put(pending.request)
        for events in history:
            requests.put(management_pb2.CoordinateRequest(events=events))
        if self._closing:
            requests.close()
        self._requests = requests
        channel = self._open_channel(settings.management)
        stub = management_pb2_grpc.ManagementStub(channel)
        token = cluster_secret().token(Kind.COORDINATOR, settings.job)
        return channel, aiter(stub.Coordinate(requests.messages(), metadata=(bearer(token),)))

    def _hello(self) -> management_pb2.CoordinatorHello:
        """Returns all that a restarted management service needs."""
        settings, identity = self._settings, self._identity
        hello = management_pb2.CoordinatorHello(job=settings.job, address=self._address, token=settings.token)
        if self._request is not None:
            hello.request.CopyFrom(self._request)
            hello.report.CopyFrom(self._report)
            hello.created, hello.started = settings.created, self._started
            hello.nodes.extend(self._nodes)
            hello.process_id, hello.process_started = identity.process_id, identity.process_started
            hello.host, hello.ingress = identity.host, settings.ingress
        return hello

    async def _keep_stream(self, callbacks: ManagementCallbacks) -> None:
        """Reads one stream after the other."""
        while True:
            try:
                async for response in self._responses:
                    self._dispatch(response, callbacks)
                if self._closing:
                    return  # management has received all reports
                self._break("has ended")
            except grpc.aio.AioRpcError as error:
                self._break("died or was cut off")
                if error.code() in REFUSALS or error.code() == grpc.StatusCode.NOT_FOUND:
                    self._lost = f"{self._named()} does not know the job: {error.details()}"
                    self._lost_at = -math.inf  # no wait for its return
                    self._changes.notify()
                    callbacks.management_lost(self._lost)
                    return
            await self._channel.close(None)
            await asyncio.sleep(deadlines.COORDINATION.retry)
            self._channel, self._responses = self._open(callbacks.history())

    def _dispatch(self, response: management_pb2.CoordinateResponse, callbacks: ManagementCallbacks) -> None:
        self._lost = ""
        match response.WhichOneof("kind"):
            case "job":
                self._request = response.job
                self._send_hello(callbacks)
            case "acquired":
                self._take(response.acquired)
                self._send_hello(callbacks)
            case "cancel":
                callbacks.cancel(response.cancel)
            case "lost":
                callbacks.lease_lost(response.lost)
            case "queue":
                callbacks.queued(response.queue)
            case "preempt":
                callbacks.preempt()
            case "trace":
                callbacks.trace(response.trace)
        self._changes.notify()

    def _send_hello(self, callbacks: ManagementCallbacks) -> None:
        callbacks.known_as(self._settings.management, self._hello())

    def _take(self, acquired: management_pb2.Acquired) -> None:
        """Hands nodes to the oldest request: management answers in order."""
        if self._unanswered:
            self._unanswered.popleft().answer = acquired
        if not acquired.refusal:
            self._nodes = acquired.nodes  # none after a preemption
            self._started = self._started or seconds_since_1970(self._clock)

    def _break(self, what: str) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if not self._lost:
            self._lost, self._lost_at = f"{self._named()} {what}", asyncio.get_running_loop().time()
        self._changes.notify()

    def _named(self) -> str:
        return f"the management service at {self._settings.management}"
