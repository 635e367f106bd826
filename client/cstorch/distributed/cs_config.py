"""The settings of a run on a cluster, as they were before ClusterConfig."""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Self

from cstorch import backends
from cstorch.backends.open_settings import OpenSettings
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.distributed.run_settings import strategy_name
from cstorch.errors import ConfigurationError

_MAX_WGT_SERVERS = 24  # more than any job here has use for


@dataclass(kw_only=True)
class CSConfig:
    """The settings of a run on a cluster in releases before 2.2, with their defaults. None for a field is its default.

    Args:
        mgmt_address: `host:port` of the management service; None: as for ClusterConfig.
        mgmt_namespace: The namespace in the file that CSCONFIG_PATH names.
        credentials_path: Accepted without effect.
        num_csx: The number of wafers that a batch is spread over.
        max_wgt_servers: The greatest number of MemoryX shards. The default is the job's share.
        max_act_per_csx: Accepted without effect.
        num_workers_per_csx: The number of input workers of each wafer; 0: 1.
        transfer_processes: Accepted without effect; at least 1.
        job_time_sec: Accepted without effect; in seconds.
        mount_dirs: Folders that the workers' input_fn reads from.
        python_paths: Folders that the workers' input_fn imports from.
        job_labels: Labels of the job, each "key=value".
        job_priority: "p1" (first), "p2" or "p3": the place in the queue for nodes.
        debug_args: Accepted without effect.
        fabric_type_blacklist: Accepted without effect.
        disable_version_check: Accepted without effect.
        precision_opt_level: Sets `cstorch.backends.csx.precision.optimization_level`, unless it is None.
        execution_strategy: Sets `cstorch.backends.csx.performance.execution_strategy`, unless it is None:
            "weight_streaming" or "pipeline", or a value of ExecutionStrategy.
        volume_mounts: The folders of release 1.6, `VolumeMount` objects, in addition to `mount_dirs`.

    Raises:
        ConfigurationError: A field has a value that it cannot have.

    Reference: releases 2.0 and 2.1, `cerebras_pytorch.utils`.
    """

    mgmt_address: str | None = None
    mgmt_namespace: str | None = None
    credentials_path: str | None = None
    num_csx: int = 1
    max_wgt_servers: int = _MAX_WGT_SERVERS
    max_act_per_csx: int = 60
    num_workers_per_csx: int = 0
    transfer_processes: int = 5
    job_time_sec: int | None = None
    mount_dirs: list[str] | None = field(default_factory=list)
    python_paths: list[str] | None = field(default_factory=list)
    job_labels: list[str] | None = field(default_factory=list)
    job_priority: str = "p2"
    debug_args: Any = field(default_factory=OpenSettings)
    fabric_type_blacklist: list[str] | None = None
    disable_version_check: bool = False
    precision_opt_level: int | None = None
    execution_strategy: Any = None
    volume_mounts: list[Any] | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) is None:
                setattr(self, each.name, each.default if each.default_factory is MISSING else each.default_factory())
        if self.num_workers_per_csx < 0:
            raise ConfigurationError(f"num_workers_per_csx must be at least 0, got {self.num_workers_per_csx}")
        if self.transfer_processes < 1:
            raise ConfigurationError(f"transfer_processes must be at least 1, got {self.transfer_processes}")
        self.cluster_config()
        self.set_flags()

    @classmethod
    def of(cls, config: ClusterConfig) -> Self:
        """Returns the CSConfig of a ClusterConfig.

        Args:
            config: The ClusterConfig.
        """
        known = {each.name for each in fields(config)}
        return cls(**{each.name: getattr(config, each.name) for each in fields(cls) if each.name in known})

    def set_flags(self) -> None:
        """Sets the flags that fields stand for."""
        if self.precision_opt_level is not None:
            backends.csx.precision.optimization_level = self.precision_opt_level
        strategy = strategy_name(self.execution_strategy)
        if strategy is not None:
            backends.csx.performance.execution_strategy = strategy

    def cluster_config(self) -> ClusterConfig:
        """Returns the ClusterConfig of these settings."""
        return ClusterConfig(
            mgmt_address=self.mgmt_address,
            mgmt_namespace=self.mgmt_namespace,
            credentials_path=self.credentials_path,
            num_csx=self.num_csx,
            max_wgt_servers=0 if self.max_wgt_servers == _MAX_WGT_SERVERS else self.max_wgt_servers,
            max_act_per_csx=self.max_act_per_csx,
            num_workers_per_csx=self.num_workers_per_csx or 1,
            job_time_sec=self.job_time_sec,
            mount_dirs=[*(self.mount_dirs or ()), *(mount.mount_path for mount in self.volume_mounts or ())],
            python_paths=list(self.python_paths or ()),
            job_labels=list(self.job_labels or ()),
            job_priority=self.job_priority,
            disable_version_check=self.disable_version_check,
        )
