"""The service of a coordinator for its client."""

import contextlib
import hmac
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

import grpc

from appliance.coordinator.compilation import CompileRefused, notes_of, warnings_of
from appliance.coordinator.execution.execution import CoordinatedExecution
from appliance.coordinator.execution.failures import JobFailed, internal_failure
from appliance.coordinator.execution.waiting import Abandoned, EpochOver
from appliance.coordinator.job import CoordinatedJob
from appliance.coordinator.plans import placements
from waferbox.host.threads import GuardedThread
from waferbox.runtime.schedule import check_steps
from wsc.v1 import coordinator_pb2, coordinator_pb2_grpc, node_pb2

logger = logging.getLogger(__name__)

MAX_DETAILS_BYTES = 4000  # of an error's message, which is sent in headers that gRPC limits to 8 KiB

_STATUS = {
    node_pb2.Failure.KIND_NODE: grpc.StatusCode.FAILED_PRECONDITION,
    node_pb2.Failure.KIND_INPUT: grpc.StatusCode.FAILED_PRECONDITION,
    node_pb2.Failure.KIND_USER: grpc.StatusCode.FAILED_PRECONDITION,
    node_pb2.Failure.KIND_CANCELLED: grpc.StatusCode.ABORTED,
}


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    """Serves Coordinator for one job. A failure of the job is sent on the streams; unary calls fail with it too."""

    def __init__(self, job: CoordinatedJob) -> None:
        self._job = job

    def Session(
        self, request: coordinator_pb2.SessionRequest, context: grpc.ServicerContext
    ) -> Iterator[coordinator_pb2.SessionResponse]:
        self._check(request.token, context)
        if not self._job.session.open():
            if request.cut_off and self._job.session.reconnects():
                context.abort(grpc.StatusCode.UNAVAILABLE, "another coordinator takes over the job")
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "the job has a session")
        self._when_over(context, self._job.client_left)
        yield coordinator_pb2.SessionResponse(opened=coordinator_pb2.SessionOpened())
        yield from self._job.session.messages()
        failure = self._job.verdict.failure
        if failure is not None:
            yield coordinator_pb2.SessionResponse(failure=failure)

    def PrepareInput(
        self, request: coordinator_pb2.PrepareInputRequest, context: grpc.ServicerContext
    ) -> coordinator_pb2.PrepareInputResponse:
        self._check(request.token, context)
        try:
            self._job.prepare_input(request.input)
        except JobFailed as error:
            _abort(context, error.failure)
        return coordinator_pb2.PrepareInputResponse()

    def Compile(
        self, request: coordinator_pb2.CompileRequest, context: grpc.ServicerContext
    ) -> coordinator_pb2.CompileResponse:
        self._check(request.token, context)
        begin = time.monotonic()
        try:
            artifact, plan, cached = self._job.compile(request.cirh, request.options)
        except JobFailed as error:
            _abort(context, error.failure)
        except CompileRefused as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, _fitting(str(error)))
        # A defect of the compiler: the log gets the whole traceback, the client its end.
        except Exception as error:
            logger.exception("the compiler failed")
            lines = traceback.format_exception(error)
            context.abort(grpc.StatusCode.INTERNAL, _fitting(f"{type(error).__name__}: {error}\n{''.join(lines[-3:])}"))
        return coordinator_pb2.CompileResponse(
            artifact=artifact,
            cached=cached,
            states=placements(plan),
            outputs=plan.coordinator.outputs,
            report=self._job.plans.report(artifact),
            seconds=time.monotonic() - begin,
            wafer_kernels=len(plan.wafer.kernels) + len(plan.pipeline.kernels),
            precision=plan.precision if plan.HasField("precision") else None,
            notes=notes_of(plan),
            warnings=warnings_of(plan),
        )

    def Shards(
        self, request: coordinator_pb2.ShardsRequest, context: grpc.ServicerContext
    ) -> coordinator_pb2.ShardsResponse:
        self._check(request.token, context)
        try:
            shards = self._job.shards(request.step)
        except JobFailed as error:
            _abort(context, error.failure)
        return coordinator_pb2.ShardsResponse(shards=shards)

    def Finish(
        self, request: coordinator_pb2.FinishRequest, context: grpc.ServicerContext
    ) -> coordinator_pb2.FinishResponse:
        self._check(request.token, context)
        self._job.is_finished = True
        return coordinator_pb2.FinishResponse()

    def Execute(
        self, request_iterator: Iterator[coordinator_pb2.ExecuteRequest], context: grpc.ServicerContext
    ) -> Iterator[coordinator_pb2.ExecuteResponse]:
        first = next(request_iterator, None)
        if first is None or first.WhichOneof("kind") != "begin":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be begin")
            return
        self._check(first.begin.token, context)
        try:
            check_steps(first.begin.num_steps, first.begin.activation_steps, first.begin.checkpoint_steps)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            execution = self._job.begin(first.begin)
        except KeyError:
            context.abort(grpc.StatusCode.NOT_FOUND, f"this job has not compiled {first.begin.artifact!r}")
        except JobFailed as error:
            yield coordinator_pb2.ExecuteResponse(failed=error.failure)
            return
        if execution is None:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "the job is in an execution: begin the next one after its end"
            )
            return

        def left() -> None:
            self._job.session.check_connection()
            execution.abandon()

        self._when_over(context, left)
        failure: node_pb2.Failure | None = None
        try:
            yield from self._run(execution, request_iterator)
        except Abandoned:
            pass
        except JobFailed as error:
            failure = error.failure
        # A defect here must end the job and be visible.
        except Exception as error:
            logger.exception("the execution failed")
            failure = internal_failure(error)
            self._job.verdict.report(failure)
        finally:
            self._job.end_execution(execution)
        if failure is not None:
            yield coordinator_pb2.ExecuteResponse(failed=failure)

    def _run(
        self, execution: CoordinatedExecution, requests: Iterator[coordinator_pb2.ExecuteRequest]
    ) -> Iterator[coordinator_pb2.ExecuteResponse]:
        reader = GuardedThread(
            lambda: _read_requests(execution, requests),
            name="execution-requests",
            on_defect=self._job.verdict.report_defect,
        )
        reader.start()
        try:
            if execution.is_started:
                self._job.recovery.resume_taken_over(execution)
                if not execution.was_started:
                    yield coordinator_pb2.ExecuteResponse(started=coordinator_pb2.Started())
            else:
                yield from self._load_and_start(execution)
            yield from execution.responses()
            self._finish(execution)  # the client may begin the next one at once
        except GeneratorExit:  # gRPC does not finish the generator of a call that the client left
            self._job.session.check_connection()
            execution.abandon()
            with contextlib.suppress(JobFailed, TimeoutError):
                self._stop(execution)
            raise
        except (Abandoned, grpc.RpcError) as error:
            execution.abandon()
            self._stop(execution)
            raise Abandoned from error
        yield execution.finished()

    def _load_and_start(self, execution: CoordinatedExecution) -> Iterator[coordinator_pb2.ExecuteResponse]:
        """Loads the plan and starts the steps; returns when nothing that the client has sent can be lost."""
        while True:
            try:
                with self._job.recovery.lock:
                    wanted = execution.load()
                yield coordinator_pb2.ExecuteResponse(state_wanted=wanted)
                with self._job.recovery.lock:
                    execution.start()
                yield coordinator_pb2.ExecuteResponse(started=coordinator_pb2.Started())
                return
            except EpochOver:
                self._job.recovery.wait_until_live()

    def _finish(self, execution: CoordinatedExecution) -> None:
        """Waits for the end and stops all nodes; not during steps that run again after a death."""
        while True:
            execution.wait_until_done()
            with self._job.recovery.lock:
                if execution.is_done:
                    execution.stop()
                    self._job.end_execution(execution)
                    return

    def _stop(self, execution: CoordinatedExecution) -> None:
        with self._job.recovery.lock:  # the recovery sees a running execution, or none
            execution.stop()
            self._job.end_execution(execution)

    def _when_over(self, context: grpc.ServicerContext, left: Callable[[], None]) -> None:
        """Calls this in a thread after the end of the call, as it may wait for the ends of other calls."""

        def over() -> None:
            GuardedThread(left, name="client-left", on_defect=self._job.verdict.report_defect).start()

        if not context.add_callback(over):
            over()

    def _check(self, token: str, context: grpc.ServicerContext) -> None:
        # compare_digest takes non-ASCII text only as bytes
        if not hmac.compare_digest(token.encode(), self._job.token.encode()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this is the coordinator of another job")


def _read_requests(execution: CoordinatedExecution, requests: Iterator[coordinator_pb2.ExecuteRequest]) -> None:
    """Reads the client's requests during the execution, in a thread of its own."""
    try:
        for request in requests:
            match request.WhichOneof("kind"):
                case "state_sent":
                    execution.state_sent(request.state_sent)
                case "consumed":
                    execution.consumed(request.consumed.step)
                case "checkpoint_released":
                    execution.checkpoint_released(request.checkpoint_released.step)
        execution.requests_ended()
    except grpc.RpcError:
        pass  # the request stream may end first; the end of the call is handled elsewhere


def _abort(context: grpc.ServicerContext, failure: node_pb2.Failure) -> NoReturn:
    code = _STATUS.get(failure.kind, grpc.StatusCode.INTERNAL)
    text = f"{failure.message}\n{failure.traceback}" if failure.traceback else failure.message
    context.abort(code, _fitting(text))


def _fitting(text: str) -> str:
    """Cuts a message to an error's limit: percent-encoded, a byte of a non-ASCII character takes three."""
    cost = 0
    for position, character in enumerate(text):
        cost += 1 if " " <= character <= "~" else 3 * len(character.encode())
        if cost > MAX_DETAILS_BYTES:
            return text[:position] + "…"
    return text
