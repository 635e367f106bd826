"""scalar_summary and save_summaries: values are kept until the script writes them."""

from typing import Any

import torch

from cstorch.backend import is_on_csx
from cstorch.core.closures import step_closure

_values: dict[str, float] = {}


def scalar_summary(name: str, value: torch.Tensor) -> None:
    """Keeps the value that a tensor has at the end of the step, for `save_summaries`.

    Args:
        name: The name of the summary.
        value: A tensor of rank 0; on the CPU a number too.

    Raises:
        TypeError: On the cluster, `value` is a Python number, which would be the same in all steps of a trace.

    Reference: releases 1.8 and 1.9, `cerebras_pytorch.experimental`.
    """
    if not isinstance(value, torch.Tensor) and is_on_csx():
        raise TypeError(
            f"scalar_summary({name!r}, ...) was given a Python {type(value).__name__}, which the traced step sees "
            "once: give it a tensor"
        )
    _keep(name, value)


@step_closure
def _keep(name: str, value: Any) -> None:
    _values[name] = float(value)


def save_summaries(writer: Any, step: int) -> None:
    """Writes the values that were kept since the last call. For step closures.

    Args:
        writer: An object with `add_scalar(name, value, step)`.
        step: The step.

    Reference: releases 1.8 and 1.9, `cerebras_pytorch.experimental`.
    """
    for name, value in _values.items():
        writer.add_scalar(name, value, step)
    _values.clear()
