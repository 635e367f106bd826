"""Checkpoints in the H5 layout of the real system: `save` and `load`."""

from cstorch.storage import constants, serializers
from cstorch.storage.reader import load
from cstorch.storage.writer import save

__all__ = ["constants", "load", "save", "serializers"]
