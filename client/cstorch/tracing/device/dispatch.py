"""Decides what happens to each ATen call that concerns the device: recorded, run at once, or refused."""

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from cstorch.tracing import messages
from cstorch.tracing.context import StepRecorder, context
from cstorch.tracing.eager.run import run as run_eagerly
from cstorch.tracing.operators import aten, operator
from cstorch.tracing.rewrites import decompositions
from cstorch.tracing.tensors.operands import moves_to_host
from cstorch.tracing.tensors.tensor import LazyTensor


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
    recorder = context.recorder
    if recorder is None:
        return run_eagerly(func, args, kwargs)
    if func is aten._local_scalar_dense.default and _is_constant(args[0], recorder):
        return run_eagerly(func, args, kwargs)
    if operator(func).reads_values or moves_to_host(func, args, kwargs) or _has_mask(func, args):
        raise messages.value_read(func)
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


def _is_constant(tensor: LazyTensor, recorder: StepRecorder) -> bool:
    """A tensor made before the step that is no state and that the step has not used: its value is known and stays."""
    cell = tensor._handle.cell
    return tensor._handle.trace != recorder.number and cell is not None and not recorder.knows(cell)


def _has_mask(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Indexing with a mask gives a shape that depends on values; indexing with integers does not."""
    return func is aten.index.Tensor and any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )
