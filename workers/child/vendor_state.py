"""The state of a loader that the vendor's client has sent: by dill, as that client reads it."""

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any


def dump_state(worker: Mapping[str, int], loader: Any) -> str:
    """What a loader would go on from, in hex; worker: what cstorch.distributed.get_worker_state says while it is asked.

    The client reads `user_state_dict` alone of what it gets, so that this needs nothing of the vendor's.
    """
    import dill

    _tell(worker)
    state = SimpleNamespace(**worker, user_state_dict=loader.state_dict())
    return str(dill.dumps(state).hex())


def load_state(text: str) -> Any:
    """What the loader said, of what dump_state has made of it."""
    import dill

    return dill.loads(bytes.fromhex(text)).user_state_dict  # noqa: S301 - only in the process of an input_fn


def _tell(worker: Mapping[str, int]) -> None:
    # A loader that asks for it has imported the package.
    states = sys.modules.get("cerebras.pytorch.distributed.worker_state")
    loaders = sys.modules.get("cerebras.pytorch.utils.data.dataloader")
    if states is not None and loaders is not None:
        states.WorkerState.configure(loaders.DataLoaderCheckpoint(**worker, user_state_dict=None))
