"""configure: all settings of a run, once per process."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cerebras_appliance.CSConfig import CSConfig
from cstorch.backend import has_backend
from cstorch.errors import ConfigurationError, UsageError

_COMPILE_DIR = "/opt/cerebras/cached_compile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The arguments of `configure`. compile_dir: None for the cluster's own cache."""

    model_dir: Path
    compile_dir: str | None
    compile_only: bool
    validate_only: bool
    checkpoint_steps: int
    cs_config: CSConfig


_configuration: Configuration | None = None


def configure(
    model_dir: str | os.PathLike[str] = "./",
    compile_dir: str | os.PathLike[str] | None = _COMPILE_DIR,
    compile_only: bool = False,
    validate_only: bool = False,
    checkpoint_steps: int = 0,
    *,
    seed: int | None = None,
    num_csx: int = 1,
    max_wgt_servers: int = 24,
    mount_dirs: list[str] | None = None,
    python_paths: list[str] | None = None,
    transfer_processes: int = 5,
    num_workers_per_csx: int = 1,
    job_labels: list[str] | None = None,
    max_act_per_csx: int = 1,
    mgmt_address: str | None = None,
    credentials_path: str | None = None,
    debug_args: Any = None,
    execution_strategy: Any = None,
    job_time_sec: int | None = None,
    disable_version_check: bool = False,
) -> None:
    """Configures this process, once, before the model is made.

    Args:
        model_dir: The folder for what executions leave behind.
        compile_dir: The cluster's folder for compiled artifacts; by default in its own cache.
        compile_only: Whether the model is only compiled.
        validate_only: Whether the model is only traced.
        checkpoint_steps: k for checkpoints on every k-th step and on the last; 0: none.
        seed: The seed of torch's generator; None: it stays as it is.
        num_csx: The number of wafers that a batch is spread over.
        max_wgt_servers: The greatest number of MemoryX shards.
        mount_dirs: Folders that the workers' input_fn reads from.
        python_paths: Folders that the workers' input_fn imports from.
        transfer_processes: Accepted without effect.
        num_workers_per_csx: The number of input workers of each wafer.
        job_labels: Labels of the job, each "key=value".
        max_act_per_csx: Accepted without effect.
        mgmt_address: `host:port` of the management service; None: as for ClusterConfig.
        credentials_path: Accepted without effect.
        debug_args: Accepted without effect.
        execution_strategy: "weight_streaming", "pipeline" (layer pipelined mode, for models that fit one wafer), or a
            value of ExecutionStrategy; None: as in CSConfig.
        job_time_sec: Accepted without effect; in seconds.
        disable_version_check: Accepted without effect.

    Raises:
        UsageError: It was called before in this process, or there is a backend already.
        ConfigurationError: A setting has a value that it cannot have.

    Reference: releases 1.8 and 1.9, `cerebras_pytorch.experimental`.
    """
    global _configuration
    if _configuration is not None:
        raise UsageError(
            "cstorch.configure can only be called once and applies globally: any run with a different configuration "
            "must be in a separate process"
        )
    if has_backend():
        raise UsageError("cstorch.configure must be called first: before the model is made, and without a backend")
    if type(checkpoint_steps) is not int:
        raise TypeError(f"checkpoint_steps must be an int, not {type(checkpoint_steps).__name__}")
    if checkpoint_steps < 0:
        raise ConfigurationError(f"checkpoint_steps must not be negative, got {checkpoint_steps}")
    if compile_only and validate_only:
        raise ConfigurationError("compile_only and validate_only exclude each other: choose one")
    cs_config = CSConfig(
        mgmt_address=mgmt_address,
        credentials_path=credentials_path,
        num_csx=num_csx,
        max_wgt_servers=max_wgt_servers,
        max_act_per_csx=max_act_per_csx,
        num_workers_per_csx=num_workers_per_csx,
        transfer_processes=transfer_processes,
        job_time_sec=job_time_sec,
        mount_dirs=mount_dirs,
        python_paths=python_paths,
        job_labels=job_labels,
        debug_args=debug_args,
        execution_strategy=execution_strategy,
        disable_version_check=disable_version_check,
    )
    if seed is not None:
        torch.manual_seed(seed)
    _configuration = Configuration(
        model_dir=Path(model_dir),
        compile_dir=None if compile_dir is None or os.fspath(compile_dir) == _COMPILE_DIR else os.fspath(compile_dir),
        compile_only=compile_only,
        validate_only=validate_only,
        checkpoint_steps=checkpoint_steps,
        cs_config=cs_config,
    )


def current_configuration() -> Configuration | None:
    """Returns the arguments of `configure` in this process; None if it was not called."""
    return _configuration
