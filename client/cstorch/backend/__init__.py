"""backend("CSX" | "CPU"): where the steps of this process run."""

from cstorch.backend.cpu import CpuBackend
from cstorch.backend.csx import CsxBackend
from cstorch.backend.current import (
    backend,
    close_backend,
    current_backend,
    current_backend_impl,
    current_torch_device,
    device,
    get_backend_args,
    has_backend,
    use_backend,
    use_cs,
)
from cstorch.backend.device import Device, DeviceConfig
from cstorch.backend.interface import Backend
from cstorch.backend.kinds import BackendType

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
    "use_backend",
    "use_cs",
]
