"""A job of the script, for the threads of the script: an event loop with a thread of its own has its session."""

import concurrent.futures
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc

from cstorch._internal.log import SlowWork
from cstorch._internal.notebook import notebook_shell
from cstorch._internal.session import failures
from cstorch._internal.session.connecting import connect
from cstorch._internal.session.job_session import JobSession, create_job
from cstorch.distributed.cluster_config import LANES, ClusterConfig
from cstorch.distributed.run_settings import max_num_restarts, min_num_csx
from cstorch.errors import CstorchError, JobCancelledError, UsageError
from waferbox import deadlines
from waferbox.host.threads import SerialThread
from waferbox.launch.local_clusters import cluster_at
from waferbox.launch.spawn import process_started
from waferbox.links.socket_names import host_id
from waferbox.rpc.loop_channel import LoopChannel
from waferbox.rpc.loop_thread import LoopThread
from waferbox.security.tokens import user_name, user_token
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import coordinator_pb2, management_pb2, management_pb2_grpc, node_pb2, plan_pb2

_Result = TypeVar("_Result")

logger = logging.getLogger("cstorch.job")

FORKED = (
    "this process was forked from the one that uses the cluster, and cannot use it itself: start it by "
    "`multiprocessing.get_context('spawn')`, before the backend is made, or after cstorch.close_backend()"
)


