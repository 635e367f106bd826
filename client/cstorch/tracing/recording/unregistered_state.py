"""Finds state that the step made for itself: it would be made anew in every step, and carry nothing."""

import gc
from collections.abc import Iterable

import torch

from cstorch.tracing import messages
from cstorch.tracing.recording.parts import Made
from cstorch.tracing.recording.recorder import Recorder
from cstorch.tracing.tensors.tensor import LazyTensor


def check_unregistered_state(
    recorder: Recorder,
    known: Iterable[torch.Tensor],
    parameters: Iterable[torch.Tensor],
    optimizers: Iterable[torch.optim.Optimizer],
) -> None:
    """Raise TraceError for what plain PyTorch would carry from step to step, but is not state here.

    known: tensors that may well be alive after the step: inputs, outputs, state. parameters: whose gradients may be.
    """
    for met in recorder.met:
        if met.tensor() is None:
            raise messages.replaced_in_step(met.description, met.line)
    parameters = list(parameters)
    expected = {id(tensor) for tensor in known}
    # What shares the storage of a state, as after `p.data = kept`, is carried with it.
    carried = {id(tensor._handle.base) for tensor in parameters if isinstance(tensor, LazyTensor)}
    expected |= {id(tensor.grad) for tensor in parameters if tensor.is_leaf and tensor.grad is not None}
    made = {id(tensor): item for item in recorder.made if (tensor := item.tensor()) is not None}
    for optimizer in optimizers:
        for values in optimizer.state.values():
            for name, value in values.items() if isinstance(values, dict) else ():
                if id(value) in made and id(value) not in expected:
                    raise messages.created_by_optimizer(value, _where(made[id(value)]), name, type(optimizer))
    if not any(_is_kept_state(item, expected, carried) for item in recorder.made):
        return
    gc.collect()  # what only a reference cycle keeps is not kept by the user
    for item in recorder.made:
        if _is_kept_state(item, expected, carried) and _is_held(item):
            raise messages.created_in_step(item.tensor(), _where(item), "and was updated in place")


def _is_kept_state(item: Made, expected: set[int], carried: set[int]) -> bool:
    """Alive after the step, changed in place within it, and not part of a graph of gradients: it looks like state."""
    tensor = item.tensor()
    if tensor is None or id(tensor) in expected or tensor.grad_fn is not None:
        return False
    base = tensor._handle.base
    return base is not None and base.written and id(base) not in carried


def _is_held(item: Made) -> bool:
    """Held by an object of Python, and not only by autograd, for a backward pass."""
    return bool(gc.get_referrers(item.tensor()))


def _where(made: Made) -> str:
    return f"{made.source.file}:{made.source.line}" if made.source.file else "an unknown line"
