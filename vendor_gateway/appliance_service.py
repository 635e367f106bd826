"""The vendor's Appliance service: the calls of its client to the coordinator of a job."""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import grpc

from cstorch.errors import CompileError, CstorchError, UsageError
from vendor_gateway.calls import authority_of
from vendor_gateway.session import COMPILE_FOLDER
from vendor_gateway.sessions import UnknownJobError, VendorJob, VendorSessions
from vendor_gateway.vendor_execution import CallEndedError, Resources
from vendor_gateway.wire_values import checkpoint_steps, item_bytes, read_value, write_value
from vendor_wire import appliance_pb2, appliance_pb2_grpc
from waferbox import deadlines

logger = logging.getLogger(__name__)

MAX_WAFERS: Final = 1 << 16
LOOK_SECONDS: Final = 0.25
_INFO: Final = 4  # levels as the vendor numbers them
_LEVELS: Final = {logging.ERROR: 2, logging.WARNING: 3}

_Context = grpc.ServicerContext
_Response = TypeVar("_Response")
_EXPECTED: Final = (CstorchError, ValueError, CallEndedError)  # any other exception is a defect of the gateway


def _explained(
    response_class: Callable[..., _Response],
) -> Callable[[Callable[..., _Response | None]], Callable[..., _Response]]:
    """Returns a decorator that puts the errors of a call into its response, for the client's exception."""

    def decorate(call: Callable[..., _Response | None]) -> Callable[..., _Response]:
        @functools.wraps(call)
        def explained(self: "ApplianceService", request: Any, context: _Context) -> _Response:
            try:
                return call(self, request, context) or response_class()
            except _EXPECTED as error:
                return response_class(code=appliance_pb2.STATUS_CODE_UNKNOWN, message=_text(error))

        return explained

    return decorate


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


_outcome = _explained(appliance_pb2.Outcome)


