"""cstorch.metrics, with the parameter `compute_on_system` of its constructors."""

from collections.abc import Iterator

from cerebras_pytorch import metrics
from cstorch._internal.generations import inherit
from cstorch.errors import ConfigurationError
from cstorch.metrics import AccuracyMetric as _AccuracyMetric
from cstorch.metrics import PerplexityMetric as _PerplexityMetric

__all__ = ["AccuracyMetric", "PerplexityMetric", "compute_all_metrics"]

__getattr__ = inherit("cerebras_pytorch.experimental.metrics", "cstorch.metrics")


class Figures(list[tuple[str, float]]):
    """Names and figures: release 1.8 iterates them, 1.9 their `items()`."""

    def items(self) -> Iterator[tuple[str, float]]:
        """Returns an iterator over the pairs."""
        return iter(self)


def compute_all_metrics() -> Figures:
    """Returns name and figure of every metric.

    Reference: releases 1.8 and 1.9, `cerebras_pytorch.experimental.metrics`.
    """
    return Figures(metrics.compute_all_metrics().items())


class AccuracyMetric(_AccuracyMetric):
    """The share of predictions that are right.

    Args:
        name: The name of the metric.
        compute_on_system: Must be True, as in weight streaming.

    Raises:
        ConfigurationError: `compute_on_system` is False.

    Reference: releases 1.8 and 1.9, `cerebras_pytorch.experimental.metrics`.
    """

    def __init__(self, name: str, compute_on_system: bool = True) -> None:
        _check(name, compute_on_system)
        super().__init__(name)


class PerplexityMetric(_PerplexityMetric):
    """The perplexity over all tokens.

    Args:
        name: The name of the metric.
        compute_on_system: Must be True, as in weight streaming.

    Raises:
        ConfigurationError: `compute_on_system` is False.

    Reference: releases 1.8 and 1.9, `cerebras_pytorch.experimental.metrics`.
    """

    def __init__(self, name: str, compute_on_system: bool = True) -> None:
        _check(name, compute_on_system)
        super().__init__(name)


def _check(name: str, compute_on_system: bool) -> None:
    if not compute_on_system:
        raise ConfigurationError(
            f"the metric {name!r} has compute_on_system=False: for weight streaming mode it must be True"
        )
