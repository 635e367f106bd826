"""cstorch.metrics, and the function that computes all metrics."""

from cstorch._internal.generations import inherit
from cstorch.metrics import get_all_metrics

__all__ = ["compute_all_metrics"]

__getattr__ = inherit("cerebras_pytorch.metrics", "cstorch.metrics")


def compute_all_metrics() -> dict[str, float]:
    """Returns the figure of every metric by its name, as `get_all_metrics` has it.

    Reference: releases 2.0 and 2.1, `cerebras_pytorch.metrics`.
    """
    return {name: float(metric) for name, metric in get_all_metrics()}
