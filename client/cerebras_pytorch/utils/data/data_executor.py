"""The DataExecutor of releases 1.9 to 2.1, which is told the cluster."""

from collections.abc import Sequence
from typing import Any

from cerebras_appliance.CSConfig import CSConfig
from cerebras_pytorch.late_backend import LateCsxBackend
from cstorch.backend import current_backend
from cstorch.utils.data import DataExecutor as _DataExecutor
from cstorch.utils.data import DataLoader, Schedule
from cstorch.utils.profiler import Activity


class DataExecutor(_DataExecutor):
    """Iterates the steps of one execution.

    Args:
        dataloader, num_steps, checkpoint_steps, activation_steps: as for cstorch.utils.data.DataExecutor.
        cs_config: the cluster and what is used of it; the same for all executors of a process.
        writer: takes what is summarized: `add_scalar(name, value, step)` and `add_tensor(name, tensor, step)`.
        profiler_activities, additional_activities: classes of what else `executor.profiler` measures.
        listeners: accepted; Waferbox has nothing that they would change.

    Raises:
        UsageError: cs_config differs from that of an earlier executor.
    """

    def __init__(
        self,
        dataloader: DataLoader,
        num_steps: int | None = None,
        checkpoint_steps: int | Schedule | None = None,
        *,
        activation_steps: int | None = None,
        cs_config: CSConfig | None = None,
        writer: Any = None,
        profiler_activities: Sequence[type[Activity]] | None = None,
        additional_activities: Sequence[type[Activity]] | None = None,
        listeners: Any = None,
    ) -> None:
        if cs_config is not None and not isinstance(cs_config, CSConfig):
            raise TypeError(f"cs_config must be a cstorch.utils.CSConfig, not {type(cs_config).__name__}")
        activities = [*(profiler_activities or ()), *(additional_activities or ())]
        super().__init__(dataloader, num_steps, checkpoint_steps, activation_steps, activities)
        self.writer = writer
        backend = current_backend()
        if isinstance(backend, LateCsxBackend):
            backend.use_cluster(cs_config or CSConfig())