class ClientJob:
    """A job as the script sees it: created by management, served by its coordinator, alive as long as the session is.

    All methods are thread-safe, except that only one thread may close the job.

    Args:
        management: The address of the management service.
        config: What the job requires of the cluster.
        compile_dir: The folder of the cluster for artifacts.
        strategy: The execution strategy of all steps of the job.
        token: The token for management; None for the token that this user has for the address.
        log: The logger of the job's messages to the user.
        command: The command line of the script, for those who look at the job.

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
        command: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.strategy = strategy
        self._is_closed = False
        self._findings: set[str] = set()  # which new_findings has returned
        self._defect: CstorchError | None = None
        self._loop = LoopThread(name="cstorch session", on_defect=self._failed)
        self._loop.start()
        try:
            token = user_token(management) if token is None else token
            request = self._request(compile_dir, command)
            self.recovers = request.max_num_restarts > 0
            self._session, self._management = self.run(self._open(management, token, request, log))
        except BaseException:
            self._loop.stop()
            raise
        self.name = self._session.job
        self.token = self._session.token  # for the coordinator and the state keepers
        self.gateway = self._session.gateway  # the address in front of theirs; empty if there is none

    def _request(self, compile_dir: str, command: Sequence[str]) -> management_pb2.CreateJobRequest:
        return management_pb2.CreateJobRequest(
            version=WIRE_VERSION,
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
            max_num_restarts=max_num_restarts(),
            min_num_csx=min_num_csx(self.config.num_csx),
            command=command,
        )

    async def _open(
        self, management: str, token: str, request: management_pb2.CreateJobRequest, log: logging.Logger
    ) -> tuple[JobSession, "management_pb2_grpc.ManagementAsyncStub"]:
        silent = deadlines.JOB_CREATION.silent
        channel = await _connect(management, "management service", token, silent_seconds=silent)
        try:
            stub = management_pb2_grpc.ManagementStub(channel)
            created = await create_job(stub, request, management)
            session = JobSession(
                created,
                stub,
                _connect,
                gateway=management if created.gateway else "",
                may_be_replaced=self.recovers,
                has_cluster_ended=_end_of_cluster(management),
                log=log,
            )
            await session.open()
        except BaseException:
            await channel.close(None)
            raise
        self._management_channel = channel
        return session, stub

    def _failed(self, error: Exception) -> None:
        self._defect = failures.from_defect(error)

    # --- Calls of the coordinator -------------------------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        """Waits until the job has its nodes, or has ended. Its place in the queue is logged meanwhile."""
        self.run(self._session.until_ready())

    def compile(
        self, cirh: str, options: plan_pb2.CompileOptions, work: SlowWork | None = None
    ) -> coordinator_pb2.CompileResponse:
        """Compiles a step, or finds its artifact. work: takes the progress.

        Raises:
            CompileError: The step has no plan on this cluster.
        """
        return self.run(self._compile(cirh, options, work))

    async def _compile(
        self, cirh: str, options: plan_pb2.CompileOptions, work: SlowWork | None
    ) -> coordinator_pb2.CompileResponse:
        await self._session.until_ready()
        self._session.compiling = work
        request = coordinator_pb2.CompileRequest(token=self.token, cirh=cirh, options=options)
        try:
            return await self._session.call(lambda stub: stub.Compile(request, timeout=deadlines.JOB_CREATION.compile))
        except grpc.RpcError as error:
            raise await self._session.reason(failures.from_compile_error(error), "compiling the step") from None
        finally:
            self._session.compiling = None

    def prepare_input(self, prepared: node_pb2.PrepareInput) -> None:
        """Sends the input of an execution to the workers.

        Raises:
            InputError: The input_fn failed.
        """
        self.run(self._prepare_input(prepared))

    async def _prepare_input(self, prepared: node_pb2.PrepareInput) -> None:
        await self._session.until_ready()
        request = coordinator_pb2.PrepareInputRequest(token=self.token, input=prepared)
        try:
            await self._session.call(lambda stub: stub.PrepareInput(request, timeout=deadlines.JOB_CREATION.prepare))
        except grpc.RpcError as error:
            raise await self._session.reason(error, "preparing the input") from None

    def shards(self, step: int = 0) -> list[coordinator_pb2.StateShard]:
        """Returns the addresses of the shards; waits until the job has its nodes, and these have loaded.

        Args:
            step: The step of the checkpoint whose snapshot will be read; 0 for the live states.

        Raises:
            ClusterError: The job has ended.
        """
        return self.run(self._shards(step))

    async def _shards(self, step: int) -> list[coordinator_pb2.StateShard]:
        request = coordinator_pb2.ShardsRequest(token=self.token, step=step)
        try:
            response = await self._session.call(
                lambda stub: stub.Shards(request, timeout=deadlines.JOB_CREATION.prepare)
            )
        except grpc.RpcError as error:
            raise await self._session.reason(error, "locating the shards") from None
        return list(response.shards)

    def locate(self, shard: int, step: int) -> coordinator_pb2.StateShard:
        """Returns the present address of a shard, which may have been replaced. Raises as shards."""
        return next(each for each in self.shards(step) if each.shard == shard)

    # --- The session --------------------------------------------------------------------------------------------------

    @property
    def session(self) -> JobSession:
        """The session, for coroutines in its event loop."""
        return self._session

    @property
    def alive(self) -> bool:
        """Whether the job can take another execution."""
        return not self._is_closed and self._defect is None and self._session.alive

    @property
    def failure(self) -> CstorchError | None:
        """The cause of the job's end, if the session has reported one: a new error each time, to be raised."""
        return self._defect or self._session.failure

    def new_findings(self, findings: Iterable[str]) -> list[str]:
        """Returns what the script does otherwise than it says, each once in the job: of these, and of the session.

        Used by one thread.
        """
        found = dict.fromkeys(findings)
        while self._session.findings:
            found[self._session.findings.popleft()] = None
        new = [finding for finding in found if finding not in self._findings]
        self._findings.update(new)
        return new

    def wait_for_failure(self) -> CstorchError | None:
        """Returns the cause of the job's end, after a call that failed with it: the session reports the cause soon."""
        return self.run(self._session.wait_for_failure())

    def reason(self, error: Exception, doing: str) -> CstorchError:
        """Returns the error to raise for any failure of an operation with the job, as JobSession.reason."""
        return self.run(self._session.reason(error, doing))

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs a coroutine in the event loop of the session, and returns its result.

        Raises:
            JobCancelledError: The job is closed, or another thread has closed it meanwhile.
            UsageError: This process was forked from that of the job.
        """
        if not self._loop.is_running:
            coroutine.close()
            if self._loop.is_parents:
                raise UsageError(FORKED)
            raise JobCancelledError("the job is closed")
        future = self._loop.submit(coroutine)
        try:
            error = future.exception()
        except concurrent.futures.CancelledError:
            raise JobCancelledError("the job was closed meanwhile") from None
        except BaseException:  # Ctrl-C
            future.cancel()
            raise
        if error is not None:
            raise error.with_traceback(None) from None  # without the frames of the event loop
        return future.result()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Calls a function in the event loop of the session. Does not wait."""
        self._loop.call_soon(callback)

    # --- The queue, and the end ---------------------------------------------------------------------------------------

    def set_priority(self, priority: int) -> None:
        """Moves the job in the queue.

        Args:
            priority: From 1 (first) to 3.

        Raises:
            CstorchError: Management refuses it, for example because the job is no longer in the queue.
        """
        self.run(self._set_priority(priority))

    async def _set_priority(self, priority: int) -> None:
        request = management_pb2.SetPriorityRequest(job=self.name, priority=priority)
        try:
            await self._management.SetPriority(request, timeout=deadlines.END.cancel)
        except grpc.RpcError as error:
            raise await self._session.reason(error, "changing the priority") from None

    def cancel(self) -> None:
        """Cancels the job at management, unless it has ended, and closes it."""
        self._close(self._session.cancel)

    def close(self) -> None:
        """Ends the session and with it the job; its nodes become free."""
        self._close(self._session.close)

    def _close(self, end: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        if not self._is_closed:
            self._is_closed = True
            try:
                self.run(end(_exception_of_script()))
                self.run(self._management_channel.close(None))
            finally:
                self._loop.stop()


def _exception_of_script() -> str:
    """The exception that ends the script, as Python has printed it; empty: none, or the user has interrupted it."""
    if hasattr(sys, "ps1") or notebook_shell() is not None:
        return ""  # it ended a command or a cell
    error = getattr(sys, "last_value", None)
    if not isinstance(error, Exception):
        return ""
    return "".join(traceback.format_exception_only(error)).strip()


async def _connect(address: str, what: str, token: str, *, silent_seconds: float = 0.0) -> grpc.aio.Channel:
    thread = SerialThread("cstorch connecting")
    try:
        channel = await thread.run(partial(connect, address, what, token, silent_seconds=silent_seconds))
    finally:
        thread.close()
    return LoopChannel(channel)  # type: ignore[return-value]  # it has the methods that stubs use


def _end_of_cluster(management: str) -> Callable[[], bool]:
    """Returns a function: whether a cluster that this user has started on this machine has ended; False of others."""
    cluster = cluster_at(management)
    return lambda: cluster is not None and not cluster.runs()
