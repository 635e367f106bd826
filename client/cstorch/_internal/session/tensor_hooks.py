"""Hooks for values that arrive from the cluster."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["call_tensor_hooks", "register_after_tensor_to_cpu"]

Hook = Callable[[torch.Tensor, str], Any]

_hooks: OrderedDict[int, Hook] = OrderedDict()


def register_after_tensor_to_cpu(hook: Hook) -> RemovableHandle:
    """Registers a function that is called with each output of a step that arrives from the cluster.

    Args:
        hook: Called with the CPU tensor and its name.

    Returns:
        A handle whose `remove` removes the hook.
    """
    handle = RemovableHandle(_hooks)
    _hooks[handle.id] = hook
    return handle


def call_tensor_hooks(values: Mapping[str, torch.Tensor]) -> None:
    """Calls the registered functions with each output of a step."""
    for hook in list(_hooks.values()):
        for name, tensor in values.items():
            hook(tensor, name)
