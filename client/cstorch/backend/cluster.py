"""The cluster of a CSX backend, as scripts ask for it: its settings, and the workflow that its jobs belong to."""

import logging
import uuid
from collections.abc import Callable

from cstorch.distributed.cluster_config import ClusterConfig

logger = logging.getLogger("cstorch")


class ManagementClient:
    """What `Cluster.client` is. workflow_id: of the workflow under way, None without one."""

    def __init__(self, workflow_id: Callable[[], str | None]) -> None:
        self._workflow_id = workflow_id

    @property
    def workflow_id(self) -> str | None:
        return self._workflow_id()

    def list_workflow_jobs(self) -> tuple[list[str], list[str]]:
        """Names of compile jobs and of execute jobs: none, as jobs are not kept by workflow."""
        return [], []


class Cluster:
    """The cluster of a backend. config: can be set to another one, which counts from the next compile on."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self.client = ManagementClient(lambda: self.workflow_id)

    @property
    def config(self) -> ClusterConfig:
        return self._config

    @config.setter
    def config(self, config: ClusterConfig) -> None:
        if not isinstance(config, ClusterConfig):
            raise TypeError(f"config must be a cstorch.distributed.ClusterConfig, not {type(config).__name__}")
        if config.workflow_id is None:
            config.workflow_id = self.workflow_id
        self._config = config

    @property
    def workflow_id(self) -> str | None:
        """The workflow's name; None without one."""
        return self._config.workflow_id

    def start_workflow(self, lock_resources: bool = True) -> bool:
        """Begins a workflow: a name for all that the script runs from now on.

        Args:
            lock_resources: changes nothing: a script keeps its one job, and what that has of the cluster, anyway.

        Returns:
            Whether there was none.
        """
        if self.workflow_id is not None:
            logger.info("The workflow %s is under way already", self.workflow_id)
            return False
        self._config.workflow_id = f"wflow-{uuid.uuid4().hex[:12]}"
        logger.info("Began the workflow %s", self.workflow_id)
        return True

    def stop_workflow(self) -> None:
        """Ends the workflow."""
        self._config.workflow_id = None

    def check_storage_connectivity(self) -> bool:
        """False: checkpoints are files of the client, which the cluster does not reach."""
        return False

    def active_resources(self) -> int | None:
        """None: how many wafers of the workflow are in order is not known."""
        return None
