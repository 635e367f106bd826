"""Holds cb_model."""

from cerebras_torch.core import cb_model

__all__ = ["cb_model"]
