"""Metrics that are accumulated in the traced step, and so on the cluster."""

from cstorch.metrics.confusion import DiceCoefficientMetric, FBetaScoreMetric, MeanIOUMetric, MeanPerClassAccuracyMetric
from cstorch.metrics.means import AccuracyMetric, MeanMetric, PerplexityMetric
from cstorch.metrics.metric import Metric, get_all_metrics
from cstorch.metrics.ranking import AUCMetric, PrecisionAtKMetric, RecallAtKMetric

__all__ = [
    "AUCMetric",
    "AccuracyMetric",
    "DiceCoefficientMetric",
    "FBetaScoreMetric",
    "MeanIOUMetric",
    "MeanMetric",
    "MeanPerClassAccuracyMetric",
    "Metric",
    "PerplexityMetric",
    "PrecisionAtKMetric",
    "RecallAtKMetric",
    "get_all_metrics",
]
