"""Helpers for classes."""

from cerebras_appliance.utils import classes

__all__ = ["classes"]
