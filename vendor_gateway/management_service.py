"""The vendor's ClusterManagement service: the begin, the state, the heartbeats and the end of jobs."""

import logging
import time
from collections.abc import Iterator
from typing import Any, Final

import grpc

from cstorch.errors import JobCancelledError
from vendor_gateway.session import COMPILE_FOLDER
from vendor_gateway.sessions import TooManyError, UnknownJobError, VendorJob, VendorSessions
from vendor_gateway.wire_values import ReleaseRefusedError, build_of
from vendor_wire import management_pb2, management_pb2_grpc

logger = logging.getLogger(__name__)

LOG_PATH: Final = "waferbox"  # The client prints this as the folder of the logs.
IMAGE: Final = "waferbox"
MAX_NAME: Final = 128
MAX_FOLDERS: Final = 1024
_PRIORITIES: Final = {
    management_pb2.JobSettings.PRIORITY_P0: 1,
    management_pb2.JobSettings.PRIORITY_P1: 1,
    management_pb2.JobSettings.PRIORITY_P3: 3,
}
_DEFAULT_PRIORITY: Final = 2

_Context = grpc.ServicerContext


class ManagementService(management_pb2_grpc.ClusterManagementServicer):
    """Serves ClusterManagement. The client of 2.10 does without a feature whose call returns Empty. Thread-safe."""

    def __init__(self, sessions: VendorSessions) -> None:
        self._sessions = sessions

    def _nothing(self, request: management_pb2.Unread, context: _Context) -> management_pb2.Empty:
        self._sessions.note_call(_metadata(context, "workflow-id"))
        return management_pb2.Empty()

    GetServerConfig = IsMessageBrokerAvailable = GetServerVersions = HasMultiMgmtNodes = _nothing
    GetJobEvents = GetJobMeta = ReportMetrics = ReserveJobResources = ReleaseJobResources = _nothing
    ReleaseWorkflowResources = _nothing

    def InitWorkflow(self, request: management_pb2.Unread, context: _Context) -> management_pb2.InitWorkflowResponse:
        return management_pb2.InitWorkflowResponse(workflow_id=self._sessions.new_workflow())

    def InitImageBuildJob(self, request: management_pb2.Unread, context: _Context) -> management_pb2.ImageBuildResponse:
        workflow = _metadata(context, "workflow-id")
        self._sessions.note_call(workflow)
        return management_pb2.ImageBuildResponse(job_id="image", image_reference=IMAGE, workflow_id=workflow)

    def GetImageBuildJob(
        self, request: management_pb2.ImageBuildRequest, context: _Context
    ) -> management_pb2.ImageBuildResponse:
        self._sessions.note_call(_metadata(context, "workflow-id"))
        return management_pb2.ImageBuildResponse(
            job_id="image", image_reference=IMAGE, image_ready=True, status=management_pb2.JOB_STATUS_SUCCEEDED
        )

    def InitCompileJob(
        self, request: management_pb2.CompileJobRequest, context: _Context
    ) -> management_pb2.CompileJobResponse:
        job = self._begin(request.settings, context, compiles=True)
        return management_pb2.CompileJobResponse(
            job_id=job.name,
            workflow_id=job.session.workflow,
            log_path=LOG_PATH,
            compile_folder=f"/{COMPILE_FOLDER}",
        )

    def InitExecuteJob(
        self, request: management_pb2.ExecuteJobRequest, context: _Context
    ) -> management_pb2.ExecuteJobResponse:
        job = self._begin(request.settings, context, compiles=False)
        job.session.python_paths = list(request.python_paths[:MAX_FOLDERS])
        job.session.mount_dirs = [folder.path for folder in request.mount_dirs[:MAX_FOLDERS]]
        return management_pb2.ExecuteJobResponse(job_id=job.name, workflow_id=job.session.workflow, log_path=LOG_PATH)

    def _begin(self, settings: management_pb2.JobSettings, context: _Context, *, compiles: bool) -> VendorJob:
        version = _metadata(context, "client-build-version")
        try:
            workflow, build = _metadata(context, "workflow-id"), build_of(version)
            job = self._sessions.add_job(workflow, context.peer(), compiles=compiles, version=version, build=build)
        except ReleaseRefusedError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except TooManyError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        job.session.queue.labels = dict(settings.queue.labels)
        job.session.queue.priority = _PRIORITIES.get(settings.queue.priority, _DEFAULT_PRIORITY)
        return job

    def FinalizeCompileJob(self, request: management_pb2.JobRequest, context: _Context) -> management_pb2.Empty:
        self._sessions.end_job(request.job_id, is_success=True, reason="")
        return management_pb2.Empty()

    def PollIngressV2(
        self, request: management_pb2.JobRequest, context: _Context
    ) -> Iterator[management_pb2.IngressResponse]:
        try:
            job = self._sessions.job(request.job_id)
        except UnknownJobError as error:
            yield management_pb2.IngressResponse(job_failed=True, message=str(error))
            return
        # The job requests its wafers with the first compile, which has their number.
        yield management_pb2.IngressResponse(
            is_scheduled=True, is_ready=True, service_authority=job.name, message="the gateway answers for the job"
        )

    def GetJob(self, request: management_pb2.JobRequest, context: _Context) -> management_pb2.JobResponse:
        try:
            job = self._sessions.job(request.job_id)
        except UnknownJobError as error:
            return management_pb2.JobResponse(status=management_pb2.JOB_STATUS_FAILED, message=str(error))
        failure = job.session.failure
        if isinstance(failure, JobCancelledError) or (failure is None and job.was_cancelled):
            # The client looks for these words, by which it recognizes a cancelled job.
            message = f"{failure or 'cancelled'} (canceled-by-csctl)"
            return management_pb2.JobResponse(status=management_pb2.JOB_STATUS_CANCELLED, message=message)
        if failure is not None:
            return management_pb2.JobResponse(status=management_pb2.JOB_STATUS_FAILED, message=str(failure))
        status = management_pb2.JOB_STATUS_SUCCEEDED if job.has_ended else management_pb2.JOB_STATUS_IN_PROGRESS
        return management_pb2.JobResponse(status=status)

    def HeartbeatV2(
        self, requests: Iterator[management_pb2.HeartbeatRequest], context: _Context
    ) -> Iterator[management_pb2.HeartbeatResponse]:
        job: VendorJob | None = None
        # The stream does not name the workflow, but it has the connection, and so the peer, of calls that do.
        session = self._sessions.session_of(context.peer())
        unnamed = None if session is None else session.presence
        if unnamed is not None:
            unnamed.add_unnamed_stream()
        try:
            for request in requests:
                name = request.lease_id or request.job_id
                if job is None or job.name != name:
                    try:
                        found = self._sessions.job(name)
                    except UnknownJobError:  # The name is a workflow's, or that of a removed job.
                        self._sessions.note_call(name)
                        yield management_pb2.HeartbeatResponse(is_scheduled=True, is_ready=True)
                        continue
                    if job is not None:
                        job.session.presence.remove_stream(job.name)
                    job = found
                    if not job.has_ended:
                        job.session.presence.add_stream(job.name)
                        if unnamed is not None:
                            unnamed.remove_unnamed_stream()
                        unnamed = None
                job.session.presence.note_call()
                job.session.presence.set_lease(request.lease_seconds)
                yield management_pb2.HeartbeatResponse(is_scheduled=True, is_ready=True)
        finally:
            if job is not None:
                job.session.presence.remove_stream(job.name)
            if unnamed is not None:
                unnamed.lose_unnamed_stream()

    def CancelJobV2(self, request: management_pb2.CancelJobRequest, context: _Context) -> management_pb2.Empty:
        is_success = request.job_status == management_pb2.JOB_STATUS_SUCCEEDED
        begin = time.monotonic()
        self._sessions.end_job(request.job_id, is_success=is_success, reason=request.message)
        logger.debug("%s ended in %.1f s", request.job_id, time.monotonic() - begin)
        return management_pb2.Empty()


def _metadata(context: _Context, key: str) -> str:
    values: dict[str, Any] = {entry[0]: entry[1] for entry in context.invocation_metadata()}
    value = values.get(key, "")
    return value[:MAX_NAME] if isinstance(value, str) else ""
