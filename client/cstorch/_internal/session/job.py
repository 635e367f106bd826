"""A job of the script, and the connection to its coordinator, which is replaced when the coordinator has died."""

import copy
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import grpc

from cstorch._internal.session import failures
from cstorch._internal.session.connecting import connect
from cstorch.distributed.cluster_config import LANES, ClusterConfig
from cstorch.distributed.run_settings import max_num_restarts, min_num_csx
from cstorch.errors import ClusterUnreachableError, CompileError, ConfigurationError, CstorchError, NodeLostError
from waferbox import __version__, deadlines
from waferbox.host.threads import GuardedThread
from waferbox.launch.spawn import process_started
from waferbox.links.socket_names import host_id
from waferbox.rpc.server import is_from_ingress, make_channel, through
from waferbox.security.tokens import user_name, user_token
from wsc.v1 import coordinator_pb2, coordinator_pb2_grpc, management_pb2, management_pb2_grpc, node_pb2, plan_pb2

RETRY_SECONDS: Final = 0.2

Request = TypeVar("Request")
Response = TypeVar("Response")

logger = logging.getLogger("cstorch.job")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConnection:
    """A connection to one of the coordinators of a job.

    incarnation: the number of coordinators that this process was connected to before.
    coordinator: its address, as management names it.
    """

    incarnation: int
    coordinator: str
    channel: grpc.Channel
    stub: coordinator_pb2_grpc.CoordinatorStub
    session: "grpc.CallIterator[coordinator_pb2.SessionResponse]"


