"""The loss among what a model returns."""

from typing import Any

import torch


def extract_loss(model_outputs: Any) -> Any:
    """The tensor itself; of several outputs the first; of an object its attribute `loss`.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(model_outputs, torch.Tensor):
        return model_outputs
    if isinstance(model_outputs, list | tuple) and model_outputs:
        return model_outputs[0]
    if hasattr(model_outputs, "loss"):
        return model_outputs.loss
    raise TypeError(f"a model returns its loss, a sequence that begins with it, or what has it, not {model_outputs!r}")
