"""Which cluster a job runs on and what it asks of it."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cstorch.errors import ConfigurationError
from wsc.v1 import node_pb2

MANAGEMENT_VARIABLE = "WAFERBOX_MANAGEMENT"
LANE_VARIABLE = "WAFERBOX_LANE"
RUN_AHEAD_VARIABLE = "WAFERBOX_RUN_AHEAD_STEPS"

LANES: Mapping[str, "node_pb2.Lane.ValueType"] = {
    "auto": node_pb2.LANE_UNSPECIFIED,
    "shared_memory": node_pb2.LANE_SHARED_MEMORY,
    "grpc": node_pb2.LANE_GRPC,
}

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_LABEL = re.compile(r"[^\s=]+=\S*")


def _from_environment(variable: str, default: str) -> Any:
    return field(default_factory=lambda: os.environ.get(variable, default))


@dataclass(kw_only=True)
class ClusterConfig:
    """The fields of the real ClusterConfig, and three of Waferbox.

    mgmt_address: `host:port` of the management service. By default that of the environment variable
        WAFERBOX_MANAGEMENT; without either, the client starts a cluster of child processes and stops it at exit.
    num_csx: wafers that a batch is spread over.
    max_wgt_servers: MemoryX shards at most; 0 leaves it to the cluster.
    num_workers_per_csx: input workers for each wafer.
    job_labels: "key=value" labels of the job.
    mount_dirs, python_paths: folders that the workers' input_fn imports and reads from.
    lane: how tensors travel: "auto" (shared memory within a host, gRPC between hosts), "shared_memory" or "grpc".
    run_ahead_steps: steps that the cluster may be ahead of the script's closures.
    changes_need_checkpoint: whether weights and optimizer state may be changed between two executions only if the last
        step of the first was a checkpoint step, as in releases up to 2.3. Later ones have no such rule.

    The other fields are those of the real system and are accepted; Waferbox has nothing that they would change.

    Raises:
        ConfigurationError: a field has a value that it cannot have.
    """

    mgmt_address: str | None = None
    mgmt_namespace: str | None = None
    credentials_path: str | None = None
    num_csx: int = 1
    max_wgt_servers: int = 0
    max_act_per_csx: int = 0
    num_workers_per_csx: int = 1
    cbcore_image: str | None = None
    job_labels: list[str] = field(default_factory=list)
    job_priority: str = "p2"
    job_time_sec: int | None = None
    mount_dirs: list[str] = field(default_factory=list)
    python_paths: list[str] = field(default_factory=list)
    automount: bool = True
    mount_all: bool = True
    disable_mount_check: bool = True
    disable_version_check: bool = False
    workflow_id: str | None = None
    notifications: list[Any] = field(default_factory=list)
    lane: str = _from_environment(LANE_VARIABLE, "auto")
    changes_need_checkpoint: bool = True
    run_ahead_steps: int = field(default_factory=lambda: _integer_from_environment(RUN_AHEAD_VARIABLE, 16))

    def __post_init__(self) -> None:
        for name, least in (
            ("num_csx", 1),
            ("num_workers_per_csx", 1),
            ("run_ahead_steps", 1),
            ("max_wgt_servers", 0),
            ("max_act_per_csx", 0),
        ):
            _check_count(name, getattr(self, name), least)
        if self.job_time_sec is not None:
            _check_count("job_time_sec", self.job_time_sec, 1)
        if self.job_priority not in ("p1", "p2", "p3"):
            raise ConfigurationError(f"job_priority must be p1, p2 or p3, got {self.job_priority!r}")
        for label in self.job_labels:
            if not isinstance(label, str) or not _LABEL.fullmatch(label):
                raise ConfigurationError(f"a job label looks like key=value, got {label!r}")
        if self.lane not in LANES:
            raise ConfigurationError(f"lane must be one of {', '.join(LANES)}, got {self.lane!r}")
        for folder in self.mount_dirs:
            if not Path(folder).is_dir():
                raise ConfigurationError(f"there is no folder {folder!r} to mount (mount_dirs)")
        if self.mgmt_address is not None:
            check_address(self.mgmt_address, "mgmt_address")

    @classmethod
    def get_default(cls, key: str) -> Any:
        """The default of a field."""
        if key not in {item.name for item in fields(cls)}:
            raise ConfigurationError(f"ClusterConfig has no field {key!r}")
        return getattr(cls(), key)

    @property
    def management(self) -> str | None:
        """The management address to use; None for an embedded cluster."""
        if self.mgmt_address is not None:
            return self.mgmt_address
        address = os.environ.get(MANAGEMENT_VARIABLE)
        return check_address(address, f"the environment variable {MANAGEMENT_VARIABLE}") if address else None


def check_address(address: str, source: str) -> str:
    """Returns a well-formed `host:port`.

    Raises:
        ConfigurationError: it is malformed; the message names the source of the address.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ConfigurationError(f"{source} must look like host:port, for example 127.0.0.1:9000, got {address!r}")
    return address


def _integer_from_environment(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    if text is None:
        return default
    if not text.isdecimal():
        raise ConfigurationError(f"the environment variable {variable} must be a number, got {text!r}")
    return int(text)


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < least:
        raise ConfigurationError(f"{name} must be at least {least}, got {value}")
