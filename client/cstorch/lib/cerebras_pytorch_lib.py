"""Notes for the real system's compiler."""

from typing import Any

import torch


def set_attribute(tensor: torch.Tensor, name: str, value: Any) -> None:
    """Accepts a note on the operation that made a tensor; no number depends on it.

    Args:
        tensor: The tensor.
        name: The name of the note.
        value: The note.
    """
