"""backend("CSX" | "CPU"): where the steps of this process run."""

from cstorch._internal.backend.cpu import CpuBackend
from cstorch._internal.backend.csx import CsxBackend
from cstorch._internal.backend.current import (
    backend,
    close_backend,
    current_backend,
    current_backend_impl,
    current_torch_device,
    device,
    get_backend_args,
    has_backend,
    is_on_csx,
    use_backend,
    use_cs,
)
from cstorch._internal.backend.interface import Backend, BackendType, Device, DeviceConfig

__all__ = [
    "Backend",
    "BackendType",
    "CpuBackend",
    "CsxBackend",
    "Device",
    "DeviceConfig",
    "backend",
    "close_backend",
    "current_backend",
    "current_backend_impl",
    "current_torch_device",
    "device",
    "get_backend_args",
    "has_backend",
    "is_on_csx",
    "use_backend",
    "use_cs",
]
