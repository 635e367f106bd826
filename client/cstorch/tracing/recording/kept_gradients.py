"""Finds gradients that a step leaves for the next one to add to, which here begins without any."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cstorch.tracing.operators import aten, operator
from cstorch.tracing.recording.parts import Ref
from cstorch.tracing.recording.recorder import Recorder
from cstorch.tracing.tensors.tensor import LazyTensor

_ZEROS = frozenset({aten.zero_.default, aten._foreach_zero_.default})


def kept_gradients(
    recorder: Recorder, states: Mapping[str, torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[str, ...]:
    """The names of parameters to whose gradients plain PyTorch would add those of the next step.

    What clears gradients at the beginning of a step (`zero_grad`, `p.grad = None`) looks at them while there are none;
    at its end it drops them, or makes zeros of them. Where optimizers stepped, the gradients of other parameters than
    theirs are used by nobody.
    """
    updated = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    gradients = {
        name: gradient
        for name, parameter in states.items()
        if id(parameter) not in recorder.looked_at
        and parameter.is_leaf
        and isinstance(gradient := parameter.grad, LazyTensor)
        and gradient._handle.trace == recorder.number
        and (not updated or id(parameter) in updated)
    }
    if not gradients:
        return ()
    last: dict[int, Any] = {}  # what wrote to a value in place last
    for call in recorder.calls:
        for position in operator(call.func).written:
            written = call.args[position] if position < len(call.args) else None
            for item in written if isinstance(written, list) else (written,):
                if isinstance(item, Ref):
                    last[item.value] = call.func
    return tuple(name for name, gradient in gradients.items() if last.get(gradient._handle.value) not in _ZEROS)
