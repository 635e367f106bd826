"""Values of the traced step that go to the writer of the executor at hand."""

from typing import Any

import torch

from cstorch.backend import use_cs
from cstorch.core.closures import step_closure
from cstorch.execution import current_executor


def summarize_scalar(name: str, scalar: torch.Tensor) -> None:
    """Gives the executor's writer the value that a rank 0 tensor has at the end of every activation step.

    Raises:
        TypeError: on CSX, scalar is a Python number: the step is traced once, so it would be the same in all steps.
    """
    if not isinstance(scalar, torch.Tensor) and use_cs():
        raise TypeError(
            f"summarize_scalar({name!r}, ...) was given a Python {type(scalar).__name__}, which the traced step sees "
            "once: give it a tensor, or call the writer's add_scalar in a step closure"
        )
    _add_scalar(name, scalar)


def summarize_tensor(name: str, tensor: torch.Tensor) -> None:
    """Gives the executor's writer the value that a tensor has at the end of every activation step."""
    _add_tensor(name, tensor)


@step_closure
def _add_scalar(name: str, scalar: Any) -> None:
    writer = _writer()
    if writer is not None:
        writer.add_scalar(name, float(scalar), _step(writer))


@step_closure
def _add_tensor(name: str, tensor: torch.Tensor) -> None:
    writer = _writer()
    if writer is not None:
        writer.add_tensor(name, tensor, _step(writer))


def _writer() -> Any:
    return getattr(current_executor(), "writer", None)


def _step(writer: Any) -> int:
    return current_executor().iteration + getattr(writer, "base_step", 1)
