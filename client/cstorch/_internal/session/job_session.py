"""The session of a script with the coordinator of its job, continued with the coordinators that take over."""

import asyncio
import copy
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import grpc

from cstorch._internal.log import SlowWork
from cstorch._internal.session import failures
from cstorch.errors import ClusterUnreachableError, CompileError, ConfigurationError, CstorchError, NodeLostError
from waferbox import deadlines
from waferbox.holders import holders_text
from waferbox.host.event_loop import Changes
from waferbox.host.slow_work import SLOW_SECONDS
from waferbox.rpc.server import is_from_ingress, status_of, through
from wsc.v1 import coordinator_pb2, coordinator_pb2_grpc, management_pb2, management_pb2_grpc

RETRY_SECONDS: Final = 0.2

_Response = TypeVar("_Response")
# Returns a channel to a server that answers, from its address, its kind and the token of all calls. Raises
# ClusterUnreachableError.
Connect: TypeAlias = Callable[[str, str, str], Awaitable[grpc.aio.Channel]]

logger = logging.getLogger("cstorch.job")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConnection:
    """A connection to one of the coordinators of a job.

    incarnation: the number of coordinators that this process was connected to before.
    coordinator: its address, as management names it.
    """

    incarnation: int
    coordinator: str
    channel: grpc.aio.Channel
    stub: "coordinator_pb2_grpc.CoordinatorAsyncStub"
    session: AsyncIterator[coordinator_pb2.SessionResponse]


