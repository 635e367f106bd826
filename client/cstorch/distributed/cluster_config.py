"""Which cluster a job runs on and what it asks of it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cstorch.distributed import cluster_defaults
from cstorch.distributed.run_settings import configured
from cstorch.errors import ConfigurationError
from waferbox import settings
from wsc.v1 import node_pb2

LANES: Mapping[str, "node_pb2.Lane.ValueType"] = {
    "auto": node_pb2.LANE_UNSPECIFIED,
    "shared_memory": node_pb2.LANE_SHARED_MEMORY,
    "grpc": node_pb2.LANE_GRPC,
}

_LEAST = {"num_csx": 1, "num_workers_per_csx": 1, "run_ahead_steps": 1, "max_wgt_servers": 0, "max_act_per_csx": 0}

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_LABEL = re.compile(r"[^\s=]+=\S*")


def _default(name: str, default: Callable[[], Any]) -> Callable[[], Any]:
    """Makes the default of a field: that of the file of defaults, if there is one and it has the field."""

    def make() -> Any:
        found = cluster_defaults.defaults(frozenset(item.name for item in fields(ClusterConfig)))
        return found[name] if name in found else default()

    return make


@dataclass(kw_only=True)
class ClusterConfig:
    """The fields of the real ClusterConfig, and three of Waferbox.

    A default is that of the YAML file which the environment variable CEREBRAS_WAFER_SCALE_CLUSTER_DEFAULTS names, if it
    has the field.

    mgmt_address: `host:port` of the management service. By default that of the environment variable
        WAFERBOX_MANAGEMENT, or that of the current context in the file which CSCONFIG_PATH names; without any, the
        client starts a cluster of child processes and stops it at exit.
    mgmt_namespace: chooses among the namespaces of that file.
    num_csx: wafers that a batch is spread over.
    max_wgt_servers: MemoryX shards at most; 0: the job's share of them, as of the wafers. A cluster of child processes
        has no more of them than half of the cores, or two.
    num_workers_per_csx: input workers for each wafer.
    job_labels: "key=value" labels of the job.
    job_priority: "p1" (first), "p2" or "p3": its place in the queue, before its age, where nodes must be waited for.
    mount_dirs, python_paths: folders that the workers' input_fn imports and reads from.
    lane: how tensors travel: "auto" (shared memory within a host, gRPC between hosts), "shared_memory" or "grpc".
    run_ahead_steps: steps that the cluster may be ahead of the script's closures.
    changes_need_checkpoint: whether weights and optimizer state may be changed between two executions only if the last
        step of the first was a checkpoint step, as in releases up to 2.3. Later ones have no such rule.

    The other fields are those of the real system and are accepted; Waferbox has nothing that they would change.

    None for a number or a list means its default.

    Raises:
        ConfigurationError: a field has a value that it cannot have.
    """

    mgmt_address: str | None = field(default_factory=_default("mgmt_address", lambda: None))
    mgmt_namespace: str | None = field(default_factory=_default("mgmt_namespace", lambda: None))
    credentials_path: str | None = field(default_factory=_default("credentials_path", lambda: None))
    num_csx: int = field(default_factory=_default("num_csx", lambda: 1))
    max_wgt_servers: int = field(default_factory=_default("max_wgt_servers", lambda: 0))
    max_act_per_csx: int = field(default_factory=_default("max_act_per_csx", lambda: 0))
    num_workers_per_csx: int = field(default_factory=_default("num_workers_per_csx", lambda: 1))
    cbcore_image: str | None = field(default_factory=_default("cbcore_image", lambda: None))
    job_labels: list[str] = field(default_factory=_default("job_labels", list))
    job_priority: str = field(default_factory=_default("job_priority", lambda: "p2"))
    job_time_sec: int | None = field(default_factory=_default("job_time_sec", lambda: None))
    mount_dirs: list[str] = field(default_factory=_default("mount_dirs", list))
    python_paths: list[str] = field(default_factory=_default("python_paths", list))
    automount: bool = field(default_factory=_default("automount", lambda: True))
    mount_all: bool = field(default_factory=_default("mount_all", lambda: True))
    disable_mount_check: bool = field(default_factory=_default("disable_mount_check", lambda: True))
    disable_version_check: bool = field(default_factory=_default("disable_version_check", lambda: False))
    workflow_id: str | None = field(default_factory=_default("workflow_id", lambda: None))
    notifications: list[Any] = field(default_factory=_default("notifications", list))
    lane: str = field(default_factory=_default("lane", lambda: configured(settings.LANE)))
    changes_need_checkpoint: bool = field(default_factory=_default("changes_need_checkpoint", lambda: True))
    run_ahead_steps: int = field(
        default_factory=_default("run_ahead_steps", lambda: configured(settings.RUN_AHEAD_STEPS))
    )

    def __post_init__(self) -> None:
        for name in (*_LEAST, "job_labels", "mount_dirs", "python_paths", "notifications"):
            if getattr(self, name) is None:
                setattr(self, name, self.get_default(name))
        for name, least in _LEAST.items():
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

    def __hash__(self) -> int:
        return hash((self.mgmt_address, self.num_csx, self.num_workers_per_csx, self.job_priority))

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
        if address := settings.MANAGEMENT.get():
            return check_address(address, f"the environment variable {settings.MANAGEMENT.name}")
        of_user_node = cluster_defaults.user_node_address(self.mgmt_namespace)
        source = f"the server in {cluster_defaults.USER_NODE_VARIABLE}"
        return check_address(of_user_node, source) if of_user_node else None


def check_address(address: str, source: str) -> str:
    """Returns a well-formed `host:port`.

    Raises:
        ConfigurationError: it is malformed; the message names the source of the address.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ConfigurationError(f"{source} must look like host:port, for example 127.0.0.1:9000, got {address!r}")
    return address


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < least:
        raise ConfigurationError(f"{name} must be at least {least}, got {value}")
