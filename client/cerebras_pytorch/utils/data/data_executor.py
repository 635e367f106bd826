"""The DataExecutor of releases 1.9 to 2.1, which has the cluster's configuration."""

from collections.abc import Sequence
from typing import Any

from cerebras_appliance.CSConfig import CSConfig
from cstorch.utils.data import DataExecutor as _DataExecutor
from cstorch.utils.data import DataLoader, Schedule
from cstorch.utils.profiler import Activity


class DataExecutor(_DataExecutor):
    """cstorch.utils.data.DataExecutor, with a cluster of the older defaults if no cs_config is given.

    Args:
        dataloader: The source of the batches.
        num_steps: The number of steps; None: one pass over the dataloader.
        checkpoint_steps: k for checkpoints after steps k, 2k, ... and the last; a Schedule for others; None or 0: none.
        activation_steps: k for step closures on steps k, 2k, ... and the last; None: on every step.
        cs_config: The cluster; the same for all executors of a process. None: the defaults of CSConfig.
        writer: The writer of summaries: it has `add_scalar(name, value, step)` and `add_tensor(name, tensor, step)`.
        profiler_activities: Classes of what `executor.profiler` measures besides the rate.
        additional_activities: More of them.
        listeners: Accepted without effect.

    Reference: releases 2.0 and 2.1, `cerebras_pytorch.utils.data`.
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
