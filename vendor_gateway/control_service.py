"""The vendor's CsCtlV1 service: look-ups in the cluster, and the priority of a job in the queue."""

import re
from typing import Final

import grpc

from cstorch.errors import CstorchError
from vendor_gateway.sessions import UnknownJobError, VendorSessions
from vendor_wire import control_pb2, control_pb2_grpc

MAX_TYPE: Final = 128
_PRIORITY: Final = re.compile(r"[pP]?([1-3])")


class ControlService(control_pb2_grpc.CsCtlV1Servicer):
    """Serves CsCtlV1. A Get finds nothing: the cluster has no volumes and no nodes for inference. Thread-safe."""

    def __init__(self, sessions: VendorSessions) -> None:
        self._sessions = sessions

    def Get(self, request: control_pb2.GetRequest, context: grpc.ServicerContext) -> control_pb2.GetResponse:
        return control_pb2.GetResponse(type=request.type[:MAX_TYPE])

    def UpdateJobPriority(
        self, request: control_pb2.UpdateJobPriorityRequest, context: grpc.ServicerContext
    ) -> control_pb2.UpdateJobPriorityResponse:
        given = _PRIORITY.fullmatch(request.job_priority)
        if given is None:
            message = f"{request.job_priority[:32]!r} is no priority: use p1 (first), p2 or p3"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        try:
            self._sessions.job(request.job_id).session.set_priority(int(given[1]))
        except UnknownJobError as error:
            context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except CstorchError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return control_pb2.UpdateJobPriorityResponse(message=f"{request.job_id} has the priority p{given[1]}")
