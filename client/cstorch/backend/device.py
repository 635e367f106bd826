"""The device of a backend: where tensors are made under `with backend.device:`."""

from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch

from cstorch import backends
from cstorch.backend.kinds import BackendType
from cstorch.tracing import DEVICE, alias_rule, device_scope


class DeviceConfig:
    """Settings of a device, as in releases 2.0 and 2.1; later ones have `cstorch.backends.csx.debug`."""

    __slots__ = ()

    def __init__(self) -> None:
        alias_rule.refuses_explicit = False

    @property
    def lazy_initialization(self) -> bool:
        """Whether initialisation is traced, and run by the cluster while the step is compiled.

        Setting it to True also refuses explicit aliases of weights in the forward pass, as those releases do.
        """
        return backends.csx.debug.lazy_initialization

    @lazy_initialization.setter
    def lazy_initialization(self, enabled: bool) -> None:
        backends.csx.debug.lazy_initialization = alias_rule.refuses_explicit = enabled

    @property
    def drop_data(self) -> bool:
        """As `cstorch.backends.csx.debug.drop_data`."""
        return backends.csx.debug.drop_data

    @drop_data.setter
    def drop_data(self, enabled: bool) -> None:
        backends.csx.debug.drop_data = enabled


class Device:
    """The device of a backend; `with backend.device:` makes what is created within on the device."""

    def __init__(self, backend_type: BackendType) -> None:
        self.backend_type = backend_type
        self.config = DeviceConfig()
        self.torch_device = DEVICE if backend_type.is_csx else torch.device("cpu")
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Self:
        stack = ExitStack()
        stack.enter_context(device_scope() if self.backend_type.is_csx else self.torch_device)
        self._entered.append(stack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, traceback)

    def __str__(self) -> str:
        return self.backend_type.name

    def __repr__(self) -> str:
        return f"Device({self.backend_type.name})"
