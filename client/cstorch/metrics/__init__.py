"""Metrics that are accumulated in the traced step, and so on the cluster."""

from cstorch.metrics.accuracy import AccuracyMetric
from cstorch.metrics.metric import Metric, get_all_metrics
from cstorch.metrics.perplexity import PerplexityMetric

__all__ = ["AccuracyMetric", "Metric", "PerplexityMetric", "get_all_metrics"]
