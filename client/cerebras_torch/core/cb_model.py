"""`import cerebras.framework.torch.core.cb_model as cm`: questions about this process, and its session."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from cerebras_torch.session import current_session
from cstorch import absent
from cstorch.backend import current_torch_device as device
from cstorch.backend import use_cs
from cstorch.closures import step_closure
from cstorch.distributed import (
    get_ordinal,
    get_streaming_rank,
    is_master_ordinal,
    is_receiver,
    is_streamer,
    num_receivers,
    num_streamers,
    num_tasks,
)
from cstorch.storage import save
from cstorch.utils.tracker import RateTracker

__all__ = [
    "RateTracker",
    "device",
    "get_ordinal",
    "get_streaming_rank",
    "is_master_ordinal",
    "is_receiver",
    "is_streamer",
    "mark_step",
    "num_receivers",
    "num_streamers",
    "num_tasks",
    "save",
    "step_closure",
    "to_cpu",
    "use_cs",
]

__getattr__ = absent.getter("cerebras_torch.core.cb_model")


def to_cpu(data: Any) -> Any:
    """The same nest with CPU tensors. Not within a step, whose tensors have no values."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), data)


def mark_step() -> None:
    """Ends the step of the open session, if there is one."""
    session = current_session()
    if session is not None:
        session.mark_step()
