"""Checkpoints in the H5 layout of the real system: `save` and `load`."""

from cstorch._internal.checkpoint_files.reader import load
from cstorch._internal.checkpoint_files.writer import save
from cstorch.storage import constants, serializers

__all__ = ["constants", "load", "save", "serializers"]
