"""The progress of a worker, which a restartable loader reads in its `state_dict`."""

import json
from dataclasses import dataclass
from typing import Any

from cstorch.errors import UsageError
from waferbox import settings


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLoaderCheckpoint:
    """The progress of one worker since the execution began.

    Args:
        appliance_step: The step of the execution, from 1, after which the state is taken.
        worker_step: The number of batches of this worker until then.
        samples_streamed: The rows in them. Over all workers they add up to the rows of all batches until then.
        local_worker_id: The number of the worker among those of its wafer.
        num_workers_per_csx: The number of workers of each wafer.
        num_csx: The number of wafers.
        wse_id: The number of its wafer.
        user_state_dict: What the loader's `state_dict` returned, if known already.
    """

    appliance_step: int
    worker_step: int
    samples_streamed: int
    local_worker_id: int = 0
    num_workers_per_csx: int = 1
    num_csx: int = 1
    wse_id: int = 0
    user_state_dict: dict[str, Any] | None = None

    @property
    def total_num_workers(self) -> int:
        """The number of workers of all wafers."""
        return self.num_csx * self.num_workers_per_csx

    @property
    def global_worker_id(self) -> int:
        """The number of the worker among them."""
        return self.wse_id * self.num_workers_per_csx + self.local_worker_id


class WorkerState:
    """The DataLoaderCheckpoint of this process, while its loader's `state_dict` runs.

    Reference: release 2.10, `cerebras.pytorch.distributed`.
    """

    _state: DataLoaderCheckpoint | None = None

    @classmethod
    def configure(cls, worker_ckpt: DataLoaderCheckpoint) -> None:
        """Sets the progress.

        Args:
            worker_ckpt: The progress.
        """
        cls._state = worker_ckpt

    @classmethod
    def clear(cls) -> None:
        """Removes the progress."""
        cls._state = None

    @classmethod
    def get_worker_state(cls) -> DataLoaderCheckpoint:
        """Returns the progress. Raises as `get_worker_state`."""
        if cls._state is not None:
            return cls._state
        text = settings.WORKER_STATE.get()
        if not text:
            raise UsageError(
                "how far a worker has streamed is known while the state of its loader is taken: call get_worker_state "
                "inside the state_dict of your RestartableDataLoader"
            )
        return DataLoaderCheckpoint(**json.loads(text))


def get_worker_state() -> DataLoaderCheckpoint:
    """Returns the progress of the worker whose loader's `state_dict` calls it.

    Raises:
        UsageError: It is called elsewhere.

    Reference: release 2.10, `cerebras.pytorch.distributed`.
    """
    return WorkerState.get_worker_state()
