"""Helpers for classes, files, units and settings of the real system."""

from cerebras_appliance.utils import classes, debug_args, file, ini, units

__all__ = ["classes", "debug_args", "file", "ini", "units"]
