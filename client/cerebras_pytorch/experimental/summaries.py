"""scalar_summary and save_summaries: values are kept until the script writes them."""

from typing import Any

import torch

from cstorch.backend import use_cs
from cstorch.core.closures import step_closure

_values: dict[str, float] = {}


def scalar_summary(name: str, value: torch.Tensor) -> None:
    """Keeps the value that a rank 0 tensor has at the end of the step, for `save_summaries`.

    Raises:
        TypeError: on the cluster, value is a Python number: the step is traced once, so it would never change.
    """
    if not isinstance(value, torch.Tensor) and use_cs():
        raise TypeError(
            f"scalar_summary({name!r}, ...) was given a Python {type(value).__name__}, which the traced step sees "
            "once: give it a tensor"
        )
    _keep(name, value)


@step_closure
def _keep(name: str, value: Any) -> None:
    _values[name] = float(value)


def save_summaries(writer: Any, step: int) -> None:
    """Gives the writer, with `add_scalar(name, value, step)`, what was kept since the last time. For step closures."""
    for name, value in _values.items():
        writer.add_scalar(name, value, step)
    _values.clear()
