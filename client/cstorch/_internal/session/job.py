"""A job: made by the management service, served by its coordinator, alive as long as the script holds its session."""

import copy
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from cstorch._internal.session import failures
from cstorch._internal.session.connecting import connect
from cstorch._internal.session.coordinator_link import CoordinatorLink, is_gone
from cstorch.distributed.cluster_config import LANES, ClusterConfig
from cstorch.distributed.run_settings import max_num_restarts, min_num_csx
from cstorch.errors import CompileError, ConfigurationError, CstorchError, NodeLostError
from waferbox import __version__, deadlines
from waferbox.host.threads import GuardedThread
from waferbox.links.socket_names import host_id
from waferbox.rpc.server import is_from_ingress
from waferbox.security.tokens import user_name, user_token
from wsc.v1 import coordinator_pb2, management_pb2, management_pb2_grpc, node_pb2, plan_pb2

logger = logging.getLogger("cstorch.job")

RETRY_SECONDS = 0.2


class ClientJob:
    """A job and the session that keeps it alive. Thread-safe where it says so.

    Args:
        management: address of the management service.
        config: what of the cluster the job asks for.
        compile_dir: where the cluster keeps artifacts.
        strategy: how all steps of the job are run.
        token: what management is shown; None: what this user shows at its address.

    Raises:
        ClusterUnreachableError: management or the coordinator does not answer.
        VersionMismatchError: the cluster is of another version.
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
        self._log = log  # for what the user is told
        self._closed = False
        self._failure: CstorchError | None = None
        self._ready = threading.Event()  # it has its nodes, or has ended
        self._management_channel = connect(
            management, "management service", user_token(management) if token is None else token
        )
        try:
            self._management = management_pb2_grpc.ManagementStub(self._management_channel)
            num_restarts = max_num_restarts()
            created = self._create(management, compile_dir, num_restarts)
            self.name = created.job
            self.gateway = management if created.gateway else ""
            self._token = created.token
            self._link = CoordinatorLink(created, self.gateway, self._management, may_be_replaced=num_restarts > 0)
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
                # As for a management service that is dialled directly: it may be about to start.
                if not failures.is_management_away(error) or time.monotonic() >= give_up:
                    raise failures.from_create_job_error(error, management, __version__) from None
            time.sleep(RETRY_SECONDS)

    def _watch(self) -> None:
        """Runs in a thread: ends when the session ends, and no other coordinator takes up the job."""
        try:
            while True:
                try:
                    for response in self._link.current.session:
                        self._handle_session_response(response)
                    return
                except grpc.RpcError as error:
                    if self._closed or self._failure is not None:
                        return
                    if not self._link.replace(error):
                        if not self._closed:
                            self._failure = self._coordinator_lost(error)
                        return
        finally:
            self._link.end()
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
        if not status.position:
            if status.waiting_for:
                self._log.warning(
                    "Job %s waits for a node in the place of a lost one: %s", self.name, status.waiting_for
                )
            else:
                self._log.info("Job %s has its nodes now", self.name)
            return
        place = f"{status.position} of {status.length}"
        self._log.info("Job %s waits in the queue (%s) for %s", self.name, place, status.waiting_for)

    def _coordinator_lost(self, error: grpc.RpcError) -> CstorchError:
        assert isinstance(error, grpc.Call)
        if is_gone(error):  # a server that stops cancels its calls, too
            if self.gateway and not is_from_ingress(error):
                return NodeLostError(
                    f"the connection to the ingress at {self.gateway} broke ({error.details()}), and {self.name} ends "
                    "with it: start the script again when the ingress is back"
                )
            cause = self._cause_of_end()
            return NodeLostError(
                f"the coordinator of {self.name} at {self._link.address} died, or cannot be reached"
                + (f": {cause}" if cause else "")
            )
        return failures.from_rpc_error(error, "the job was under way")

    def _cause_of_end(self) -> str:
        """What management says of the job's end, if it knows of it in time."""
        request = management_pb2.GetJobRequest(job=self.name, wait_seconds=deadlines.END.cause)
        try:
            job = self._management.GetJob(request, timeout=deadlines.END.cause + deadlines.END.cause_answer).job
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            if is_gone(error) and self.gateway and not is_from_ingress(error):
                return f"the connection to the ingress at {self.gateway} broke, too, and nobody answers there"
            if is_gone(error):
                return "the management service has ended too; where the cluster was started, `waferbox status` says why"
            return ""
        return job.message if job.ended else ""

    def reason(self, error: Exception, doing: str) -> CstorchError:
        """What is to be raised for anything that failed while the job was used: the one place that decides on it.

        Where the job has ended, its end is the reason, whatever the call says: a node that dies takes the job along,
        and with it all that other nodes keep of the job. The session knows who died, within deadlines.END.verdict.

        Args:
            error: of a gRPC call, a link, or what was made of one of these.
            doing: what it was for, e.g. "compiling the step".
        """
        return (self.failure if _is_refusal(error) else self.wait_for_failure()) or failures.from_error(error, doing)

    def wait_for_failure(self) -> CstorchError | None:
        """Why the job ended, for an operation that failed because it did: the session knows more, and soon."""
        self._watcher.join(deadlines.END.verdict)
        return self.failure

    @property
    def alive(self) -> bool:
        """Whether the job can take another execution. Thread-safe."""
        return not self._closed and self._failure is None and self._watcher.is_alive()

    @property
    def failure(self) -> CstorchError | None:
        """Why the job ended, if the session said so: each time a new error, to be raised. Thread-safe."""
        return copy.copy(self._failure)

    def compile(self, cirh: str, options: plan_pb2.CompileOptions) -> coordinator_pb2.CompileResponse:
        """Compiles a step, or finds its artifact.

        Raises:
            CompileError: the step has no plan on this cluster.
        """
        self._ready.wait()  # for its incarnation in the queue, which counts for no deadline; the session's end ends it
        request = coordinator_pb2.CompileRequest(token=self._token, cirh=cirh, options=options)
        try:
            return self._link.call(lambda stub: stub.Compile, request, deadlines.JOB_CREATION.compile)
        except grpc.RpcError as error:
            raise self.reason(failures.from_compile_error(error), "compiling the step") from None

    def prepare_input(self, prepared: node_pb2.PrepareInput) -> None:
        """Gives the workers the input of an execution.

        Raises:
            InputError: the input_fn failed.
        """
        self._ready.wait()  # for its incarnation in the queue, which counts for no deadline; the session's end ends it
        request = coordinator_pb2.PrepareInputRequest(token=self._token, input=prepared)
        try:
            self._link.call(lambda stub: stub.PrepareInput, request, deadlines.JOB_CREATION.prepare)
        except grpc.RpcError as error:
            raise self.reason(error, "preparing the input") from None

    def shards(self, step: int = 0) -> list[coordinator_pb2.StateShard]:
        """Where MemoryX is reached; waits until the job has its nodes, and these what they are to have.

        Args:
            step: of a checkpoint whose snapshot is to be read; 0: the live states are.

        Raises:
            ClusterError: the job has ended.
        """
        request = coordinator_pb2.ShardsRequest(token=self._token, step=step)
        try:
            return list(self._link.call(lambda stub: stub.Shards, request, deadlines.JOB_CREATION.prepare).shards)
        except grpc.RpcError as error:
            raise self.reason(error, "asking for the shards") from None

    def locate(self, shard: int, step: int) -> coordinator_pb2.StateShard:
        """Where a shard is now: another may have taken its place. Raises as shards."""
        return next(each for each in self.shards(step) if each.shard == shard)

    def execute(
        self, requests: Iterator[coordinator_pb2.ExecuteRequest]
    ) -> "grpc.CallIterator[coordinator_pb2.ExecuteResponse]":
        """Opens the stream of an execution."""
        return self._link.current.stub.Execute(requests)

    @property
    def incarnation(self) -> int:
        """How many coordinators the job had before the one that it has."""
        return self._link.current.incarnation

    def has_successor(self, error: grpc.RpcError, incarnation: int, is_wanted: Callable[[], bool]) -> bool:
        """As CoordinatorLink.has_successor."""
        return self._link.has_successor(error, incarnation, is_wanted)

    def wake(self) -> None:
        """As CoordinatorLink.wake."""
        self._link.wake()

    @property
    def token(self) -> str:
        """What the script shows the coordinator and MemoryX."""
        return self._token

    def set_priority(self, priority: int) -> None:
        """Moves the job in the queue: 1 (first) to 3. Raises CstorchError, also where it waits no longer."""
        request = management_pb2.SetPriorityRequest(job=self.name, priority=priority)
        try:
            self._management.SetPriority(request, timeout=deadlines.END.cancel)
        except grpc.RpcError as error:
            raise self.reason(error, "changing the priority") from None

    def cancel(self) -> None:
        """Asks management to cancel the job, then closes it; the job may be gone already."""
        if not self._closed:
            try:
                self._management.CancelJob(management_pb2.CancelJobRequest(job=self.name), timeout=deadlines.END.cancel)
            except grpc.RpcError as error:
                logger.debug("the job %s could not be cancelled: %s", self.name, error)
        self.close()

    def close(self) -> None:
        """Ends the session and with it the job; its nodes become free."""
        if self._closed:
            return
        if self.alive:
            self._finish()
        self._closed = True
        self._link.close()
        self._watcher.join(deadlines.END.cancel)
        self._link.close_channel()
        self._management_channel.close()

    def _finish(self) -> None:
        """Tells the coordinator that the session does not end by accident."""
        try:
            self._link.current.stub.Finish(
                coordinator_pb2.FinishRequest(token=self._token), timeout=deadlines.END.finish
            )
        except grpc.RpcError as error:
            logger.debug("the coordinator of %s could not be told of its end: %s", self.name, error)


def _is_refusal(error: Exception) -> bool:
    """Whether it is the answer to a request that made no sense, which says nothing about the job."""
    refused = isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.INVALID_ARGUMENT
    return refused or isinstance(error, CompileError | ConfigurationError)
