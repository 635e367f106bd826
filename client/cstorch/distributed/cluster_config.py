"""The cluster that a job runs on, and what the job takes of it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cstorch.distributed import cluster_defaults
from cstorch.distributed.run_settings import configured
from cstorch.errors import ConfigurationError
from waferbox import settings
from waferbox.launch.local_clusters import NAME
from waferbox.limits import MAX_RUN_AHEAD_STEPS, MAX_UINT32, MAX_WAFERS, MAX_WORKERS_PER_WAFER
from wsc.v1 import node_pb2

LANES: Mapping[str, "node_pb2.Lane.ValueType"] = {
    "auto": node_pb2.LANE_UNSPECIFIED,
    "shared_memory": node_pb2.LANE_SHARED_MEMORY,
    "grpc": node_pb2.LANE_GRPC,
}

_RANGES = {
    "num_csx": (1, MAX_WAFERS),
    "num_workers_per_csx": (1, MAX_WORKERS_PER_WAFER),
    "run_ahead_steps": (1, MAX_RUN_AHEAD_STEPS),
    "max_wgt_servers": (0, MAX_UINT32),
    "max_act_per_csx": (0, MAX_UINT32),
}

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_LABEL = re.compile(r"[^\s=]+=\S*")


def _default(name: str, default: Callable[[], Any]) -> Callable[[], Any]:
    """Makes the default of a field: that of the file of defaults if it has the field, else `default()`."""

    def make() -> Any:
        found = cluster_defaults.defaults(frozenset(item.name for item in fields(ClusterConfig)))
        return found[name] if name in found else default()

    return make


@dataclass(kw_only=True)
class ClusterConfig:
    """The cluster that a job runs on, and what it takes of the cluster.

    The defaults below hold unless the YAML file that the environment variable CEREBRAS_WAFER_SCALE_CLUSTER_DEFAULTS
    names has the field. None for a number or a list is its default.

    Args:
        mgmt_address: `host:port` of the management service, or the name of a cluster that this account has started on
            this machine. None: that of the environment variable WAFERBOX_MANAGEMENT, or of the current context in the
            file that CSCONFIG_PATH names, or the cluster of `waferbox up` on this machine. Without any, and with
            "embedded", the client starts a cluster of child processes and stops it at exit.
        mgmt_namespace: The namespace in that file; None: the only one.
        credentials_path: Accepted without effect.
        num_csx: The number of wafers that a batch is spread over; 1 by default.
        max_wgt_servers: The greatest number of MemoryX shards. 0, the default: the job's share of them, as of the
            wafers. A cluster of child processes has at most half as many as cores, or two.
        max_act_per_csx: Accepted without effect.
        num_workers_per_csx: The number of input workers of each wafer; 1 by default.
        cbcore_image: Accepted without effect.
        job_labels: Labels of the job, each "key=value".
        job_priority: "p1" (first), "p2" (the default) or "p3": the place in the queue for nodes, before the job's age.
        job_time_sec: Accepted without effect; in seconds, at least 1.
        mount_dirs: Folders that the workers' input_fn reads from. They must exist.
        python_paths: Folders that the workers' input_fn imports from.
        automount: Accepted without effect.
        mount_all: Accepted without effect.
        disable_mount_check: Accepted without effect.
        disable_version_check: Accepted without effect.
        workflow_id: The name of the workflow that the job belongs to.
        notifications: Accepted without effect.
        lane: How tensors travel: "auto" (shared memory within a host, gRPC between hosts), "shared_memory" or "grpc".
            The default is that of the environment variable WAFERBOX_LANE, or "auto". (Waferbox only.)
        changes_need_checkpoint: Whether weights and optimizer state may change between two executions only if the last
            step of the first was a checkpoint step, as in releases up to 2.3; True by default. (Waferbox only.)
        run_ahead_steps: The number of steps that the cluster may be ahead of the script's closures. The default is that
            of the environment variable WAFERBOX_RUN_AHEAD_STEPS, or 16. (Waferbox only.)

    Raises:
        ConfigurationError: A field has a value that it cannot have.
        TypeError: A number is no int.

    Example:
        ::

            config = cstorch.distributed.ClusterConfig(num_csx=2, mgmt_address="127.0.0.1:9000")
            cstorch.backend("CSX", cluster_config=config)

    Reference: release 2.10, `cerebras.pytorch.distributed`.
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
        for name in (*_RANGES, "job_labels", "mount_dirs", "python_paths", "notifications"):
            if getattr(self, name) is None:
                setattr(self, name, self.get_default(name))
        for name, (least, most) in _RANGES.items():
            _check_count(name, getattr(self, name), least, most)
        if self.job_time_sec is not None:
            _check_count("job_time_sec", self.job_time_sec, 1, MAX_UINT32)
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
            check_named(self.mgmt_address, "mgmt_address")

    def __hash__(self) -> int:
        return hash((self.mgmt_address, self.num_csx, self.num_workers_per_csx, self.job_priority))

    @classmethod
    def get_default(cls, key: str) -> Any:
        """Returns the default of a field.

        Args:
            key: The name of the field.

        Raises:
            ConfigurationError: There is no such field.
        """
        if key not in {item.name for item in fields(cls)}:
            raise ConfigurationError(f"ClusterConfig has no field {key!r}")
        return getattr(cls(), key)

    def named_management(self) -> tuple[str, str]:
        """Returns what names the cluster, as for mgmt_address, and the place that it comes from.

        The text is empty if nothing names a cluster.

        Raises:
            ConfigurationError: The text is malformed.
        """
        if self.mgmt_address is not None:
            return self.mgmt_address, "mgmt_address of the ClusterConfig"
        if named := settings.MANAGEMENT.get():
            source = f"the environment variable {settings.MANAGEMENT.name}"
            return check_named(named, source), source
        source = f"the server in {cluster_defaults.USER_NODE_VARIABLE}"
        of_user_node = cluster_defaults.user_node_address(self.mgmt_namespace)
        return (check_address(of_user_node, source) if of_user_node else ""), source


def is_address(named: str) -> bool:
    """Whether what names a cluster is an address, `host:port`.

    Args:
        named: A well-formed name or address.
    """
    return ":" in named


def check_named(named: str, source: str) -> str:
    """Returns a well-formed `host:port`, or a well-formed name of a cluster.

    Args:
        named: The address or the name.
        source: The place that it comes from, for the message.

    Raises:
        ConfigurationError: It is malformed.
    """
    return named if NAME.fullmatch(named) else check_address(named, source)


def check_address(address: str, source: str) -> str:
    """Returns a well-formed `host:port`.

    Args:
        address: The address.
        source: The place that the address comes from, for the message.

    Raises:
        ConfigurationError: The address is malformed.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ConfigurationError(f"{source} must look like host:port, for example 127.0.0.1:9000, got {address!r}")
    return address


def _check_count(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < least:
        raise ConfigurationError(f"{name} must be at least {least}, got {value}")
    if value > most:
        raise ConfigurationError(f"{name} must be at most {most}, got {value}")
