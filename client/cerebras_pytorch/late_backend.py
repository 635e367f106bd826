"""A backend whose cluster the first executor names."""

import os
from typing import Any

from cstorch import backends
from cstorch.backend import Backend, BackendType, CpuBackend, CsxBackend, current_backend, use_backend
from cstorch.errors import UsageError

# Settings that are flags in later releases.
_FLAGS = {
    "drop_data": backends.csx.debug,
    "log_initialization": backends.csx.debug,
    "micro_batch_size": backends.csx.performance,
}
_WITHOUT_EFFECT = frozenset({"max_checkpoints", "use_cs_grad_accum"})


class LateCsxBackend(CsxBackend):
    """A CsxBackend whose cluster is named by the first executor, and which takes the flags of later releases."""

    def __init__(
        self,
        artifact_dir: str | os.PathLike[str] | None = None,
        compile_dir: str | os.PathLike[str] | None = None,
        compile_only: bool = False,
        validate_only: bool = False,
        retrace_every_iteration: bool = False,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if name in _FLAGS:
                setattr(_FLAGS[name], name, value)
            elif name not in _WITHOUT_EFFECT:
                raise TypeError(f"the CSX backend has no setting {name!r}")
        super().__init__(
            artifact_dir,
            compile_dir,
            compile_only,
            validate_only,
            retrace_every_iteration=retrace_every_iteration,
        )


def backend(backend_type: str | BackendType | None = None, *args: Any, **settings: Any) -> Backend:
    """Makes the backend of this process, or returns it.

    Args:
        backend_type: "CSX" (or its older name "WSE") or "CPU"; None: the backend that there is.
        *args: For CSX `artifact_dir`, `compile_dir`, `compile_only` and `validate_only`; for the CPU `artifact_dir`.
        **settings: The same by name. `drop_data`, `log_initialization`, `retrace_every_iteration` and
            `micro_batch_size` set the flags of these names in cstorch.backends.csx; `max_checkpoints` and
            `use_cs_grad_accum` have no effect; `mixed_precision` of the CPU is that of `cstorch.backend`.

    Raises:
        UsageError: There is another backend already, or none is there to return.
        ConfigurationError: The name or a setting is wrong.

    Reference: releases 2.0 and 2.1, `cerebras_pytorch`.
    """
    if backend_type is None:
        if args or settings:
            raise UsageError('settings of a backend need its type: backend("CSX", ...)')
        return current_backend()
    if isinstance(backend_type, str):
        backend_type = BackendType.from_str("CSX" if backend_type.upper() == "WSE" else backend_type)
    if backend_type.is_csx:
        return use_backend(backend_type, LateCsxBackend, *args, **settings)
    for name in ("cluster_config", "max_checkpoints"):
        settings.pop(name, None)
    return use_backend(backend_type, CpuBackend, *args, **settings)
