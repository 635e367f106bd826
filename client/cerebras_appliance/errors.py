"""The cluster's errors under the names of the real system."""

from cstorch.errors import ClusterError as ApplianceUnknownError
from cstorch.errors import CompileError as ApplianceCompilationError
from cstorch.errors import CstorchError as ApplianceClientException
from cstorch.errors import VersionMismatchError as ApplianceVersionError

__all__ = [
    "ApplianceClientException",
    "ApplianceCompilationError",
    "ApplianceNanError",
    "ApplianceUnknownError",
    "ApplianceVersionError",
]


class ApplianceNanError(ApplianceUnknownError):
    """A loss is not finite. Scripts raise it; Waferbox does not."""
