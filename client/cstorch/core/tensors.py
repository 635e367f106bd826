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
    """Returns a tensor of data on the device of the backend, as torch.tensor.

    Args:
        data: Numbers, in lists or not.
        **settings: Those of torch.tensor, such as `dtype`.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    with _scope():
        return torch.tensor(data, **settings)


def full(shape: Sequence[int], value: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor of one value on the device of the backend.

    Args:
        shape: The shape.
        value: The value of every element.
        dtype: The type; None: torch's default for the value.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    with _scope():
        return torch.full(tuple(shape), value, dtype=dtype)


def full_like(other: torch.Tensor, value: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor of one value, in the shape of another, on the device of the backend.

    Args:
        other: The tensor with the shape.
        value: The value of every element.
        dtype: The type; None: that of `other`.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    with _scope(other):
        return torch.full(tuple(other.shape), value, dtype=dtype or other.dtype)


def zeros(shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor of zeros on the device of the backend. It takes no memory until it is written.

    Args:
        shape: The shape.
        dtype: The type; None: torch's default.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    with _scope():
        return torch.zeros(tuple(shape), dtype=dtype)


def zeros_like(other: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor of zeros, in the shape of another, on the backend's device. It takes no memory until written.

    Args:
        other: The tensor with the shape.
        dtype: The type; None: that of `other`.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    with _scope(other):
        return torch.zeros(tuple(other.shape), dtype=dtype or other.dtype)


def ones(shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor of ones on the device of the backend.

    Args:
        shape: The shape.
        dtype: The type; None: torch's default.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    return full(shape, 1, dtype=dtype or torch.get_default_dtype())


def ones_like(other: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor of ones, in the shape of another, on the device of the backend.

    Args:
        other: The tensor with the shape.
        dtype: The type; None: that of `other`.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    return full_like(other, 1, dtype=dtype)


def make_constant(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor as a constant of the traced step, with its present value in every step.

    Outside a step it returns a copy on the device; on the CPU the tensor itself.

    Args:
        tensor: The tensor.

    Raises:
        TypeError: `tensor` is no tensor.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"make_constant takes a tensor, not {type(tensor).__name__}")
    return tensor.to(current_torch_device())
