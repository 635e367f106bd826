"""The coordinator's stream to management: sends requests for nodes and reports, receives nodes and notices.

The job does not depend on the stream. When it breaks, the link opens another as soon as a management service answers at
the same address. Its hello has all that a restarted service needs.
"""

import collections
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import grpc

from appliance.coordinator.nodes.job_nodes import NodesRefused
from appliance.coordinator.settings import CoordinatorSettings
from waferbox import deadlines
from waferbox.host.threads import GuardedThread, GuardedTimer
from waferbox.launch.spawn import process_started
from waferbox.links.socket_names import host_id
from waferbox.rpc.server import make_channel
from waferbox.runtime.registration import REFUSALS
from waferbox.security.tokens import Kind, cluster_secret
from wsc.v1 import management_pb2, management_pb2_grpc, observation_pb2

CLOSE_STEP_SECONDS: Final = 0.5

_Stream: TypeAlias = "grpc.CallIterator[management_pb2.CoordinateResponse]"


class ManagementLost(NodesRefused):
    """Raised when management does not answer, or refuses the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementCallbacks:
    """The callbacks for management's messages, called in the thread of the link.

    cancel: a user has cancelled the job.
    lease_lost: management has lost this node of the job.
    known_as: the hello for a restarted management service at this address has changed.
    queued: the job waits at this position; at position 0 it no longer waits.
    trace: a user has requested a trace.
    history: returns the observations of the job so far.
    management_lost: management is up and refuses the job, for this reason: another attempt would not change that.
    defect: the thread of the link has ended with an unexpected exception.
    """

    cancel: Callable[[], None]
    lease_lost: Callable[[management_pb2.NodeInfo], None]
    known_as: Callable[[str, management_pb2.CoordinatorHello], None]
    queued: Callable[[management_pb2.QueueStatus], None]
    trace: Callable[[observation_pb2.TraceJobRequest], None]
    history: Callable[[], Iterable[observation_pb2.JobEvents]]
    management_lost: Callable[[str], None]
    defect: Callable[[Exception], None]


@dataclass(slots=True, eq=False)
class _NodeRequest:
    """A request for nodes, until its answer is taken."""

    request: management_pb2.CoordinateRequest
    answer: management_pb2.Acquired | None = None
    abandoned: bool = False  # no thread waits for the answer


class ManagementLink:
    """The coordinator's stream to management, with the thread that reads it.

    acquire, replace, reduce, report, send and lost_within can be called from any thread.
    """

    def __init__(self, settings: CoordinatorSettings, address: str) -> None:
        """address: of this coordinator."""
        self._settings = settings
        self._address = address
        self._changed = threading.Condition()
        self._requests: queue.SimpleQueue[management_pb2.CoordinateRequest | None] | None = None  # None: no stream
        self._request: management_pb2.CreateJobRequest | None = None  # the job, as management sent it last
        self._report = management_pb2.JobReport(phase=management_pb2.JOB_PHASE_STARTING)
        self._unanswered: collections.deque[_NodeRequest] = collections.deque()  # unanswered requests, in order
        self._nodes: Sequence[management_pb2.NodeInfo] = ()  # of the job
        self._started = 0.0
        self._lost = ""  # reason why there is no stream
        self._lost_at = 0.0
        self._closing = False
        self._over = threading.Event()
        self._thread: GuardedThread | None = None
        self._channel, self._call = self._open()

    def hello(self) -> management_pb2.CreateJobRequest:
        """Returns the job as management describes it. Raises ManagementLost."""
        timer = GuardedTimer(
            deadlines.JOB_CREATION.hello,
            self._channel.close,
            name="hello-timeout",
            on_defect=lambda error: None,  # it is logged, and management ends a coordinator that sends nothing
        )
        timer.start()
        try:
            first = next(iter(self._call), None)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            raise ManagementLost(f"the management service does not answer: {error.details()}") from error
        finally:
            timer.cancel()
        if first is None or first.WhichOneof("kind") != "job":
            raise ManagementLost("the management service did not answer hello")
        self._request = first.job
        return first.job

    def listen(self, callbacks: ManagementCallbacks) -> None:
        """Begins to receive management's messages."""
        self._send_hello(callbacks)

        def on_defect(error: Exception) -> None:
            callbacks.defect(error)
            with self._changed:
                self._closing = True
                self._changed.notify_all()

        self._thread = GuardedThread(lambda: self._keep_stream(callbacks), name="management", on_defect=on_defect)
        self._thread.start()

    def acquire(self, wanted: management_pb2.Acquire) -> management_pb2.Acquired:
        """Requests nodes; waits as long as the job is in the queue. Raises ManagementLost. To be called once."""
        return self._await_nodes(management_pb2.CoordinateRequest(acquire=wanted), None)

    def replace(
        self, lost: Iterable[management_pb2.NodeInfo], timeout_seconds: float | None = None
    ) -> management_pb2.Acquired:
        """Returns all nodes of the job, with replacements for the lost ones; waits until there are enough.

        Requests that wait at the same time are answered together.

        Args:
            lost: nodes as they were acquired. Management takes them from the job if it has not noticed their loss.
            timeout_seconds: None: no limit.

        Raises:
            ManagementLost: management is away for long, or refuses; or the link was closed.
            TimeoutError: the time is over. Nodes that management finds later belong to the job, without a notice.
        """
        request = management_pb2.CoordinateRequest(replace=management_pb2.Replace(nodes=lost))
        return self._await_nodes(request, timeout_seconds)

    def reduce(
        self, nodes: Iterable[management_pb2.NodeInfo], timeout_seconds: float | None = None
    ) -> management_pb2.Acquired:
        """Reduces the job to these nodes, as the members that they name. Returns and raises as replace."""
        request = management_pb2.CoordinateRequest(reduce=management_pb2.Reduce(nodes=nodes))
        return self._await_nodes(request, timeout_seconds)

    def _await_nodes(
        self, request: management_pb2.CoordinateRequest, timeout_seconds: float | None
    ) -> management_pb2.Acquired:
        pending = _NodeRequest(request)
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._changed:
            self._unanswered.append(pending)
            self._put(request)
            try:
                while pending.answer is None:
                    now = time.monotonic()
                    away_until = self._lost_at + deadlines.COORDINATION.management_away if self._lost else math.inf
                    if self._closing or away_until <= now:
                        raise ManagementLost(f"{self._lost or 'the job has ended'}, and the job had no nodes yet")
                    if deadline <= now:
                        raise TimeoutError(f"management had no nodes within {timeout_seconds:g} s")
                    until = min(deadline, away_until)
                    self._changed.wait(None if until == math.inf else until - now)
            finally:
                pending.abandoned = True
            return pending.answer

    def report(self, report: management_pb2.JobReport) -> None:
        """Sends a report, now or with the next hello."""
        with self._changed:
            self._report = report
            self._put(management_pb2.CoordinateRequest(report=report))

    def lost_within(self, seconds: float) -> str:
        """Waits up to this many seconds for the loss of management; returns its reason, or an empty text."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost, seconds)
            return self._lost

    def close(self, *, wait: bool) -> None:
        """Ends the stream after all reports were sent. wait: for management, if it is away."""
        with self._changed:
            self._closing = True
            seconds = deadlines.END.report if wait else 0.0 if self._lost else deadlines.END.report_present
            if self._requests is not None:
                self._requests.put(None)
            self._changed.notify_all()
        if self._thread is not None:
            # Counted in steps, as the time in which this process is suspended is no time of management's.
            for _ in range(math.ceil(seconds / CLOSE_STEP_SECONDS)):
                self._thread.join(CLOSE_STEP_SECONDS)
        self._over.set()
        self._channel.close()  # ends the stream, if it has not ended
        if self._thread is not None:
            self._thread.join()

    def send(self, request: management_pb2.CoordinateRequest) -> bool:
        """Sends a message that is not part of the hello; False if management is away."""
        with self._changed:
            self._put(request)
            return self._requests is not None

    def _put(self, request: management_pb2.CoordinateRequest) -> None:
        if self._requests is not None:  # otherwise the next hello contains it
            self._requests.put(request)

    def _open(self, history: Iterable[observation_pb2.JobEvents] = ()) -> tuple[grpc.Channel, _Stream]:
        """Opens a stream, beginning with the hello, on a new channel: a channel that failed waits longer."""
        requests: queue.SimpleQueue[management_pb2.CoordinateRequest | None] = queue.SimpleQueue()
        settings = self._settings
        with self._changed:
            requests.put(management_pb2.CoordinateRequest(hello=self._hello()))
            self._unanswered = collections.deque(pending for pending in self._unanswered if not pending.abandoned)
            for pending in self._unanswered:
                requests.put(pending.request)
            for events in history:
                requests.put(management_pb2.CoordinateRequest(events=events))
            if self._closing:
                requests.put(None)
            self._requests = requests
        channel = make_channel(settings.management, cluster_secret().token(Kind.COORDINATOR, settings.job))
        return channel, management_pb2_grpc.ManagementStub(channel).Coordinate(iter(requests.get, None))

    def _hello(self) -> management_pb2.CoordinatorHello:
        """Returns all that a restarted management service needs."""
        settings = self._settings
        hello = management_pb2.CoordinatorHello(job=settings.job, address=self._address, token=settings.token)
        if self._request is not None:
            hello.request.CopyFrom(self._request)
            hello.report.CopyFrom(self._report)
            hello.created, hello.started = settings.created, self._started
            hello.nodes.extend(self._nodes)
            hello.process_id, hello.process_started = os.getpid(), process_started(os.getpid())
            hello.host, hello.ingress = host_id(), settings.ingress
        return hello

    def _keep_stream(self, callbacks: ManagementCallbacks) -> None:
        """Reads one stream after the other."""
        while True:
            try:
                for response in self._call:
                    self._dispatch(response, callbacks)
                if self._closing:
                    return  # management has received all reports
                self._break("has ended")
            except grpc.RpcError as error:
                assert isinstance(error, grpc.Call)
                self._break("died or was cut off")
                if error.code() in REFUSALS or error.code() == grpc.StatusCode.NOT_FOUND:
                    callbacks.management_lost(f"{self._named()} does not know the job: {error.details()}")
                    return
            self._channel.close()
            if self._over.wait(deadlines.COORDINATION.retry):
                return
            self._channel, self._call = self._open(callbacks.history())
            if self._over.is_set():
                self._channel.close()

    def _dispatch(self, response: management_pb2.CoordinateResponse, callbacks: ManagementCallbacks) -> None:
        with self._changed:
            self._lost = ""
            match response.WhichOneof("kind"):
                case "job":
                    self._request = response.job
                case "acquired":
                    self._take(response.acquired)
            self._changed.notify_all()
        match response.WhichOneof("kind"):
            case "job" | "acquired":
                self._send_hello(callbacks)
            case "cancel":
                callbacks.cancel()
            case "lost":
                callbacks.lease_lost(response.lost)
            case "queue":
                callbacks.queued(response.queue)
            case "trace":
                callbacks.trace(response.trace)

    def _send_hello(self, callbacks: ManagementCallbacks) -> None:
        with self._changed:
            hello = self._hello()
        callbacks.known_as(self._settings.management, hello)

    def _take(self, acquired: management_pb2.Acquired) -> None:
        """Hands nodes to the oldest request: management answers in order."""
        if self._unanswered:
            self._unanswered.popleft().answer = acquired
        if acquired.nodes:
            self._nodes = acquired.nodes
            self._started = self._started or time.time()

    def _break(self, what: str) -> None:
        with self._changed:
            assert self._requests is not None
            self._requests.put(None)  # ends gRPC's thread that waits for requests
            self._requests = None
            if not self._lost:
                self._lost, self._lost_at = f"{self._named()} {what}", time.monotonic()
            self._changed.notify_all()

    def _named(self) -> str:
        return f"the management service at {self._settings.management}"
