"""The setup of a script of release 1.2: initialize, module, optimizer and compile."""

import inspect
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from cerebras_torch import run
from cstorch import amp, backends, optim
from cstorch._internal.tracing.messages import is_of_torch
from cstorch.backend import backend, has_backend, is_on_csx
from cstorch.core.compile import CompiledModel
from cstorch.core.compile import compile as compile_module
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.distributed.run_settings import is_strategy_in_environment
from cstorch.errors import UsageError
from cstorch.optim import Optimizer
from cstorch.optim.lr_scheduler import LRScheduler

# Settings of how torch computes, without effect on the numbers.
_WITHOUT_EFFECT = frozenset({"foreach", "fused", "capturable", "differentiable"})


def wrap_optimizer(optimizer: torch.optim.Optimizer) -> Optimizer:
    """Returns the optimizer of the same name in cstorch.optim, with the parameter groups and settings of this one.

    Raises:
        UsageError: There is none, or it lacks a setting that is on; or the given one has stepped already.
    """
    name = type(optimizer).__name__
    same = getattr(optim, name, None) if is_of_torch(type(optimizer)) else None
    if same is None:
        raise UsageError(
            f"{name} makes its state within the step, which is recorded before it runs: make it a subclass of "
            "cerebras_torch.optim.Optimizer"
        )
    if any(float(values.get("step", 1)) for values in optimizer.state.values()):
        raise UsageError(
            f"this {name} has stepped already: wrap an optimizer before its first step, then load its state"
        )
    known = inspect.signature(same.__init__).parameters
    groups = [{"params": group["params"], **_settings(name, group, known)} for group in optimizer.param_groups]
    wrapped: Optimizer = same(groups, **_settings(name, optimizer.defaults, known))
    return wrapped


