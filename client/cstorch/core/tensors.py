"""Tensors with one value, made on the device of the backend: state of optimizers and metrics, mostly."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from cstorch._internal.tracing import LazyTensor, device_scope
from cstorch.backend import current_backend, current_torch_device, has_backend


def _scope(like: torch.Tensor | None = None) -> AbstractContextManager[Any]:
    on_device = isinstance(like, LazyTensor) or (has_backend() and current_backend().is_csx)
    return device_scope() if on_device else nullcontext()


def tensor(data: Any, **settings: Any) -> torch.Tensor:
    """torch.tensor, on the device of the backend."""
    with _scope():
        return torch.tensor(data, **settings)


def full(shape: Sequence[int], value: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of one value, on the device of the backend."""
    with _scope():
        return torch.full(tuple(shape), value, dtype=dtype)


def full_like(other: torch.Tensor, value: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of one value, with the shape and type of another, on the device of the backend."""
    with _scope(other):
        return torch.full(tuple(other.shape), value, dtype=dtype or other.dtype)


def zeros(shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of zeros, on the device of the backend; it takes no room until it is written."""
    with _scope():
        return torch.zeros(tuple(shape), dtype=dtype)


def zeros_like(other: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of zeros, with the shape and type of another, on the device of the backend, without memory."""
    with _scope(other):
        return torch.zeros(tuple(other.shape), dtype=dtype or other.dtype)


def ones(shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of ones, on the device of the backend."""
    return full(shape, 1, dtype=dtype or torch.get_default_dtype())


def ones_like(other: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of ones, with the shape and type of another, on the device of the backend."""
    return full_like(other, 1, dtype=dtype)


def make_constant(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor as a constant of the traced step: its value of now, in every step. Outside of one, on the device.

    On the CPU it is the tensor itself.

    Raises:
        TypeError: it is no tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"make_constant takes a tensor, not {type(tensor).__name__}")
    return tensor.to(current_torch_device())
