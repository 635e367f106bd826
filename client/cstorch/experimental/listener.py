"""Hooks for what the modules of a step compute."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from cstorch._internal import state
from cstorch._internal.execution import current_execution
from cstorch.core.closures import summarize_tensor
from cstorch.core.name_scope import get_debug_name
from cstorch.errors import ConfigurationError

__all__ = ["SummaryListener", "create_listener", "register_traced_tensor_hook"]

Hook = Callable[[torch.Tensor, str], Any]


def register_traced_tensor_hook(hook: Hook) -> RemovableHandle:
    """Registers a function that is called with each tensor that a module returns while a step is traced.

    The real system calls it for every operation, in the backward pass too; here it is called for the outputs of
    modules.

    Args:
        hook: Called with the tensor and its name: "model" and the module's path in it, with a number for each tensor
            after the first.

    Returns:
        A handle whose `remove` removes the hook.

    Reference: release 2.10, `cerebras.pytorch.experimental.listener`.
    """

    def listen(module: nn.Module, args: Any, result: Any) -> None:
        if current_execution() is None:
            return
        name = _name_of(module)
        for index, tensor in enumerate(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            hook(tensor, f"{name}.{index}" if index else name)

    return nn.modules.module.register_module_forward_hook(listen)


def _name_of(module: nn.Module) -> str:
    for model in state.registered("model"):
        for path, part in model.named_modules(prefix="model"):
            if part is module:
                return path
    return get_debug_name(module)


class SummaryListener:
    """Calls `summarize_tensor` for the tensors whose names match.

    Args:
        listener_name: The prefix of their names in the summary.
        tensor_names: A pattern as of file names, or several.
    """

    def __init__(self, listener_name: str, tensor_names: str | Sequence[str]) -> None:
        self._name = listener_name
        self._patterns = [tensor_names] if isinstance(tensor_names, str) else list(tensor_names)
        self.handle = register_traced_tensor_hook(self._listen)

    def _listen(self, tensor: torch.Tensor, name: str) -> None:
        if any(fnmatchcase(name, pattern) for pattern in self._patterns):
            summarize_tensor(f"{self._name}/{name}", tensor)


def create_listener(listener_type: str = "summary", **params: Any) -> SummaryListener:
    """Makes the listener of releases 2.1 and 2.2 that a configuration describes. It is active at once.

    Args:
        listener_type: "summary".
        **params: The arguments of SummaryListener.

    Raises:
        ConfigurationError: There is no such type.
    """
    if listener_type != "summary":
        raise ConfigurationError(f"a listener's type is 'summary', not {listener_type!r}")
    return SummaryListener(**params)
