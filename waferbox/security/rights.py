"""The table of rights: for each method of each service, the kinds of callers that it is open to, and their jobs."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from waferbox.security.tokens import Kind


class JobScope(enum.Enum):
    """The jobs for which a caller may call a method."""

    ANY = "any"  # any job, or the method is for none
    OWN = "own"  # the job in the request: one of a user, the job of a script or a member, any of admin and viewer
    SERVED = "served"  # the job that the serving process works for; an ingress leaves the check to the coordinator


@dataclass(frozen=True, slots=True)
class Right:
    """The condition for calling a method.

    Attributes:
        kinds: the kinds of tokens that it is open to; none: it is open without a token.
        job_scope: the jobs that a caller may name.
        note: a further condition, which the method itself checks, for the page.
    """

    kinds: frozenset[Kind]
    job_scope: JobScope = JobScope.ANY
    note: str = ""


def _right(*kinds: Kind, job_scope: JobScope = JobScope.ANY, note: str = "") -> Right:
    return Right(frozenset(kinds), job_scope, note)


_MEMBERS: Final = (Kind.NODE, Kind.MANAGEMENT, Kind.COORDINATOR)
_READ: Final = _right(*_MEMBERS, Kind.USER, Kind.ADMIN, Kind.VIEWER)
_OWN_JOB: Final = _right(Kind.USER, Kind.ADMIN, job_scope=JobScope.OWN)
_SCRIPT: Final = _right(Kind.JOB, job_scope=JobScope.SERVED)
_STATE: Final = _right(Kind.JOB, job_scope=JobScope.OWN)
_ANY_CALLER: Final = _right()

RIGHTS: Final[Mapping[str, Right]] = {
    "/wsc.v1.Management/Register": _right(Kind.NODE),
    "/wsc.v1.Management/CreateJob": _right(Kind.USER, Kind.ADMIN, note="the job is the user's"),
    "/wsc.v1.Management/Coordinate": _right(Kind.COORDINATOR, note="the hello names the coordinator's own job"),
    "/wsc.v1.Management/AdoptJob": _right(Kind.COORDINATOR, note="the hello names the coordinator's own job"),
    "/wsc.v1.Management/ListNodes": _READ,
    "/wsc.v1.Management/ListJobs": _READ,
    "/wsc.v1.Management/GetJob": _READ,
    "/wsc.v1.Management/CancelJob": _OWN_JOB,
    "/wsc.v1.Management/SetPriority": _OWN_JOB,
    "/wsc.v1.Management/LabelJob": _OWN_JOB,
    "/wsc.v1.Management/Shutdown": _right(Kind.ADMIN),
    "/wsc.v1.Observation/WatchJob": _right(Kind.USER, Kind.ADMIN, Kind.VIEWER, job_scope=JobScope.OWN),
    "/wsc.v1.Observation/TraceJob": _OWN_JOB,
    "/wsc.v1.Ingress/RunCoordinator": _right(Kind.MANAGEMENT),
    "/wsc.v1.Ingress/EndCoordinator": _right(Kind.MANAGEMENT),
    "/wsc.v1.Coordinator/Session": _SCRIPT,
    "/wsc.v1.Coordinator/Compile": _SCRIPT,
    "/wsc.v1.Coordinator/PrepareInput": _SCRIPT,
    "/wsc.v1.Coordinator/Shards": _SCRIPT,
    "/wsc.v1.Coordinator/Execute": _SCRIPT,
    "/wsc.v1.Coordinator/Finish": _SCRIPT,
    "/wsc.v1.NodeService/Attach": _right(
        Kind.LEASE, note="the lease is of this node, for the job that attaches, and no later one is known"
    ),
    "/wsc.v1.StateService/OpenState": _STATE,
    "/wsc.v1.StateService/ReadState": _STATE,
    "/wsc.v1.StateService/WriteState": _STATE,
    "/wsc.v1.StateService/StageStates": _STATE,
    "/wsc.v1.StateService/InitialiseStates": _STATE,
    "/wsc.v1.StateService/ReadRecoveryPoint": _right(Kind.MEMBER, job_scope=JobScope.OWN),
    "/wsc.v1.Link/Stream": _right(Kind.NODE, Kind.JOB, note="both ends prove that they know the link's own token"),
    "/grpc.health.v1.Health/Check": _ANY_CALLER,
    "/grpc.health.v1.Health/Watch": _ANY_CALLER,
    "/grpc.health.v1.Health/List": _ANY_CALLER,
}
