"""Checks for values that a step leaves for the next one, but that are lost: unregistered state, and gradients."""

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from cstorch._internal.tracing import messages
from cstorch._internal.tracing.context import refuse
from cstorch._internal.tracing.operators import aten, operator
from cstorch._internal.tracing.recording.recorder import Recorder
from cstorch._internal.tracing.recording.trace import Made, Ref
from cstorch._internal.tracing.tensor import LazyTensor


def check_unregistered_state(
    recorder: Recorder,
    known: Iterable[torch.Tensor],
    parameters: Iterable[torch.Tensor],
    optimizers: Iterable[torch.optim.Optimizer],
) -> None:
    """Checks for tensors that plain PyTorch would carry from step to step, but that are no states.

    Args:
        recorder: The recording of the step.
        known: Tensors that may be alive after the step: inputs, outputs, states.
        parameters: Tensors whose gradients may be alive.
        optimizers: The optimizers that stepped.

    Raises:
        TraceError: There is such a tensor.
    """
    for met in recorder.unannounced:
        if met.tensor() is None:
            refuse(messages.replaced_in_step(met.description, met.line), met.line)
    parameters = list(parameters)
    expected = {id(tensor) for tensor in known}
    # A tensor that shares the storage of a state, as after `p.data = kept`, is carried with it.
    carried = {id(tensor._handle.base) for tensor in parameters if isinstance(tensor, LazyTensor)}
    expected |= {id(tensor.grad) for tensor in parameters if tensor.is_leaf and tensor.grad is not None}
    made = {id(tensor): item for item in recorder.made if (tensor := item.tensor()) is not None}
    for optimizer in optimizers:
        for values in optimizer.state.values():
            for name, value in values.items() if isinstance(values, dict) else ():
                if id(value) in made and id(value) not in expected:
                    where = _where(made[id(value)])
                    refuse(messages.created_by_optimizer(value, where, name, type(optimizer)), where)
    if not any(_is_kept_state(item, expected, carried) for item in recorder.made):
        return
    gc.collect()  # a tensor in a reference cycle may be alive without being used
    for item in recorder.made:
        if _is_kept_state(item, expected, carried) and _is_held(item):
            refuse(messages.created_in_step(item.tensor(), _where(item), "and was updated in place"), _where(item))


def _is_kept_state(item: Made, expected: set[int], carried: set[int]) -> bool:
    """Whether a tensor looks like state: alive after the step, changed in place in it, and without gradients."""
    tensor = item.tensor()
    if tensor is None or id(tensor) in expected or tensor.grad_fn is not None:
        return False
    base = tensor._handle.base
    return base is not None and base.written and id(base) not in carried


def _is_held(item: Made) -> bool:
    """Whether a Python object refers to a tensor, and not only autograd."""
    return bool(gc.get_referrers(item.tensor()))


def _where(made: Made) -> str:
    return f"{made.source.file}:{made.source.line}" if made.source.file else "an unknown line"


# --- Gradients --------------------------------------------------------------------------------------------------------


_ZEROS = frozenset({aten.zero_.default, aten._foreach_zero_.default})


def kept_gradients(
    recorder: Recorder, states: Mapping[str, torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[str, ...]:
    """Returns the names of parameters to whose gradients plain PyTorch would add those of the next step."""
    # A step that clears gradients first (`zero_grad`, `p.grad = None`) reads them while there are none; one that clears
    # them last removes them, or sets them to zero. If optimizers stepped, only the gradients of their parameters count.
    updated = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    gradients = {
        name: gradient
        for name, parameter in states.items()
        if id(parameter) not in recorder.read_gradients
        and parameter.is_leaf
        and isinstance(gradient := parameter.grad, LazyTensor)
        and gradient._handle.trace == recorder.number
        and (not updated or id(parameter) in updated)
    }
    if not gradients:
        return ()
    last: dict[int, Any] = {}  # the last operation that wrote to a value in place
    for call in recorder.calls:
        for position in operator(call.func).written:
            written = call.args[position] if position < len(call.args) else None
            for item in written if isinstance(written, list) else (written,):
                if isinstance(item, Ref):
                    last[item.value] = call.func
    return tuple(name for name, gradient in gradients.items() if last.get(gradient._handle.value) not in _ZEROS)