class ApplianceService(appliance_pb2_grpc.ApplianceServicer):
    """Serves the Appliance of all jobs. The authority of a call is the name of its job. Thread-safe."""

    def __init__(self, sessions: VendorSessions) -> None:
        self._sessions = sessions

    def _job(self, context: _Context) -> VendorJob:
        return self._sessions.job(authority_of(context))

    @_outcome
    def _nothing(self, request: appliance_pb2.Unread, context: _Context) -> None:
        self._job(context)

    UnaryClockSync = UnaryPing = UnaryInit = UnarySync = UnaryHeartBeat = UnaryGetCMDStateIds = UnaryDone = _nothing

    @_explained(appliance_pb2.StartResponse)
    def UnaryStart(self, request: appliance_pb2.Unread, context: _Context) -> appliance_pb2.StartResponse:
        job = self._job(context)
        version = appliance_pb2.StartResponse.Version(version=job.version.partition("+")[0], githash=job.build)
        return appliance_pb2.StartResponse(version_info=version)

    def UnaryCompile(self, request: appliance_pb2.CompileRequest, context: _Context) -> appliance_pb2.CompileResponse:
        resources = Resources(
            num_csx=min(max(1, request.num_csx), MAX_WAFERS),
            num_workers_per_csx=min(max(1, request.num_workers_per_csx), MAX_WAFERS),
            max_wgt_servers=min(max(0, request.max_wgt_servers), MAX_WAFERS),
        )
        try:
            step = self._job(context).session.compile(request.cirh, resources)
        except CompileError as error:  # The client reads this status as a compile error.
            context.abort(grpc.StatusCode.INTERNAL, str(error))
        except _EXPECTED as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, _text(error))
        response = appliance_pb2.CompileResponse(artifact=f"/{COMPILE_FOLDER}/{step.response.artifact}")
        kinds = appliance_pb2.ClusterDetails
        response.cluster_details.tasks.add(type=kinds.TASK_TYPE_COORDINATOR)
        # With one weight server the client opens one group of streams.
        for kind, count in ((kinds.TASK_TYPE_WAFER, resources.num_csx), (kinds.TASK_TYPE_WEIGHT_SERVER, 1)):
            task = response.cluster_details.tasks.add(type=kind)
            for number in range(count):
                task.places.add().id.task = number
        return response

    @_outcome
    def UnaryCheckCompileCompatibility(self, request: appliance_pb2.Unread, context: _Context) -> None:
        # States stay in their shards: the compiler places those of the next step around them.
        self._job(context)

    @_outcome
    def UnaryLoad(self, request: appliance_pb2.LoadRequest, context: _Context) -> None:
        self._job(context).session.load(request.artifact.rpartition("/")[2])

    @_outcome
    def UnaryRun(self, request: appliance_pb2.RunRequest, context: _Context) -> None:
        loader = request.dataloader
        for text in (loader.builder, loader.arguments, loader.initial_state):
            bytes.fromhex(text)  # ValueError
        self._job(context).session.run(
            {"input_fn": loader.builder, "arguments": loader.arguments, "position": loader.initial_state},
            request.num_iterations,
            request.activation_freq or 1,
            checkpoint_steps(request.checkpoint_schedule, request.num_iterations),
        )

    @_explained(appliance_pb2.SendCheckResponse)
    def UnarySendCheck(self, request: appliance_pb2.Unread, context: _Context) -> appliance_pb2.SendCheckResponse:
        # Groups without a number: names are ids, and the client sends all states but those of the repository.
        groups = [
            appliance_pb2.SendCheckResponse.Group(names=[name]) for name in self._job(context).session.state_names()
        ]
        return appliance_pb2.SendCheckResponse(groups=groups)

    def SendInputBidirStream(
        self, requests: Iterator[appliance_pb2.SendInputRequest], context: _Context
    ) -> Iterator[appliance_pb2.Outcome]:
        try:
            yield from self._take_state(requests, context)
        except _EXPECTED as error:
            yield appliance_pb2.Outcome(code=appliance_pb2.STATUS_CODE_UNKNOWN, message=_text(error))

    def _take_state(
        self, requests: Iterator[appliance_pb2.SendInputRequest], context: _Context
    ) -> Iterator[appliance_pb2.Outcome]:
        session = self._job(context).session
        data = bytearray()
        name, code, limit = "", 0, 0
        for number, request in enumerate(requests):
            kind = request.value.WhichOneof("contents")
            if kind is None:
                raise UsageError("the client has sent a tensor without a value")
            part = request.value.tensor.data if kind == "tensor" else request.value.scalar.data
            if number == 0:
                name, code = request.tensor_name, request.value.element_type
                # The state's number of elements counts, not the client's.
                limit = session.state_elements(name) * item_bytes(code)
            if len(data) + len(part) > limit:
                raise UsageError(f"the client has sent more than the {limit} bytes of {name}")
            data += part
            if not request.has_more:
                break
            if number == 0 and not part:
                yield appliance_pb2.Outcome()  # The client sends the tensor after this.
        session.write(name, read_value(code, data))
        yield appliance_pb2.Outcome()

    def StartWeightIngestion(
        self, request: appliance_pb2.StartWeightIngestionRequest, context: _Context
    ) -> Iterator[appliance_pb2.StartWeightIngestionResponse]:
        # The client sends nothing before the first response, and expects one for each further tensor.
        yield appliance_pb2.StartWeightIngestionResponse()
        for tensor in request.tensors[1:]:
            yield appliance_pb2.StartWeightIngestionResponse(tensor_id=tensor.id)

    @_outcome
    def UnarySendDeferredInput(self, request: appliance_pb2.SendDeferredInputRequest, context: _Context) -> None:
        session = self._job(context).session
        for tensor in request.tensors:
            if tensor.WhichOneof("kind") != "broadcast":
                raise UsageError(
                    f"{tensor.name}: an initial value that is {tensor.WhichOneof('kind') or 'nothing'} is not served; "
                    "set cstorch.backends.csx.debug.lazy_initialization = False"
                )
            value = tensor.broadcast.value
            session.write(tensor.name, read_value(value.element_type, bytearray(value.scalar.data)))

    @_outcome
    def UnaryStartStreaming(self, request: appliance_pb2.Unread, context: _Context) -> None:
        self._job(context).session.start()

    @_outcome
    def UnaryMonitorError(self, request: appliance_pb2.MonitorErrorRequest, context: _Context) -> appliance_pb2.Outcome:
        job = self._job(context)
        deadline = time.monotonic() + min(request.poll_seconds, deadlines.VENDOR_CLIENT.longest_poll)
        over = _over(context)
        while time.monotonic() < deadline and not job.has_ended:
            if (failure := job.session.failure) is not None:
                return appliance_pb2.Outcome(code=appliance_pb2.STATUS_CODE_UNKNOWN, message=_text(failure))
            if over.wait(LOOK_SECONDS):
                break
        return appliance_pb2.Outcome()

    def UnaryMsgQueue(
        self, request: appliance_pb2.MsgQueueRequest, context: _Context
    ) -> appliance_pb2.MsgQueueResponse:
        over = _over(context)
        deadline = time.monotonic() + min(request.timeout_seconds, deadlines.VENDOR_CLIENT.longest_poll)
        try:
            job = self._job(context)
        except UnknownJobError as error:
            context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        while time.monotonic() < deadline and not job.has_ended and not over.is_set():
            if (record := job.session.messages.take(LOOK_SECONDS)) is not None:
                tag = appliance_pb2.MsgQueueResponse.Tag(level=_LEVELS.get(record.levelno, _INFO))
                status = appliance_pb2.MsgQueueResponse.Status(text=record.getMessage(), tag=tag)
                return appliance_pb2.MsgQueueResponse(status=status)
        return appliance_pb2.MsgQueueResponse()

    def GetOutputStream(
        self, request: appliance_pb2.GetOutputRequest, context: _Context
    ) -> Iterator[appliance_pb2.GetOutputResponse]:
        try:
            session = self._job(context).session
            value = session.output(request.tensor_name, request.iteration + 1, context.is_active)
            yield from write_value(request.tensor_name, value)
        except _EXPECTED as error:
            yield appliance_pb2.GetOutputResponse(code=appliance_pb2.STATUS_CODE_UNKNOWN, message=_text(error))

    def UnaryDataCheckpoint(
        self, request: appliance_pb2.DataCheckpointRequest, context: _Context
    ) -> appliance_pb2.DataCheckpointResponse:
        try:
            states = self._job(context).session.input_states(request.step, context.is_active)
        except _EXPECTED as error:  # The response has no field for a message.
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, _text(error))
        return appliance_pb2.DataCheckpointResponse(states=states)

    @_outcome
    def UnaryFinalize(self, request: appliance_pb2.FinalizeRequest, context: _Context) -> None:
        is_success = request.state == appliance_pb2.FinalizeRequest.STATE_SUCCESS
        self._job(context).session.finish(is_success, context.is_active)

    @_outcome
    def UnaryMoveToPTR(self, request: appliance_pb2.RepositoryRequest, context: _Context) -> None:
        self._job(context).session.keep(request.id, request.tensor_name)

    @_outcome
    def UnaryCarryOverFromPTR(self, request: appliance_pb2.CarryOverRequest, context: _Context) -> None:
        self._job(context).session.carry_over(request.id, request.tensor_name, keeps=request.keep)

    def GetFromPTRStream(
        self, request: appliance_pb2.GetFromRepositoryRequest, context: _Context
    ) -> Iterator[appliance_pb2.GetOutputResponse]:
        try:
            name, value = self._job(context).session.read_kept(request.id)
            yield from write_value(name, value)
        except _EXPECTED as error:
            yield appliance_pb2.GetOutputResponse(code=appliance_pb2.STATUS_CODE_UNKNOWN, message=_text(error))

    @_outcome
    def UnaryDeleteFromPTR(self, request: appliance_pb2.GetFromRepositoryRequest, context: _Context) -> None:
        self._job(context).session.drop(request.id)


def _over(context: _Context) -> threading.Event:
    """Returns an event that is set when the call ends."""
    over = threading.Event()
    context.add_callback(over.set)
    return over
