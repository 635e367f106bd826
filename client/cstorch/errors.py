"""The errors of cstorch.

Errors::

    CstorchError
    ├── UsageError (RuntimeError)            the API is used in a place or an order that it does not allow
    ├── AbsentError (AttributeError)         the name belongs to the real API and is not part of Waferbox
    ├── ConfigurationError (ValueError)      a setting has a value that it cannot have
    ├── TraceError (RuntimeError)            the traced step does what cannot be traced, e.g. reads a value
    │   └── TraceTypeError (TypeError)       the same where Python expects a TypeError, e.g. tensor.numpy()
    ├── CompileError (RuntimeError)          the step cannot be lowered or compiled; names the op and its source line
    ├── InputError (RuntimeError)            the input_fn or its loader failed, on the client or in a worker
    ├── StateError (RuntimeError)            state that lives on the cluster cannot be read or changed now
    ├── CheckpointError (RuntimeError)       a checkpoint file is damaged, partial or foreign
    └── ClusterError (RuntimeError)          the cluster failed
        ├── ClusterUnreachableError (ConnectionError)   there is no answer from the address
        ├── VersionMismatchError             client and cluster are of different versions
        ├── NodeLostError                    a role died or lost its connection; names it
        ├── JobCancelledError                the job was cancelled
        └── InternalError                    a defect of Waferbox; carries the remote traceback

Wrong argument types are plain TypeErrors.

Warnings::

    CstorchWarning (UserWarning)             the script runs, but not as it says, or not as plain PyTorch would
"""


class CstorchWarning(UserWarning):
    """The script runs, but not as it says, or not as plain PyTorch would; `waferbox check` counts it as a finding."""


class CstorchError(Exception):
    """Base of all errors below."""


class UsageError(CstorchError, RuntimeError):
    """The API was used in a place or an order that it does not allow."""


class AbsentError(CstorchError, AttributeError):
    """The name belongs to the real API and is not part of Waferbox; the message says what to do instead."""


class ConfigurationError(CstorchError, ValueError):
    """A setting has a value that it cannot have."""


class TraceError(CstorchError, RuntimeError):
    """The step does something that cannot be traced."""


class TraceTypeError(TraceError, TypeError):
    """A TraceError where Python's own protocol calls for a TypeError."""


class CompileError(CstorchError, RuntimeError):
    """The traced step cannot be lowered or compiled."""


class InputError(CstorchError, RuntimeError):
    """The input_fn, or the loader that it made, failed."""


class StateError(CstorchError, RuntimeError):
    """State that lives on the cluster cannot be read or changed at this moment."""


class CheckpointError(CstorchError, RuntimeError):
    """A checkpoint file is damaged, partially written, or was not written by `save`."""


class ClusterError(CstorchError, RuntimeError):
    """The cluster failed."""


class ClusterUnreachableError(ClusterError, ConnectionError):
    """There is no answer from the management or coordinator address."""


class VersionMismatchError(ClusterError):
    """The client and the cluster are of different versions."""


class NodeLostError(ClusterError):
    """A role of the cluster died, or lost its connection, while it worked for this job."""


class JobCancelledError(ClusterError):
    """The job was cancelled."""


class InternalError(ClusterError):
    """A defect of Waferbox itself."""
