"""The service of a coordinator for its client."""

import asyncio
import hmac
import logging
import traceback
from collections.abc import AsyncIterator
from typing import NoReturn

import grpc

from appliance.coordinator.compilation import CompileRefused, notes_of, warnings_of
from appliance.coordinator.execution.execution import CoordinatedExecution
from appliance.coordinator.execution.failures import JobFailed, internal_failure
from appliance.coordinator.execution.waiting import Abandoned
from appliance.coordinator.job import CoordinatedJob
from appliance.coordinator.plans import placements
from waferbox.host.clock import Clock
from waferbox.rpc.async_server import Context, when_over
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

    def __init__(self, job: CoordinatedJob, clock: Clock) -> None:
        self.job = job
        self._clock = clock

    async def Session(
        self, request: coordinator_pb2.SessionRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.SessionResponse]:
        await self._check(request.token, context)
        if not self.job.session.open():
            if request.cut_off and self.job.session.reconnects():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "another coordinator takes over the job")
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "the job has a session")
        when_over(context, self.job.client_left)
        yield coordinator_pb2.SessionResponse(opened=coordinator_pb2.SessionOpened())
        async for message in self.job.session.messages():
            yield message
        failure = self.job.verdict.failure
        if failure is not None:
            yield coordinator_pb2.SessionResponse(failure=failure)

    async def PrepareInput(
        self, request: coordinator_pb2.PrepareInputRequest, context: Context
    ) -> coordinator_pb2.PrepareInputResponse:
        await self._check(request.token, context)
        try:
            await self.job.prepare_input(request.input)
        except JobFailed as error:
            await _abort(context, error.failure)
        return coordinator_pb2.PrepareInputResponse()

    async def Compile(
        self, request: coordinator_pb2.CompileRequest, context: Context
    ) -> coordinator_pb2.CompileResponse:
        await self._check(request.token, context)
        begin = self._clock.monotonic()
        try:
            artifact, plan, cached = await self.job.compile(request.cirh, request.options)
        except JobFailed as error:
            await _abort(context, error.failure)
        except CompileRefused as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _fitting(str(error)))
        # A defect of the compiler: the log gets the whole traceback, the client its end.
        except Exception as error:
            logger.exception("the compiler failed")
            lines = traceback.format_exception(error)
            text = f"{type(error).__name__}: {error}\n{''.join(lines[-3:])}"
            await context.abort(grpc.StatusCode.INTERNAL, _fitting(text))
        return coordinator_pb2.CompileResponse(
            artifact=artifact,
            cached=cached,
            states=placements(plan),
            outputs=plan.coordinator.outputs,
            report=self.job.plans.report(artifact),
            seconds=self._clock.monotonic() - begin,
            wafer_kernels=len(plan.wafer.kernels) + len(plan.pipeline.kernels),
            precision=plan.precision if plan.HasField("precision") else None,
            notes=await asyncio.to_thread(notes_of, plan),
            warnings=await asyncio.to_thread(warnings_of, plan),
        )

    async def Shards(self, request: coordinator_pb2.ShardsRequest, context: Context) -> coordinator_pb2.ShardsResponse:
        await self._check(request.token, context)
        try:
            shards = await self.job.shards(request.step)
        except JobFailed as error:
            await _abort(context, error.failure)
        except Abandoned:
            await context.abort(grpc.StatusCode.ABORTED, "the execution that makes this checkpoint was left")
        return coordinator_pb2.ShardsResponse(shards=shards)

    async def Finish(self, request: coordinator_pb2.FinishRequest, context: Context) -> coordinator_pb2.FinishResponse:
        await self._check(request.token, context)
        self.job.finish(is_cancelled=request.cancelled, error=request.error)
        return coordinator_pb2.FinishResponse()

    async def Execute(
        self, request_iterator: AsyncIterator[coordinator_pb2.ExecuteRequest], context: Context
    ) -> AsyncIterator[coordinator_pb2.ExecuteResponse]:
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("kind") != "begin":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be begin")
        await self._check(first.begin.token, context)
        try:
            # A script that has left its loop may have wanted none of the steps.
            least = 0 if first.begin.HasField("resumption") else 1
            check_steps(first.begin.num_steps, first.begin.activation_steps, first.begin.checkpoint_steps, least)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            await self.job.wait_for_nodes()
            if first.begin.artifact not in self.job.plans:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"this job has not compiled {first.begin.artifact!r}")
            execution = await self.job.begin(first.begin)
        except JobFailed as error:
            yield coordinator_pb2.ExecuteResponse(failed=error.failure)
            return
        if execution is None:
            message = "the job is in an execution: begin the next one after its end"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        when_over(context, lambda: self.job.client_left_execution(execution))
        reading = self.job.begin_task(self._read_requests(execution, request_iterator))
        try:
            async for response in execution.responses():
                yield response
        except Abandoned:
            pass
        except JobFailed as error:
            yield coordinator_pb2.ExecuteResponse(failed=error.failure)
        # A defect here must end the job and be visible.
        except Exception as error:
            logger.exception("the execution failed")
            self.job.verdict.report_defect(error)
            yield coordinator_pb2.ExecuteResponse(failed=internal_failure(error))
        finally:
            reading.cancel()

    async def _read_requests(
        self, execution: CoordinatedExecution, requests: AsyncIterator[coordinator_pb2.ExecuteRequest]
    ) -> None:
        """Reads the client's requests during the execution, beside the responses."""
        async for request in requests:
            match request.WhichOneof("kind"):
                case "state_sent":
                    execution.state_sent(request.state_sent)
                case "consumed":
                    execution.consumed(request.consumed.step)
                case "checkpoint_released":
                    execution.checkpoint_released(request.checkpoint_released.step)
                case "stop_after":
                    execution.stop_after(request.stop_after.step)
        if execution.waits_for_client:
            self.job.client_left_execution(execution)

    async def _check(self, token: str, context: Context) -> None:
        # compare_digest takes non-ASCII text only as bytes
        if not hmac.compare_digest(token.encode(), self.job.token.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this is the coordinator of another job")


async def _abort(context: Context, failure: node_pb2.Failure) -> NoReturn:
    code = _STATUS.get(failure.kind, grpc.StatusCode.INTERNAL)
    text = f"{failure.message}\n{failure.traceback}" if failure.traceback else failure.message
    await context.abort(code, _fitting(text))


def _fitting(text: str) -> str:
    """Cuts a message to an error's limit: percent-encoded, a byte of a non-ASCII character takes three."""
    cost = 0
    for position, character in enumerate(text):
        cost += 1 if " " <= character <= "~" else 3 * len(character.encode())
        if cost > MAX_DETAILS_BYTES:
            return text[:position] + "…"
    return text
