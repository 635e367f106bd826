"""Metrics that are accumulated in the traced step, and so on the cluster."""

from cstorch.metrics.accuracy import AccuracyMetric
from cstorch.metrics.metric import Metric, get_all_metrics

__all__ = ["AccuracyMetric", "Metric", "get_all_metrics"]
