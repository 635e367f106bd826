"""Data, progress and rates."""

from cstorch.utils import data, profiler, progress, tracker

__all__ = ["data", "profiler", "progress", "tracker"]
