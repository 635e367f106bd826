"""`import cerebras_pytorch as cstorch`: releases 2.0 and 2.1 of the API.

It is cstorch, but that `backend("CSX", ...)` names no cluster: `utils.CSConfig` does, in the DataExecutor's
`cs_config`.

In releases 1.6 to 1.9 the name stands for the present cerebras_torch, so it has that package's own names too.
"""

from importlib import import_module
from typing import Any

import torch

from cerebras_pytorch import amp, metrics, optim, utils
from cerebras_pytorch.late_backend import backend
from cstorch import __version__ as _newest_version
from cstorch._internal.generations import inherit

__all__ = ["amp", "backend", "enable_debug_name_scope", "manual_seed", "metrics", "optim", "utils"]

__version__ = f"2.1.1+{_newest_version.partition('+')[2]}"

_LATE = frozenset({"core", "experimental"})  # packages of its own
_OLDER = frozenset({"Session", "data", "dataloader", "env", "initialize", "module", "optimizer", "state"})

_inherited = inherit("cerebras_pytorch", "cstorch")


def __getattr__(name: str) -> Any:
    # cerebras_torch hooks into every optimizer, so it is imported only when one of its names is used.
    if name in _LATE:
        return import_module(f"cerebras_pytorch.{name}")
    return getattr(import_module("cerebras_torch"), name) if name in _OLDER else _inherited(name)


def enable_debug_name_scope() -> None:
    """Accepts that scripts of release 1.9 ask for names of operations: modules always have names."""


def manual_seed(seed: int) -> None:
    """Seeds torch's generator, from which the cluster's random numbers start too.

    Args:
        seed: The seed.

    Reference: releases 2.0 and 2.1, `cerebras_pytorch`.
    """
    torch.manual_seed(seed)
