"""The connection to a job's coordinator, and to the one that takes up the job when that has died."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import grpc

from cstorch._internal.session.connecting import connect
from cstorch.errors import ClusterUnreachableError
from waferbox import deadlines
from waferbox.rpc.server import is_from_ingress, make_channel, through
from wsc.v1 import coordinator_pb2, coordinator_pb2_grpc, management_pb2, management_pb2_grpc

RETRY_SECONDS: Final = 0.2

Request = TypeVar("Request")
Response = TypeVar("Response")

logger = logging.getLogger("cstorch.job")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """To one of the coordinators of a job."""

    incarnation: int  # of it among those that this process knows, from 0
    coordinator: str  # its address, as management names it
    channel: grpc.Channel
    stub: coordinator_pb2_grpc.CoordinatorStub
    session: "grpc.CallIterator[coordinator_pb2.SessionResponse]"


class CoordinatorLink:
    """replace and end from one thread, which watches the session; the rest from any.

    Args:
        created: the job.
        gateway: the address through which its coordinator is reached; empty if directly.
        management: knows of the coordinators of the job.
        may_be_replaced: whether the job has another coordinator when one has died.

    Raises:
        ClusterUnreachableError: the coordinator does not answer.
    """

    def __init__(
        self,
        created: management_pb2.CreateJobResponse,
        gateway: str,
        management: management_pb2_grpc.ManagementStub,
        *,
        may_be_replaced: bool,
    ) -> None:
        self._job = created.job
        self._token = created.token
        self._gateway = gateway
        self._management = management
        self._changed = threading.Condition()
        self._may_be_replaced = may_be_replaced  # False once no other coordinator comes
        self._closing = threading.Event()
        self._connection = self._connect_first(created.coordinator)

    @property
    def current(self) -> Connection:
        return self._connection

    @property
    def address(self) -> str:
        """Of the coordinator."""
        return through(self._gateway, self._connection.coordinator)

    def call(
        self,
        method: "Callable[[coordinator_pb2_grpc.CoordinatorStub], grpc.UnaryUnaryMultiCallable[Request, Response]]",
        request: Request,
        timeout: float,
    ) -> Response:
        """Calls the coordinator; where it dies meanwhile, the next one.

        Raises:
            grpc.RpcError: the call failed, and not for want of a coordinator.
        """
        while True:
            connection = self._connection
            call = method(connection.stub).future(request, timeout=timeout)
            try:
                return call.result()
            except grpc.RpcError as error:
                if not self.has_successor(error, connection.incarnation):
                    raise
            except BaseException:  # Ctrl-C
                call.cancel()  # type: ignore[no-untyped-call]
                raise

    def has_successor(
        self, error: grpc.RpcError, incarnation: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> bool:
        """Whether a call failed because the coordinator of a incarnation is gone, and there is another; waits for that.

        Args:
            is_wanted: whether to wait; `wake` has it looked at again.
        """
        if not is_gone(error):
            return False
        deadline = time.monotonic() + deadlines.COORDINATION.another
        with self._changed:
            while self._connection.incarnation <= incarnation and self._may_be_replaced and is_wanted():
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    return False
            return self._connection.incarnation > incarnation

    def wake(self) -> None:
        """Something has changed that `has_successor` may look at."""
        with self._changed:
            self._changed.notify_all()

    def replace(self, error: grpc.RpcError) -> bool:
        """The session has ended by this error: connects to the coordinator that takes up the job.

        Returns:
            Whether there is one; if not, no other will come.
        """
        assert isinstance(error, grpc.Call)
        if not is_gone(error):
            return False
        deadline = time.monotonic() + deadlines.COORDINATION.another
        away_since: float | None = None
        lost = self._connection.coordinator
        logger.info("The connection to the coordinator of %s broke: looking for another that takes it up", self._job)
        logger.debug("the session ended: %s", error)
        while self._may_be_replaced and time.monotonic() < deadline:
            try:
                job = self._get_job(lost)
            except grpc.RpcError as refusal:
                now = time.monotonic()
                assert isinstance(refusal, grpc.Call)
                # An ingress that has died takes its coordinators along, and has the time that these have.
                is_ingress_away = bool(self._gateway) and not is_from_ingress(refusal)
                away_since = now if is_ingress_away or away_since is None else away_since
                # A management service that was started anew hears of the job in a moment.
                is_late = refusal.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.NOT_FOUND)
                if not (is_late or is_gone(refusal)) or now - away_since > deadlines.COORDINATION.script_away:
                    return False
                self._closing.wait(RETRY_SECONDS)
                continue
            away_since = None
            if job.ended:
                return False
            if job.coordinator == lost:
                self._report_broken_connection()
            if job.coordinator in ("", lost):
                continue
            another = self._reach(job.coordinator)
            if another is not None:
                return self._use(another)
            self._closing.wait(RETRY_SECONDS)
        return False

    def _reach(self, coordinator: str) -> Connection | None:
        """A connection to the one that has taken up the job; None while it is not reached: it may be about to serve, an
        ingress may not know of it yet, or it has died as well."""
        try:
            another = self._connect(coordinator, self._connection.incarnation + 1)
        except ClusterUnreachableError as unreachable:
            logger.info("The coordinator that has taken up %s is not reached yet: %s", self._job, unreachable)
            return None
        try:
            next(iter(another.session))  # it is open, so that its end will be noticed
        except grpc.RpcError as error:
            if is_gone(error):
                details = another.session.details()
                logger.info("The coordinator that has taken up %s is not reached yet: %s", self._job, details)
                another.channel.close()
                return None
        return another

    def end(self) -> None:
        """No other coordinator comes."""
        with self._changed:
            self._may_be_replaced = False
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the session."""
        with self._changed:
            self._may_be_replaced = False
            self._closing.set()
            self._changed.notify_all()
            self._connection.session.cancel()  # type: ignore[no-untyped-call]

    def close_channel(self) -> None:
        """After close: ends what is still under way."""
        self._connection.channel.close()

    def _get_job(self, lost: str) -> management_pb2.JobInfo:
        wait, answer = deadlines.COORDINATION.another_wait, deadlines.COORDINATION.another_answer
        request = management_pb2.GetJobRequest(job=self._job, wait_seconds=wait, lost_coordinator=lost)
        return self._management.GetJob(request, timeout=wait + answer).job

    def _connect(self, coordinator: str, incarnation: int) -> Connection:
        channel = connect(through(self._gateway, coordinator), f"coordinator of job {self._job}", self._token)
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        session = stub.Session(coordinator_pb2.SessionRequest(token=self._token))
        return Connection(incarnation=incarnation, coordinator=coordinator, channel=channel, stub=stub, session=session)

    def _connect_first(self, coordinator: str) -> Connection:
        """To the coordinator of a new job, or to the one in its place: it may have died since management named it."""
        deadline = time.monotonic() + deadlines.JOB_CREATION.first_replaced
        while True:
            try:
                return self._connect(coordinator, 0)
            except ClusterUnreachableError:
                if not self._may_be_replaced or time.monotonic() >= deadline:
                    raise
                coordinator = self._named_by_management(coordinator)

    def _named_by_management(self, lost: str) -> str:
        """The coordinator that management names, or the lost one."""
        try:
            return self._get_job(lost).coordinator or lost
        except grpc.RpcError as error:
            logger.debug("management does not say who is in the place of %s: %s", lost, error)
            return lost

    def _report_broken_connection(self) -> None:
        """Tells the coordinator, if it is there, that the connection broke, which it may not have noticed."""
        request = coordinator_pb2.SessionRequest(token=self._token, cut_off=True)
        with make_channel(through(self._gateway, self._connection.coordinator), self._token) as channel:
            try:
                stub = coordinator_pb2_grpc.CoordinatorStub(channel)
                next(iter(stub.Session(request, timeout=deadlines.COORDINATION.another_answer)), None)
            except grpc.RpcError as error:
                logger.debug("the coordinator of %s: %s", self._job, error)

    def _use(self, another: Connection) -> bool:
        with self._changed:
            before, is_wanted = self._connection, self._may_be_replaced
            if is_wanted:
                self._connection = another
            self._changed.notify_all()
        (before if is_wanted else another).channel.close()
        return is_wanted


def is_gone(error: grpc.RpcError | grpc.Call) -> bool:
    """Whether nobody has answered; a channel that was closed in favour of another has cancelled the call."""
    assert isinstance(error, grpc.Call)
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