class JobSession:
    """The session of a script with its job. A task replaces the connection when another coordinator takes over.

    Used in one event loop, except for `alive`, `failure` and `connection`, which any thread may read.
    """

    def __init__(
        self,
        created: management_pb2.CreateJobResponse,
        management: "management_pb2_grpc.ManagementAsyncStub",
        connect: Connect,
        *,
        gateway: str,
        may_be_replaced: bool,
        has_cluster_ended: Callable[[], bool],
        log: logging.Logger = logger,
    ) -> None:
        """
        Args:
            created: management's answer.
            management: the management service.
            connect: connects to a server.
            gateway: the address in front of the coordinators'; empty if there is none.
            may_be_replaced: whether another coordinator may take over.
            has_cluster_ended: whether the cluster is known to have ended, so that management will not come back.
            log: of the messages to the user.
        """
        self.job = created.job
        self.token = created.token
        self.gateway = gateway
        self.connection: CoordinatorConnection
        self._management = management
        self._connect_to = connect
        self._may_be_replaced = may_be_replaced  # False once no other coordinator will take over
        self._has_cluster_ended = has_cluster_ended
        self._log = log
        self.findings: deque[str] = deque()  # what the script does otherwise than it says; taken by its thread
        self.compiling: SlowWork | None = None  # takes the progress of the compile that the script waits for
        self._changes = Changes()  # of the connection, of whether it may be replaced, and of the next four
        self._failure: CstorchError | None = None
        self._is_answered = False  # the first coordinator has opened the session, or its connection broke
        self._is_ready = False  # the job has its nodes, or has ended
        self._is_closed = False
        self._first = created.coordinator
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connects to the coordinator, and opens the session. Raises ClusterUnreachableError."""
        self.connection = await self._connect_first(self._first)
        self._watching = asyncio.create_task(self._watch())
        seconds = deadlines.JOB_CREATION.opened
        try:
            if not await self._changes.until(lambda: self._is_answered or self._is_ready, seconds):
                address = through(self.gateway, self.connection.coordinator)
                raise ClusterUnreachableError(
                    f"the coordinator of {self.job} at {address} has not opened the session within {seconds:g} s. "
                    "Either it does not run, as `waferbox logs` shows, or this process cannot receive its answer, as "
                    "for want of memory or threads (`ulimit -v`, `ulimit -u`)"
                )
        except BaseException:
            await self.close(is_cancelled=True)
            raise

    @property
    def alive(self) -> bool:
        """Whether the job can take another execution."""
        is_watched = self._watching is not None and not self._watching.done()
        return not self._is_closed and self._failure is None and is_watched

    @property
    def failure(self) -> CstorchError | None:
        """The cause of the job's end, if the session has reported one: a new error each time, to be raised."""
        return copy.copy(self._failure)

    async def until_ready(self) -> None:
        """Waits until the job has its nodes, or has ended: the time in the queue has no deadline."""
        await self._changes.until(lambda: self._is_ready)

    async def call(
        self, call: "Callable[[coordinator_pb2_grpc.CoordinatorAsyncStub], Awaitable[_Response]]"
    ) -> _Response:
        """Calls the coordinator, and its successor if it dies meanwhile. Raises RpcError for any other failure."""
        while True:
            connection = self.connection
            try:
                return await call(connection.stub)
            except grpc.RpcError as error:
                if not await self.has_successor(error, connection.incarnation):
                    raise

    async def has_successor(self, error: grpc.RpcError, incarnation: int) -> bool:
        """Whether a call failed with the end of its coordinator, and another has taken over; waits for the other.

        Args:
            error: The error of the call.
            incarnation: The incarnation of the coordinator that was called.
        """
        if not is_unanswered(error):
            return False
        await self._changes.until(
            lambda: self.connection.incarnation > incarnation or not self._may_be_replaced,
            deadlines.COORDINATION.another,
        )
        return self.connection.incarnation > incarnation

    # --- Why the job ended --------------------------------------------------------------------------------------------

    async def wait_for_failure(self) -> CstorchError | None:
        """Returns the cause of the job's end, after a call that failed with it: the session reports the cause soon."""
        assert self._watching is not None
        await asyncio.wait([self._watching], timeout=deadlines.END.verdict)
        return self.failure

    async def reason(self, error: Exception, doing: str) -> CstorchError:
        """Returns the error to raise for any failure of an operation with the job; no other place decides on it.

        The end of the job has precedence over the error of a call. The death of one node ends the job, and with it the
        states on all others, so calls to these fail with errors that do not name the cause.

        Args:
            error: The error of a gRPC call or of a link, or one that was made of these.
            doing: The operation, e.g. "compiling the step".
        """
        failure = self.failure if _is_refusal(error) else await self.wait_for_failure()
        return failure or failures.from_error(error, doing)

    # --- The session --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Takes the messages of the session until it ends and no other coordinator takes over."""
        try:
            while True:
                try:
                    async for response in self.connection.session:
                        self._take(response)
                    return
                except grpc.RpcError as error:
                    self._is_answered = True
                    self._changes.notify()
                    if self._failure is not None:
                        return
                    if not await self._replace(error):
                        self._failure = self._failure or await self._coordinator_lost(error)
                        return
        except Exception as error:
            logger.exception("a defect in the session of %s", self.job)
            self._failure = self._failure or failures.from_defect(error)
        finally:
            self._may_be_replaced = False
            self._is_ready = True
            self._changes.notify()

    def _take(self, response: coordinator_pb2.SessionResponse) -> None:
        match response.WhichOneof("kind"):
            case "opened":
                self._is_answered = True
            case "failure" if self._failure is None:
                self._failure = failures.from_failure(response.failure)
            case "queue":
                self._log_queue(response.queue)
            case "ready":
                self._is_ready = True
            case "advice":
                self._log.warning("%s", response.advice)
            case "finding":
                self.findings.append(response.finding)
            case "compiling" if self.compiling is not None:
                self.compiling.where = _progress_text(response.compiling)
        self._changes.notify()

    def _log_queue(self, status: management_pb2.QueueStatus) -> None:
        if status.position:
            position = f"{status.position} of {status.length}"
            held = holders_text(status.holders)
            waiting_for = f"{status.waiting_for} ({held})" if held else status.waiting_for
            self._log.info("Job %s waits in the queue (%s) for %s", self.job, position, waiting_for)
        elif status.waiting_for:
            self._log.warning("Job %s waits for a replacement of a lost node: %s", self.job, status.waiting_for)
        else:
            self._log.info("Job %s has its nodes now", self.job)

    async def _coordinator_lost(self, error: grpc.RpcError) -> CstorchError:
        if not is_unanswered(error):
            return failures.from_rpc_error(error, "the job was under way")
        if self.gateway and not is_from_ingress(error):
            details = status_of(error).details()
            return NodeLostError(
                f"the connection to the ingress at {self.gateway} broke ({details}), and {self.job} ends "
                "with it: start the script again when the ingress is back"
            )
        cause = await self._cause_of_end()
        return NodeLostError(
            f"the coordinator of {self.job} at {through(self.gateway, self.connection.coordinator)} died, or cannot be "
            "reached" + (f": {cause}" if cause else "")
        )

    async def _cause_of_end(self) -> str:
        """Returns the cause of the job's end by management; empty if management has none in time."""
        request = management_pb2.GetJobRequest(job=self.job, wait_seconds=deadlines.END.cause)
        try:
            timeout = deadlines.END.cause + deadlines.END.cause_answer
            job = (await self._management.GetJob(request, timeout=timeout)).job
        except grpc.RpcError as error:
            if is_unanswered(error) and self.gateway and not is_from_ingress(error):
                return f"the connection to the ingress at {self.gateway} broke too, and nothing answers there"
            if is_unanswered(error) and self._has_cluster_ended():
                return "its cluster has ended: start it again, then the script from its last checkpoint"
            if is_unanswered(error):
                return "the management service has ended too; where the cluster was started, `waferbox status` says why"
            if status_of(error).code() == grpc.StatusCode.NOT_FOUND:
                return "the management service was started again after the end of the job, and does not know its cause"
            return ""
        return job.message if job.ended else ""

    # --- The coordinator and its successors ---------------------------------------------------------------------------

    async def _connect_first(self, coordinator: str) -> CoordinatorConnection:
        """Connects to the coordinator of the new job, or to its successor if it has died already."""
        deadline = asyncio.get_running_loop().time() + deadlines.JOB_CREATION.first_replaced
        while True:
            try:
                return await self._connect(coordinator, 0)
            except ClusterUnreachableError:
                if not self._may_be_replaced or asyncio.get_running_loop().time() >= deadline:
                    raise
                coordinator = await self._named_by_management(coordinator)

    async def _named_by_management(self, lost: str) -> str:
        """Returns the coordinator that management names, or else the lost one."""
        try:
            return (await self._get_job(lost)).coordinator or lost
        except grpc.RpcError as error:
            logger.debug("management does not name the successor of %s: %s", lost, error)
            return lost

    async def _connect(self, coordinator: str, incarnation: int) -> CoordinatorConnection:
        channel = await self._open_channel(coordinator)
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        return CoordinatorConnection(
            incarnation=incarnation,
            coordinator=coordinator,
            channel=channel,
            stub=stub,
            session=aiter(stub.Session(coordinator_pb2.SessionRequest(token=self.token))),
        )

    async def _open_channel(self, coordinator: str) -> grpc.aio.Channel:
        address = through(self.gateway, coordinator)
        return await self._connect_to(address, f"coordinator of job {self.job}", self.token)

    async def _replace(self, error: grpc.RpcError) -> bool:
        """Connects to the coordinator that takes over, after the session has ended with an error.

        Returns:
            Whether there is one; if not, no other will take over.
        """
        if not is_unanswered(error):
            return False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadlines.COORDINATION.another
        away_since: float | None = None
        is_noted = False
        lost = self.connection.coordinator
        logger.info("The connection to the coordinator of %s broke: looking for its successor", self.job)
        logger.debug("the session ended: %s", error)
        while self._may_be_replaced and self._failure is None and loop.time() < deadline:
            try:
                job = await self._get_job(lost)
            except grpc.RpcError as refusal:
                now = loop.time()
                # The coordinators of a dead ingress die with it, and are restarted with it; the time for management
                # begins only then.
                is_ingress_away = bool(self.gateway) and not is_from_ingress(refusal)
                # A restarted management service does not have the job until its coordinator has connected, and one that
                # is stopped, or cut off, gives no answer.
                is_late = status_of(refusal).code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.NOT_FOUND)
                away_since = now if is_late or is_ingress_away or away_since is None else away_since
                away = now - away_since
                if not (is_late or is_unanswered(refusal)) or away > deadlines.COORDINATION.script_away:
                    return False
                if not is_late and self._has_cluster_ended():
                    return False
                if not is_noted and away > SLOW_SECONDS:
                    is_noted = True
                    left = deadlines.COORDINATION.script_away - away
                    self._log.info("The management service does not answer either: waiting up to %.0f s for it", left)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            away_since = None
            if job.ended:
                return False
            if job.coordinator == lost:
                await self._report_broken_connection(lost)
            if job.coordinator in ("", lost):
                continue
            successor = await self._reach(job.coordinator)
            if successor is not None:
                before, self.connection = self.connection, successor
                self._changes.notify()
                await before.channel.close(None)
                return True
            await asyncio.sleep(RETRY_SECONDS)
        return False

    async def _get_job(self, lost: str) -> management_pb2.JobInfo:
        wait, answer = deadlines.COORDINATION.another_wait, deadlines.COORDINATION.another_answer
        request = management_pb2.GetJobRequest(job=self.job, wait_seconds=wait, lost_coordinator=lost)
        return (await self._management.GetJob(request, timeout=wait + answer)).job

    async def _report_broken_connection(self, coordinator: str) -> None:
        """Reports the broken connection to a coordinator, which may still consider it open."""
        request = coordinator_pb2.SessionRequest(token=self.token, cut_off=True)
        try:
            async with asyncio.timeout(deadlines.COORDINATION.another_answer):
                channel = await self._open_channel(coordinator)
                try:
                    await anext(aiter(coordinator_pb2_grpc.CoordinatorStub(channel).Session(request)), None)
                finally:
                    await channel.close(None)
        except (grpc.RpcError, ClusterUnreachableError, TimeoutError) as error:
            logger.debug("the coordinator of %s: %r", self.job, error)

    async def _reach(self, coordinator: str) -> CoordinatorConnection | None:
        """Returns a connection to the successor of a coordinator; None while there is none.

        The successor may not serve yet, an ingress may not have its address yet, or it has died as well. If it refuses
        the session, that is the failure of the job.
        """
        try:
            successor = await self._connect(coordinator, self.connection.incarnation + 1)
        except ClusterUnreachableError as unreachable:
            logger.info("The new coordinator of %s cannot be reached yet: %s", self.job, unreachable)
            return None
        try:
            await anext(successor.session)  # the session is open, so its end will be noticed
        except grpc.RpcError as error:
            await successor.channel.close(None)
            if is_unanswered(error):
                details = status_of(error).details()
                logger.info("The new coordinator of %s cannot be reached yet: %s", self.job, details)
            elif status_of(error).code() == grpc.StatusCode.ALREADY_EXISTS:
                await self._report_broken_connection(coordinator)  # one that broke while it was being opened
            else:
                self._failure = failures.from_rpc_error(error, "the job was under way")
            return None
        return successor

    # --- The end ------------------------------------------------------------------------------------------------------

    async def cancel(self, error: str = "") -> None:
        """Cancels the job at management, unless it has ended, and closes the session.

        Args:
            error: The exception that ends the script; empty: none.
        """
        if not self._is_closed:
            request = management_pb2.CancelJobRequest(job=self.job, by_script=True, error=error)
            try:
                await self._management.CancelJob(request, timeout=deadlines.END.cancel)
            except grpc.RpcError as refused:
                logger.debug("the job %s could not be cancelled: %s", self.job, refused)
        await self.close(error, is_cancelled=True)

    async def close(self, error: str = "", *, is_cancelled: bool = False) -> None:
        """Ends the session and with it the job; its nodes become free. Further calls have no effect.

        Args:
            error: The exception that ends the script; empty: none.
            is_cancelled: Whether the script has left an execution that was not finished.
        """
        if self._is_closed:
            return
        if self.alive:
            await self._finish(error, is_cancelled=is_cancelled)
        self._is_closed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await self.connection.channel.close(None)

    async def _finish(self, error: str, *, is_cancelled: bool) -> None:
        """Announces the end of the session to the coordinator, which otherwise handles it as a failure."""
        request = coordinator_pb2.FinishRequest(token=self.token, cancelled=is_cancelled, error=error)
        try:
            await self.connection.stub.Finish(request, timeout=deadlines.END.finish)
        except grpc.RpcError as refused:
            logger.debug("the end of %s could not be announced to its coordinator: %s", self.job, refused)


