"""`import cerebras_pytorch as cstorch`: releases 2.0 and 2.1 of the API.

It is cstorch, but for these: `backend("CSX", ...)` names no cluster, `utils.CSConfig` does, in the DataExecutor's
`cs_config`; and `summarize_scalar` and `summarize_tensor` send values of the traced step to the executor's `writer`.
"""

import torch

from cerebras_pytorch import amp, metrics, utils
from cerebras_pytorch.late_backend import backend
from cerebras_pytorch.summaries import summarize_scalar, summarize_tensor
from cstorch.generations import inherit

__all__ = ["amp", "backend", "manual_seed", "metrics", "summarize_scalar", "summarize_tensor", "utils"]

__getattr__ = inherit("cerebras_pytorch", "cstorch")


def manual_seed(seed: int) -> None:
    """Seeds torch's generator, from which also the cluster's random numbers start."""
    torch.manual_seed(seed)
