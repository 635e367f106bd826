"""Holds cb_model and modes."""

from cerebras_torch.core import cb_model, modes
from cstorch import absent

__all__ = ["cb_model", "modes"]

__getattr__ = absent.getter("cerebras_torch.core")
