"""compile and compile_step of release 1.8."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from cerebras_pytorch.experimental.configuration import current_configuration
from cerebras_pytorch.late_backend import LateCsxBackend, backend
from cstorch._internal.tracing import XlaName
from cstorch.backend import Backend, BackendType, CsxBackend, has_backend, use_backend
from cstorch.core.compile import CompiledModel, trace
from cstorch.core.compile import compile as _compile
from cstorch.errors import ConfigurationError, UsageError

compile_step = trace

_BACKENDS = {"WSE_WS": "CSX", "CPU": "CPU"}


class XlaBackend(LateCsxBackend):
    """The CSX backend of release 1.8, whose tensors are of device type `xla`."""

    device_is_xla = True

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._name = XlaName()
        self._name.__enter__()

    def close(self) -> None:
        self._name.__exit__(None, None, None)
        super().close()


@dataclass(frozen=True, slots=True)
class NamedBackend:
    """The attribute `backend` of a compiled model.

    Args:
        name: "WSE_WS" or "CPU".
    """

    name: str

    def is_wse(self) -> bool:
        """Whether steps run on a cluster."""
        return self.name == "WSE_WS"

    def is_gpu(self) -> bool:
        """False."""
        return False


def compile(model: nn.Module, backend: str | Backend | None = None) -> CompiledModel:
    """Moves a model to the device and prepares it for tracing. Nothing is compiled before the first step.

    Args:
        model: Any module.
        backend: "wse_ws" (weight streaming on the cluster) or "cpu", in any case; in 1.9 the backend itself.

    Raises:
        UsageError: There is no configuration yet.
        ConfigurationError: The backend has another name.

    Reference: releases 1.8 and 1.9, `cerebras_pytorch.experimental`.
    """
    if not isinstance(backend, str):
        return _compile(model, backend)
    name = backend.upper()
    if name not in _BACKENDS:
        raise ConfigurationError(f"unknown backend {backend!r}: use one of {', '.join(_BACKENDS).lower()}")
    if not has_backend():
        _make_backend(name)
    compiled = _compile(model, _BACKENDS[name])
    vars(compiled)["backend"] = NamedBackend(name)
    return compiled


def _make_backend(name: str) -> None:
    configuration = current_configuration()
    if configuration is None:
        raise UsageError("call cstorch.configure(...) first, before the model is made: it says which cluster is used")
    if _BACKENDS[name] == "CPU":
        backend("CPU", artifact_dir=configuration.model_dir)
        return
    made = use_backend(
        BackendType.CSX,
        XlaBackend,
        artifact_dir=configuration.model_dir,
        compile_dir=configuration.compile_dir,
        compile_only=configuration.compile_only,
        validate_only=configuration.validate_only,
    )
    if isinstance(made, CsxBackend):  # a checked run may compute by plain PyTorch
        made.use_cluster(configuration.cs_config.cluster_config())
