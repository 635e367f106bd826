"""cstorch.metrics, and all figures at once."""

from cstorch._internal.generations import inherit
from cstorch.metrics import get_all_metrics

__all__ = ["compute_all_metrics"]

__getattr__ = inherit("cerebras_pytorch.metrics", "cstorch.metrics")


def compute_all_metrics() -> dict[str, float]:
    """The figure of every metric by its name, as `get_all_metrics` has it."""
    return {name: float(metric) for name, metric in get_all_metrics()}