def _settings(name: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    left = {key: value for key, value in given.items() if key != "params" and key not in _WITHOUT_EFFECT}
    for key in left.keys() - known.keys():
        # A setting that is off, or a note of the script's own schedule, changes nothing.
        if left[key] and key in inspect.signature(getattr(torch.optim, name).__init__).parameters:
            raise UsageError(
                f"cerebras_torch.optim.{name} has no setting {key!r}, which is {left[key]!r}: leave it out"
            )
    return {key: value for key, value in left.items() if key in known}


# --- initialize, module and optimizer: what comes before the session; compile, what comes after it --------------------


def initialize(
    cs_ip: str | None = None,
    *,
    service_workdir: str | os.PathLike[str] = "./",
    compile_dir: str | os.PathLike[str] | None = None,
    compile_only: bool = False,
    validate_only: bool = False,
    num_csx: int = 1,
    use_cbfloat16: bool = False,
    appliance: bool = False,
    credentials_path: str | None = None,
    use_appliance_data: bool = True,
    log_initialization: bool = True,
) -> None:
    """Chooses where this process runs, once.

    Args:
        cs_ip: The management service as `host:port`. A host without a port means a cluster: the one that
            WAFERBOX_MANAGEMENT names, or one of child processes. None: the CPU, unless `compile_only`, `validate_only`
            or `appliance` is true.
        service_workdir: The folder for what executions leave behind.
        compile_dir: The cluster's folder for compiled artifacts; None: in its own cache.
        compile_only: Whether to stop after the compile.
        validate_only: Whether to stop after the lowering on the client.
        num_csx: The number of wafers that a batch is spread over.
        use_cbfloat16: Whether cbfloat16 is the half type of mixed precision.
        appliance: Whether a cluster is used, as with `cs_ip`, and weights are streamed. Without it, and with one wafer,
            steps run in layer pipelined mode, unless the flag `cstorch.backends.csx.performance.execution_strategy` or
            the environment variable WAFERBOX_EXECUTION_STRATEGY names another strategy.
        credentials_path: Accepted without effect.
        use_appliance_data: Accepted without effect.
        log_initialization: The flag of this name in cstorch.backends.csx.debug.

    Raises:
        UsageError: It was called before in this process.
        ConfigurationError: A setting has a value that it cannot have.

    Reference: releases 1.2 to 1.7, `cerebras_torch`.
    """
    if has_backend():
        raise UsageError("cbtorch.initialize was called before: a process runs in one place, so call it once")
    backends.csx.debug.log_initialization = log_initialization
    if use_cbfloat16:
        amp.set_half_dtype("cbfloat16")
    if cs_ip is None and not (compile_only or validate_only or appliance):
        backend("CPU", artifact_dir=service_workdir)
    else:
        if not appliance and num_csx == 1 and not is_strategy_in_environment():
            # A system without appliance ran all layers at once; appliances streamed weights.
            backends.csx.performance.execution_strategy = backends.csx.performance.execution_strategy or "pipeline"
        address = cs_ip if cs_ip is not None and re.search(r":\d+$", cs_ip) else None
        backend(
            "CSX",
            artifact_dir=service_workdir,
            compile_dir=compile_dir or "cached_compile",
            compile_only=compile_only,
            validate_only=validate_only,
            cluster_config=ClusterConfig(mgmt_address=address, num_csx=num_csx),
        )
    run.begin(
        run.Environment(
            service_workdir=os.fspath(service_workdir),
            compile_dir=None if compile_dir is None else os.fspath(compile_dir),
            appliance=appliance,
        )
    )


def module(model: nn.Module, device: Any = None) -> CompiledModel:
    """Moves a model to where this process runs.

    Args:
        model: Any module.
        device: Must be None: there is one device.

    Raises:
        UsageError: Nothing is initialized yet, or a device is given.

    Reference: releases 1.2 to 1.7, `cerebras_torch`.
    """
    check_initialized()
    if device is not None:
        raise UsageError("cbtorch.module: leave device out, cbtorch.initialize has said where this process runs")
    return compile_module(model)


def compile(fabric_config_file: str | os.PathLike[str] | None = None, validate_only: bool = False) -> bool:
    """Returns True if the step of the session has been compiled, or with initialize(validate_only=True) validated.

    Steps are compiled as the session meets them; a failure is an error there.

    Args:
        fabric_config_file: Accepted without effect.
        validate_only: Accepted without effect.

    Raises:
        UsageError: There is no cluster, or no step yet.

    Reference: releases 1.2 to 1.7, `cerebras_torch`.
    """
    check_initialized()
    if not is_on_csx():
        raise UsageError("nothing is compiled for the CPU: give cbtorch.initialize a cs_ip or compile_only=True")
    if run.current_run().steps == 0:
        raise UsageError("no step has been seen yet: call cbtorch.compile after the first body of the session's loop")
    return True


def optimizer(optimizer: torch.optim.Optimizer) -> Optimizer:
    """Returns an optimizer whose step can be recorded.

    It has two methods of this release: `set_main_lr_scheduler(scheduler)` checks that the schedule is one of this
    optimizer, and `convert_state_dict_for_checkpoint(state_dict)` returns its argument, as torch's layout is that of
    checkpoints.

    Args:
        optimizer: An optimizer of cstorch.optim, which is returned; or one of torch.optim, for which the one of the
            same name is made, with its parameter groups and settings.

    Raises:
        UsageError: It is neither, has a setting that changes numbers and is not known here, or has stepped.

    Reference: releases 1.2 to 1.7, `cerebras_torch`.
    """
    wrapped = optimizer if isinstance(optimizer, Optimizer) else wrap_optimizer(optimizer)

    def set_main_lr_scheduler(scheduler: LRScheduler | None) -> None:
        if scheduler is not None and scheduler not in wrapped.schedulers:
            raise UsageError("set_main_lr_scheduler takes a schedule of cerebras_torch.optim made for this optimizer")

    methods = vars(wrapped)
    methods["set_main_lr_scheduler"] = set_main_lr_scheduler
    methods["convert_state_dict_for_checkpoint"] = lambda state_dict: state_dict
    return wrapped


def check_initialized() -> None:
    """Raises UsageError if `initialize` was not called."""
    if not has_backend():
        raise UsageError("begin with cbtorch.initialize(cs_ip=...): it says where this process runs")
