"""Moves a model to the device."""

from typing import Any, cast

import torch
from torch import nn

from cstorch.tracing.tensors.tensor import LazyTensor, from_cpu


def move_module(model: nn.Module) -> None:
    """Move all parameters and buffers. Each Parameter stays the object that it is, so that optimizers and tied modules
    that hold it need not know."""
    replaced: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for tensors in cast("tuple[dict[str, Any], ...]", (module._parameters, module._buffers)):
            for name, tensor in list(tensors.items()):
                if tensor is None or isinstance(tensor, LazyTensor):
                    continue
                if tensor in replaced:
                    tensors[name] = replaced[tensor]
                    continue
                moved = _moved(tensor)
                try:
                    torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]
                except RuntimeError:  # somebody holds a weak reference to it, as nn.LSTM does
                    tensors[name] = replaced[tensor] = moved
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    moved: torch.Tensor = from_cpu(tensor)
    if isinstance(tensor, nn.Parameter):
        moved = nn.Parameter(moved, tensor.requires_grad)
        if tensor.grad is not None:
            moved.grad = from_cpu(tensor.grad)
    return moved
