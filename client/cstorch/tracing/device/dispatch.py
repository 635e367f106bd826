"""Decides what happens to each ATen call that concerns the device: recorded, run at once, or refused."""

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from cstorch.tracing import messages
from cstorch.tracing.context import context
from cstorch.tracing.device import known_values
from cstorch.tracing.eager.run import run as run_eagerly
from cstorch.tracing.operators import aten, operator
from cstorch.tracing.rewrites import decompositions, foreach
from cstorch.tracing.tensors.operands import moves_to_host


def dispatch(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Called for every ATen operation that has a device tensor among its arguments or makes one."""
    if func is aten.is_pinned.default:
        return False
    if func is aten.native_batch_norm.default:
        func, args = _batch_norm(args)
    if func is aten.native_batch_norm_backward.default:
        args = _batch_norm_backward(args)
    if func is aten.polygamma_.default:  # whose schema torch's functionalisation does not know
        tensor, order = args
        func, args = aten.copy_.default, (tensor, torch.polygamma(order, tensor))
    if func in _STORAGE:
        return _other_storage(func, args)
    if foreach.applies(func):
        return foreach.run(func, args, kwargs)
    recorder = context.recorder
    if recorder is None:
        return run_eagerly(func, args, kwargs)
    if func is aten._is_all_true.default and recorder.known_value(args[0], None) is None:
        return torch.tensor(True)  # torch asks this only to raise an error: of what a distribution is given
    if operator(func).reads_values or moves_to_host(func, args, kwargs):
        return known_values.run(func, args, kwargs, recorder)
    if func in known_values.INDEXED:
        args = known_values.without_masks(func, args, recorder)
    if decompositions.applies(func):
        return decompositions.run(func, args, kwargs)
    return recorder.record(func, args, kwargs)


def _batch_norm(args: tuple[Any, ...]) -> tuple[OpOverload, tuple[Any, ...]]:
    """The form of native_batch_norm whose schema says whether it writes to the running statistics."""
    tensor, weight, bias, mean, variance, training, momentum, epsilon = args
    if mean is None:
        return aten._native_batch_norm_legit.no_stats, (tensor, weight, bias, training, momentum, epsilon)
    given = (tensor, weight, bias, mean, variance)
    if not training:
        return aten._native_batch_norm_legit_no_training.default, (*given, momentum, epsilon)
    return aten._native_batch_norm_legit.default, (*given, training, momentum, epsilon)


def _batch_norm_backward(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradient in training reads the saved statistics, in evaluation the running ones: the others are left out."""
    gradient, tensor, weight, mean, variance, saved_mean, saved_deviation, training, epsilon, mask = args
    statistics = (None, None, saved_mean, saved_deviation) if training else (mean, variance, None, None)
    return (gradient, tensor, weight, *statistics, training, epsilon, mask)


_STORAGE = frozenset({aten.set_.source_Tensor, aten.resize_.default, aten.resize_as_.default})


def _other_storage(func: OpOverload, args: tuple[Any, ...]) -> torch.Tensor:
    """Operations that give a tensor another storage: the one of another tensor, or a larger one."""
    tensor: torch.Tensor = args[0]
    other = args[1]
    if func is aten.set_.source_Tensor:
        tensor.data = other
    elif tuple(other.shape if isinstance(other, torch.Tensor) else other) != tuple(tensor.shape):
        raise messages.unsupported(func, "tensors on the device keep their sizes.")
    return tensor
