"""The cluster's errors under the names of the real system."""

from cstorch.errors import ClusterError as ApplianceUnknownError
from cstorch.errors import CompileError as ApplianceCompilationError
from cstorch.errors import CstorchError as ApplianceClientException
from cstorch.errors import JobCancelledError as ClusterJobCancelledByCsctl
from cstorch.errors import VersionMismatchError as ApplianceVersionError

__all__ = [
    "ApplianceClientException",
    "ApplianceCompilationError",
    "ApplianceDeadlockError",
    "ApplianceNanError",
    "ApplianceUnknownError",
    "ApplianceVersionError",
    "ClusterJobCancelledByCsctl",
]


class ApplianceDeadlockError(ApplianceClientException):
    """A step does not end. Scripts handle it; Waferbox does not raise it, as the loss of a role is reported."""


class ApplianceNanError(ApplianceClientException):
    """A loss is not finite. Scripts raise it; Waferbox does not.

    Reference: release 2.10, `cerebras.appliance.errors`.
    """
