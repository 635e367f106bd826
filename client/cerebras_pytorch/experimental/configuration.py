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
    """What `configure` was given. compile_dir: None for the cluster's own cache."""

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
    """Says how this process runs, once, before the model is made.

    Args:
        model_dir: takes what the executions leave behind.
        compile_dir: where the cluster keeps compiled artifacts; by default in its own cache.
        compile_only: only compile the model.
        validate_only: only trace it.
        checkpoint_steps: k for checkpoints on every k-th step and on the last; 0: none.
        seed: of torch's generator.
        num_csx, max_wgt_servers, mount_dirs, python_paths, num_workers_per_csx, job_labels, max_act_per_csx,
            mgmt_address, credentials_path, job_time_sec, disable_version_check: as in ClusterConfig.
        transfer_processes, debug_args: are accepted; Waferbox has nothing that they would change.
        execution_strategy: "weight_streaming", "pipeline" (layer pipelined mode, for models that fit one wafer), or a
            value of ExecutionStrategy; None: as in CSConfig.

    Raises:
        UsageError: it was called before in this process, or there is a backend already.
        ConfigurationError: a setting has a value that it cannot have.
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
    """What `configure` was given in this process, if it was called."""
    return _configuration