async def create_job(
    management: "management_pb2_grpc.ManagementAsyncStub", request: management_pb2.CreateJobRequest, address: str
) -> management_pb2.CreateJobResponse:
    """Creates a job. address: of management, for errors. Raises CstorchError."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + deadlines.JOB_CREATION.connect
    while True:
        try:
            return await management.CreateJob(request, timeout=deadlines.JOB_CREATION.create)
        except grpc.RpcError as error:
            # Behind an ingress, management has the time to start that `connect` gives it without one.
            if not failures.is_management_away(error) or loop.time() >= give_up:
                raise failures.from_create_job_error(error, address) from None
        await asyncio.sleep(RETRY_SECONDS)


def _progress_text(progress: coordinator_pb2.CompileProgress) -> str:
    return f"{progress.stage}, layer {progress.done:,} of {progress.of:,}" if progress.of else progress.stage


def is_unanswered(error: grpc.RpcError) -> bool:
    """Whether the server did not answer, or has stopped.

    A server that stops cancels its calls, and so does a channel that is closed in favour of another.
    """
    return status_of(error).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def _is_refusal(error: Exception) -> bool:
    """Whether the error refuses a wrong request, and is therefore no consequence of the job's end."""
    if isinstance(error, grpc.RpcError):
        return status_of(error).code() == grpc.StatusCode.INVALID_ARGUMENT
    return isinstance(error, CompileError | ConfigurationError)
