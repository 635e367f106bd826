"""Metrics that are accumulated in the traced step, and so on the cluster."""

from cstorch.metrics.accuracy import AccuracyMetric
from cstorch.metrics.at_k import PrecisionAtKMetric, RecallAtKMetric
from cstorch.metrics.auc import AUCMetric
from cstorch.metrics.f_beta_score import FBetaScoreMetric
from cstorch.metrics.mean import MeanMetric
from cstorch.metrics.metric import Metric, get_all_metrics
from cstorch.metrics.perplexity import PerplexityMetric
from cstorch.metrics.segmentation import DiceCoefficientMetric, MeanIOUMetric, MeanPerClassAccuracyMetric

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
