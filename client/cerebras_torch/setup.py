"""initialize, module and optimizer: what comes before the session."""

import os
import re
from typing import Any

import torch
from torch import nn

from cstorch import amp
from cstorch.backend import backend, has_backend
from cstorch.cluster_config import ClusterConfig
from cstorch.compile import CompiledModel, compile
from cstorch.errors import UsageError
from cstorch.optim import Optimizer

_WITHOUT_EFFECT = frozenset({"appliance", "credentials_path"})


def initialize(
    cs_ip: str | None = None,
    *,
    service_workdir: str | os.PathLike[str] = "./",
    compile_dir: str | os.PathLike[str] | None = None,
    compile_only: bool = False,
    validate_only: bool = False,
    num_csx: int = 1,
    use_cbfloat16: bool = False,
    **others: Any,
) -> None:
    """Says where this process runs, once.

    Args:
        cs_ip: the management service as `host:port`. A host without a port only says that a cluster is to be used: the
            one that WAFERBOX_MANAGEMENT names, or else one of child processes. None: the CPU.
        service_workdir: takes what the executions leave behind.
        compile_dir: where the cluster keeps compiled artifacts; by default in its own cache.
        compile_only: stop after the compile.
        validate_only: stop after the lowering on the client.
        num_csx: wafers that a batch is spread over.
        use_cbfloat16: makes it the half type of mixed precision.
        others: appliance and credentials_path are accepted; Waferbox has nothing that they would change.

    Raises:
        UsageError: it was called before in this process.
        ConfigurationError: a setting has a value that it cannot have.
    """
    if unknown := others.keys() - _WITHOUT_EFFECT:
        raise TypeError(f"initialize has no setting {min(unknown)!r}")
    if has_backend():
        raise UsageError("cbtorch.initialize was called before: a process runs in one place, so call it once")
    if use_cbfloat16:
        amp.set_half_dtype("cbfloat16")
    if cs_ip is None:
        backend("CPU", artifact_dir=service_workdir)
        return
    address = cs_ip if re.search(r":\d+$", cs_ip) else None
    backend(
        "CSX",
        artifact_dir=service_workdir,
        compile_dir=compile_dir or "cached_compile",
        compile_only=compile_only,
        validate_only=validate_only,
        cluster_config=ClusterConfig(mgmt_address=address, num_csx=num_csx),
    )


def module(model: nn.Module, device: Any = None) -> CompiledModel:
    """Moves a model to where this process runs.

    Args:
        model: any module.
        device: None; there is one device.

    Raises:
        UsageError: nothing is initialized yet, or a device is given.
    """
    check_initialized()
    if device is not None:
        raise UsageError("cbtorch.module: leave device out, cbtorch.initialize has said where this process runs")
    return compile(model)


def optimizer(optimizer: torch.optim.Optimizer) -> Optimizer:
    """Returns the optimizer, if its step can be recorded.

    Raises:
        UsageError: it is not one of cerebras_torch.optim.
    """
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"torch.optim.{type(optimizer).__name__} makes its state within the step, which is recorded before it "
            f"runs: use cerebras_torch.optim.{type(optimizer).__name__}"
        )
    return optimizer


def check_initialized() -> None:
    """Raises UsageError if `initialize` was not called."""
    if not has_backend():
        raise UsageError("begin with cbtorch.initialize(cs_ip=...): it says where this process runs")