class ClientJob:
    """A job as the script sees it: created by management, served by its coordinator, alive as long as the session is.

    A thread of its own reads the session, and replaces the connection when another coordinator takes over. All methods
    are thread-safe, except that only one thread may close the job.

    Args:
        management: The address of the management service.
        config: What the job requires of the cluster.
        compile_dir: The folder of the cluster for artifacts.
        strategy: The execution strategy of all steps of the job.
        token: The token for management; None for the token that this user has for the address.
        log: The logger of the job's messages to the user.

    Raises:
        ClusterUnreachableError: Management or the coordinator does not answer.
        VersionMismatchError: The cluster is of another version.
    """

    def __init__(
        self,
        management: str,
        config: ClusterConfig,
        compile_dir: str,
        strategy: "plan_pb2.ExecutionStrategy.ValueType" = plan_pb2.EXECUTION_STRATEGY_WEIGHT_STREAMING,
        token: str | None = None,
        log: logging.Logger = logger,
    ) -> None:
        self.config = config
        self.strategy = strategy
        self._log = log
        self._failure: CstorchError | None = None
        self._ready = threading.Event()  # the job has its nodes, or has ended
        self._closed = threading.Event()
        self._changed = threading.Condition()  # of the connection, and of whether it may be replaced
        num_restarts = max_num_restarts()
        self._may_be_replaced = num_restarts > 0  # False once no other coordinator will take over
        self._management_channel = connect(
            management, "management service", user_token(management) if token is None else token
        )
        try:
            self._management = management_pb2_grpc.ManagementStub(self._management_channel)
            created = self._create(management, compile_dir, num_restarts)
            self.name = created.job
            self.token = created.token  # for the coordinator and the state keepers
            self.gateway = management if created.gateway else ""  # the address in front of theirs
            self._connection = self._connect_first(created.coordinator)
        except BaseException:
            self._management_channel.close()
            raise
        self._watcher = GuardedThread(self._watch, name="cstorch session", on_defect=self._watch_failed)
        self._watcher.start()

    def _create(self, management: str, compile_dir: str, num_restarts: int) -> management_pb2.CreateJobResponse:
        request = management_pb2.CreateJobRequest(
            version=__version__,
            num_csx=self.config.num_csx,
            num_workers_per_csx=self.config.num_workers_per_csx,
            max_wgt_servers=self.config.max_wgt_servers,
            labels=self.config.job_labels,
            lane=LANES[self.config.lane],
            compile_dir=compile_dir,
            run_ahead_steps=self.config.run_ahead_steps,
            user=user_name(),
            host=socket.gethostname(),
            host_id=host_id(),
            process_id=os.getpid(),
            process_started=process_started(os.getpid()),
            priority=int(self.config.job_priority.removeprefix("p")),
            execution_strategy=self.strategy,
            max_num_restarts=num_restarts,
            min_num_csx=min_num_csx(self.config.num_csx),
        )
        give_up = time.monotonic() + deadlines.JOB_CREATION.connect
        while True:
            try:
                return self._management.CreateJob(request, timeout=deadlines.JOB_CREATION.create)
            except grpc.RpcError as error:
                # Behind an ingress, management has the time to start that `connect` gives it without one.
                if not failures.is_management_away(error) or time.monotonic() >= give_up:
                    raise failures.from_create_job_error(error, management, __version__) from None
            time.sleep(RETRY_SECONDS)

    # --- Calls of the coordinator -------------------------------------------------------------------------------------

    def compile(self, cirh: str, options: plan_pb2.CompileOptions) -> coordinator_pb2.CompileResponse:
        """Compiles a step, or finds its artifact.

        Raises:
            CompileError: The step has no plan on this cluster.
        """
        self._ready.wait()  # the time in the queue has no deadline; the end of the session ends the wait
        request = coordinator_pb2.CompileRequest(token=self.token, cirh=cirh, options=options)
        try:
            return self._call(lambda stub: stub.Compile, request, deadlines.JOB_CREATION.compile)
        except grpc.RpcError as error:
            raise self.reason(failures.from_compile_error(error), "compiling the step") from None

    def prepare_input(self, prepared: node_pb2.PrepareInput) -> None:
        """Sends the input of an execution to the workers.

        Raises:
            InputError: The input_fn failed.
        """
        self._ready.wait()  # as in compile
        request = coordinator_pb2.PrepareInputRequest(token=self.token, input=prepared)
        try:
            self._call(lambda stub: stub.PrepareInput, request, deadlines.JOB_CREATION.prepare)
        except grpc.RpcError as error:
            raise self.reason(error, "preparing the input") from None

    def shards(self, step: int = 0) -> list[coordinator_pb2.StateShard]:
        """Returns the addresses of the shards; waits until the job has its nodes, and these have loaded.

        Args:
            step: The step of the checkpoint whose snapshot will be read; 0 for the live states.

        Raises:
            ClusterError: The job has ended.
        """
        request = coordinator_pb2.ShardsRequest(token=self.token, step=step)
        try:
            return list(self._call(lambda stub: stub.Shards, request, deadlines.JOB_CREATION.prepare).shards)
        except grpc.RpcError as error:
            raise self.reason(error, "locating the shards") from None

    def locate(self, shard: int, step: int) -> coordinator_pb2.StateShard:
        """Returns the present address of a shard, which may have been replaced. Raises as shards."""
        return next(each for each in self.shards(step) if each.shard == shard)

    def _call(
        self,
        method: "Callable[[coordinator_pb2_grpc.CoordinatorStub], grpc.UnaryUnaryMultiCallable[Request, Response]]",
        request: Request,
        timeout: float,
    ) -> Response:
        """Calls the coordinator, and its successor if it dies meanwhile. Raises RpcError for any other failure."""
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

    # --- Why the job ended --------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the job can take another execution."""
        return not self._closed.is_set() and self._failure is None and self._watcher.is_alive()

    @property
    def failure(self) -> CstorchError | None:
        """The cause of the job's end, if the session has reported one: a new error each time, to be raised."""
        return copy.copy(self._failure)

    def wait_for_failure(self) -> CstorchError | None:
        """Returns the cause of the job's end, after a call that failed with it: the session reports the cause soon."""
        self._watcher.join(deadlines.END.verdict)
        return self.failure

    def reason(self, error: Exception, doing: str) -> CstorchError:
        """Returns the error to raise for any failure of an operation with the job; no other place decides on it.

        The end of the job has precedence over the error of a call. The death of one node ends the job, and with it the
        states on all others, so calls to these fail with errors that do not name the cause.

        Args:
            error: The error of a gRPC call or of a link, or one that was made of these.
            doing: The operation, e.g. "compiling the step".
        """
        return (self.failure if _is_refusal(error) else self.wait_for_failure()) or failures.from_error(error, doing)

    # --- The session --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Runs in a thread until the session ends and no other coordinator takes over."""
        try:
            while True:
                try:
                    for response in self._connection.session:
                        self._handle_session_response(response)
                    return
                except grpc.RpcError as error:
                    if self._closed.is_set() or self._failure is not None:
                        return
                    if not self._replace(error):
                        if not self._closed.is_set():
                            self._failure = self._coordinator_lost(error)
                        return
        finally:
            self._stop_replacing()
            self._ready.set()

    def _handle_session_response(self, response: coordinator_pb2.SessionResponse) -> None:
        match response.WhichOneof("kind"):
            case "failure" if self._failure is None:
                self._failure = failures.from_failure(response.failure)
            case "queue":
                self._log_queue(response.queue)
            case "ready":
                self._ready.set()
            case "advice":
                self._log.warning("%s", response.advice)

    def _watch_failed(self, error: Exception) -> None:
        self._failure = self._failure or failures.from_defect(error)
        self._ready.set()

    def _log_queue(self, status: management_pb2.QueueStatus) -> None:
        if status.position:
            position = f"{status.position} of {status.length}"
            self._log.info("Job %s waits in the queue (%s) for %s", self.name, position, status.waiting_for)
        elif status.waiting_for:
            self._log.warning("Job %s waits for a replacement of a lost node: %s", self.name, status.waiting_for)
        else:
            self._log.info("Job %s has its nodes now", self.name)

    def _coordinator_lost(self, error: grpc.RpcError) -> CstorchError:
        assert isinstance(error, grpc.Call)
        if not _is_unanswered(error):
            return failures.from_rpc_error(error, "the job was under way")
        if self.gateway and not is_from_ingress(error):
            return NodeLostError(
                f"the connection to the ingress at {self.gateway} broke ({error.details()}), and {self.name} ends "
                "with it: start the script again when the ingress is back"
            )
        cause = self._cause_of_end()
        return NodeLostError(
            f"the coordinator of {self.name} at {self._address} died, or cannot be reached"
            + (f": {cause}" if cause else "")
        )

    def _cause_of_end(self) -> str:
        """Returns the cause of the job's end by management; empty if management has none in time."""
        request = management_pb2.GetJobRequest(job=self.name, wait_seconds=deadlines.END.cause)
        try:
            job = self._management.GetJob(request, timeout=deadlines.END.cause + deadlines.END.cause_answer).job
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            if _is_unanswered(error) and self.gateway and not is_from_ingress(error):
                return f"the connection to the ingress at {self.gateway} broke too, and nothing answers there"
            if _is_unanswered(error):
                return "the management service has ended too; where the cluster was started, `waferbox status` says why"
            return ""
        return job.message if job.ended else ""

    # --- The coordinator and its successors ---------------------------------------------------------------------------

    @property
    def connection(self) -> CoordinatorConnection:
        """The connection to the present coordinator."""
        return self._connection

    @property
    def _address(self) -> str:
        return through(self.gateway, self._connection.coordinator)

    def has_successor(
        self, error: grpc.RpcError, incarnation: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> bool:
        """Whether a call failed with the end of its coordinator, and another has taken over; waits for the other.

        Args:
            error: The error of the call.
            incarnation: The incarnation of the coordinator that was called.
            is_wanted: Whether to wait on; evaluated again after each `wake`.
        """
        if not _is_unanswered(error):
            return False
        deadline = time.monotonic() + deadlines.COORDINATION.another
        with self._changed:
            while self._connection.incarnation <= incarnation and self._may_be_replaced and is_wanted():
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    return False
            return self._connection.incarnation > incarnation

    def wake(self) -> None:
        """Makes `has_successor` evaluate its condition again."""
        with self._changed:
            self._changed.notify_all()

    def _replace(self, error: grpc.RpcError) -> bool:
        """Connects to the coordinator that takes over, after the session has ended with an error.

        Returns:
            Whether there is one; if not, no other will take over.
        """
        if not _is_unanswered(error):
            return False
        deadline = time.monotonic() + deadlines.COORDINATION.another
        away_since: float | None = None
        lost = self._connection.coordinator
        logger.info("The connection to the coordinator of %s broke: looking for its successor", self.name)
        logger.debug("the session ended: %s", error)
        while self._may_be_replaced and time.monotonic() < deadline:
            try:
                job = self._get_job(lost)
            except grpc.RpcError as refusal:
                now = time.monotonic()
                assert isinstance(refusal, grpc.Call)
                # The coordinators of a dead ingress die with it, and are restarted with it; the time for management
                # begins only then.
                is_ingress_away = bool(self.gateway) and not is_from_ingress(refusal)
                # A restarted management service does not have the job until its coordinator has connected, and one that
                # is stopped, or cut off, gives no answer.
                is_late = refusal.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.NOT_FOUND)
                away_since = now if is_late or is_ingress_away or away_since is None else away_since
                if not (is_late or _is_unanswered(refusal)) or now - away_since > deadlines.COORDINATION.script_away:
                    return False
                self._closed.wait(RETRY_SECONDS)
                continue
            away_since = None
            if job.ended:
                return False
            if job.coordinator == lost:
                self._report_broken_connection()
            if job.coordinator in ("", lost):
                continue
            successor = self._reach(job.coordinator)
            if successor is not None:
                return self._use(successor)
            self._closed.wait(RETRY_SECONDS)
        return False

    def _reach(self, coordinator: str) -> CoordinatorConnection | None:
        """Returns a connection to the successor of a coordinator; None while there is none.

        The successor may not serve yet, an ingress may not have its address yet, or it has died as well.
        """
        try:
            successor = self._connect(coordinator, self._connection.incarnation + 1)
        except ClusterUnreachableError as unreachable:
            logger.info("The new coordinator of %s cannot be reached yet: %s", self.name, unreachable)
            return None
        try:
            next(iter(successor.session))  # the session is open, so its end will be noticed
        except grpc.RpcError as error:
            if _is_unanswered(error):
                details = successor.session.details()
                logger.info("The new coordinator of %s cannot be reached yet: %s", self.name, details)
                successor.channel.close()
                return None
        return successor

    def _use(self, successor: CoordinatorConnection) -> bool:
        """Replaces the connection, unless the job was closed meanwhile; returns whether it did."""
        with self._changed:
            before, is_wanted = self._connection, self._may_be_replaced
            if is_wanted:
                self._connection = successor
            self._changed.notify_all()
        (before if is_wanted else successor).channel.close()
        return is_wanted

    def _stop_replacing(self) -> None:
        with self._changed:
            self._may_be_replaced = False
            self._changed.notify_all()

    def _get_job(self, lost: str) -> management_pb2.JobInfo:
        wait, answer = deadlines.COORDINATION.another_wait, deadlines.COORDINATION.another_answer
        request = management_pb2.GetJobRequest(job=self.name, wait_seconds=wait, lost_coordinator=lost)
        return self._management.GetJob(request, timeout=wait + answer).job

    def _connect(self, coordinator: str, incarnation: int) -> CoordinatorConnection:
        channel = connect(through(self.gateway, coordinator), f"coordinator of job {self.name}", self.token)
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        return CoordinatorConnection(
            incarnation=incarnation,
            coordinator=coordinator,
            channel=channel,
            stub=stub,
            session=stub.Session(coordinator_pb2.SessionRequest(token=self.token)),
        )

    def _connect_first(self, coordinator: str) -> CoordinatorConnection:
        """Connects to the coordinator of the new job, or to its successor if it has died already."""
        deadline = time.monotonic() + deadlines.JOB_CREATION.first_replaced
        while True:
            try:
                return self._connect(coordinator, 0)
            except ClusterUnreachableError:
                if not self._may_be_replaced or time.monotonic() >= deadline:
                    raise
                coordinator = self._named_by_management(coordinator)

    def _named_by_management(self, lost: str) -> str:
        """Returns the coordinator that management names, or else the lost one."""
        try:
            return self._get_job(lost).coordinator or lost
        except grpc.RpcError as error:
            logger.debug("management does not name the successor of %s: %s", lost, error)
            return lost

    def _report_broken_connection(self) -> None:
        """Reports the broken connection to the coordinator, which may still consider it open."""
        request = coordinator_pb2.SessionRequest(token=self.token, cut_off=True)
        with make_channel(self._address, self.token) as channel:
            try:
                stub = coordinator_pb2_grpc.CoordinatorStub(channel)
                next(iter(stub.Session(request, timeout=deadlines.COORDINATION.another_answer)), None)
            except grpc.RpcError as error:
                logger.debug("the coordinator of %s: %s", self.name, error)

    # --- The queue, and the end ---------------------------------------------------------------------------------------

    def set_priority(self, priority: int) -> None:
        """Moves the job in the queue.

        Args:
            priority: From 1 (first) to 3.

        Raises:
            CstorchError: Management refuses it, for example because the job is no longer in the queue.
        """
        request = management_pb2.SetPriorityRequest(job=self.name, priority=priority)
        try:
            self._management.SetPriority(request, timeout=deadlines.END.cancel)
        except grpc.RpcError as error:
            raise self.reason(error, "changing the priority") from None

    def cancel(self) -> None:
        """Cancels the job at management, unless it has ended, and closes it."""
        if not self._closed.is_set():
            try:
                self._management.CancelJob(management_pb2.CancelJobRequest(job=self.name), timeout=deadlines.END.cancel)
            except grpc.RpcError as error:
                logger.debug("the job %s could not be cancelled: %s", self.name, error)
        self._close(is_cancelled=True)

    def close(self) -> None:
        """Ends the session and with it the job; its nodes become free."""
        self._close(is_cancelled=False)

    def _close(self, *, is_cancelled: bool) -> None:
        if self._closed.is_set():
            return
        if self.alive:
            self._finish(is_cancelled=is_cancelled)
        self._closed.set()
        with self._changed:  # the watcher may be about to replace the connection
            self._may_be_replaced = False
            self._changed.notify_all()
            self._connection.session.cancel()  # type: ignore[no-untyped-call]
        self._watcher.join(deadlines.END.cancel)
        self._connection.channel.close()
        self._management_channel.close()

    def _finish(self, *, is_cancelled: bool) -> None:
        """Announces the end of the session to the coordinator, which otherwise handles it as a failure."""
        request = coordinator_pb2.FinishRequest(token=self.token, cancelled=is_cancelled)
        try:
            self._connection.stub.Finish(request, timeout=deadlines.END.finish)
        except grpc.RpcError as error:
            logger.debug("the end of %s could not be announced to its coordinator: %s", self.name, error)


def _is_unanswered(error: grpc.RpcError | grpc.Call) -> bool:
    """Whether the server did not answer, or has stopped.

    A server that stops cancels its calls, and so does a channel that is closed in favour of another.
    """
    assert isinstance(error, grpc.Call)
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def _is_refusal(error: Exception) -> bool:
    """Whether the error refuses a wrong request, and is therefore no consequence of the job's end."""
    refused = isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.INVALID_ARGUMENT
    return refused or isinstance(error, CompileError | ConfigurationError)
