"""Updates that take effect only where the gradients are finite: a choice between two values of every state."""

import math
import weakref
from collections.abc import Iterator

import torch

from cstorch._internal.tracing.context import StepRecorder, context
from cstorch.errors import UsageError


class StepNotes:
    """The norms of gradients and the marked tensors of each optimizer, in the step that is being traced."""

    def __init__(self) -> None:
        self.norms: dict[torch.optim.Optimizer, torch.Tensor] = {}  # of the unscaled gradients, before any clipping
        self.marked: dict[torch.optim.Optimizer, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # with the value before


# They end with the recording, and hold nothing of it after it.
_notes: "weakref.WeakKeyDictionary[StepRecorder, StepNotes]" = weakref.WeakKeyDictionary()


def step_notes() -> StepNotes:
    """Returns the notes of the step that this thread traces.

    Raises:
        UsageError: This thread traces none.
    """
    recorder = context.recorder
    if recorder is None:
        raise UsageError("a GradScaler works within a traced step: call it in a function decorated with cstorch.trace")
    return _notes.setdefault(recorder, StepNotes())


def unscaled_norm(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """Returns the norm over all gradients of the optimizer that a GradScaler has unscaled in this step; else None."""
    return None if context.recorder is None else step_notes().norms.get(optimizer)


def isfinite(optimizer: torch.optim.Optimizer) -> torch.Tensor | bool:
    """Whether all gradients of an optimizer are finite in this step, as a boolean tensor of rank 0.

    Args:
        optimizer: The optimizer.

    Returns:
        The tensor; True if no GradScaler has unscaled the gradients in this step, as on the CPU.

    Reference: release 2.10, `cerebras.pytorch.amp`.
    """
    norm = unscaled_norm(optimizer)
    return True if norm is None else norm < math.inf


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The norm over all elements of some gradients, which is finite if and only if all of them are.

    Args:
        gradients: The gradients, in float32 or a half precision.
    """
    # In float64, as squares of scaled gradients overflow float32. The greatest magnitude takes thrice as long.
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def update_if_finite(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> None:
    """Marks a tensor of an optimizer of the script's own before its step changes the tensor in place.

    If a GradScaler then skips the step for gradients that are not finite, the tensor gets its present value back.
    Parameters and the optimizer's state need no mark.

    Args:
        optimizer: The optimizer.
        tensor: The tensor.

    Reference: release 2.10, `cerebras.pytorch.amp`.
    """
    if context.recorder is not None:
        step_notes().marked.setdefault(optimizer, []).append((tensor, tensor.detach().clone()))


class ConditionalUpdate:
    """All that a step of the optimizer changes, from now on; `choose` then keeps the changes or takes them back.

    As torch does not call the optimizer in a step that is skipped, these are the changes of all that its step calls
    too: its hooks, with the masks of sparsity, averages of weights or limits to them, and a closure.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        step_notes()  # raises an error outside of a traced step
        assert context.recorder is not None
        self._optimizer = optimizer
        self._changes = context.recorder.state_changes()

    @torch.no_grad()
    def choose(self, finite: torch.Tensor) -> None:
        """Keeps what changed if `finite`, a boolean of rank 0, is true; restores the values otherwise."""
        self._changes.choose(finite)
        for tensor, before in step_notes().marked.pop(self._optimizer, ()):
            tensor.copy_(torch.where(finite, tensor, before))


def _updated(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that a step updates: those that have a gradient."""
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.grad is not None)


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns the gradients that a step of the optimizer reads."""
    return [parameter.grad for parameter in _updated(optimizer) if parameter.grad is not None]


def clip_norm(optimizer: torch.optim.Optimizer, largest: float, norm: torch.Tensor | None) -> None:
    """Clips the norm over all gradients of the optimizer.

    Args:
        optimizer: The optimizer.
        largest: The greatest norm.
        norm: The norm, if it is known. It is then not computed again, and gradients that were only unscaled are not
            written before the update reads them.
    """
    parameters = list(_updated(optimizer))
    if norm is None:
        torch.nn.utils.clip_grad_norm_(parameters, largest)
    else:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
