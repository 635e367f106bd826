"""What a restartable loader can ask of the worker that it streams for, in its `state_dict`."""

import json
from dataclasses import dataclass
from typing import Any

from cstorch.errors import UsageError
from waferbox import settings


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLoaderCheckpoint:
    """How far a worker has streamed, since the execution began.

    local_worker_id: its number among the workers of its wafer.
    wse_id: the number of its wafer.
    appliance_step: the step of the execution, from 1, after which the state is taken.
    worker_step: batches of this worker's own until then.
    samples_streamed: rows in them; over all workers they add up to the rows of all batches until then.
    user_state_dict: what the loader's state_dict returned, where it is known already.
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
        """Workers of all wafers."""
        return self.num_csx * self.num_workers_per_csx

    @property
    def global_worker_id(self) -> int:
        """The number of the worker among them."""
        return self.wse_id * self.num_workers_per_csx + self.local_worker_id


class WorkerState:
    """The DataLoaderCheckpoint of this process, while the state of its loader is asked for."""

    _state: DataLoaderCheckpoint | None = None

    @classmethod
    def configure(cls, worker_ckpt: DataLoaderCheckpoint) -> None:
        """Sets it."""
        cls._state = worker_ckpt

    @classmethod
    def clear(cls) -> None:
        """There is none from now on."""
        cls._state = None

    @classmethod
    def get_worker_state(cls) -> DataLoaderCheckpoint:
        """See `get_worker_state`."""
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
    """How far the worker whose loader's `state_dict` this is called in has streamed.

    Raises:
        UsageError: it is not called in there.
    """
    return WorkerState.get_worker_state()
