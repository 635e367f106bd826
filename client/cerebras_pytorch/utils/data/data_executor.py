"""The DataExecutor of releases 1.9 to 2.1, which is told the cluster."""

from collections.abc import Sequence
from typing import Any

from cerebras_appliance.CSConfig import CSConfig
from cstorch.utils.data import DataExecutor as _DataExecutor
from cstorch.utils.data import DataLoader, Schedule
from cstorch.utils.profiler import Activity


class DataExecutor(_DataExecutor):
    """cstorch.utils.data.DataExecutor, with a cluster of the older defaults where no cs_config is given.

    additional_activities: as profiler_activities.
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
        super().__init__(
            dataloader,
            num_steps,
            checkpoint_steps,
            activation_steps,
            [*(profiler_activities or ()), *(additional_activities or ())],
            cs_config=CSConfig() if cs_config is None else cs_config,
            writer=writer,
            listeners=listeners,
        )
