"""Losses, parameters and functions of the real API; all else is torch.nn's."""

from torch.nn import Buffer, Parameter

from cstorch.nn import functional
from cstorch.nn.losses import (
    BCELoss,
    BCEWithLogitsLoss,
    CosineEmbeddingLoss,
    CrossEntropyLoss,
    CTCLoss,
    DiceCELoss,
    DiceLoss,
    GaussianNLLLoss,
    HingeEmbeddingLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MarginRankingLoss,
    MSELoss,
    MultiLabelSoftMarginLoss,
    MultiMarginLoss,
    NLLLoss,
    PoissonNLLLoss,
    SmoothL1Loss,
    TripletMarginLoss,
    TripletMarginWithDistanceLoss,
)
from cstorch.nn.modules import Scope, StripPadding
from cstorch.sparse.selective_grad import SelectiveGrad

__all__ = [
    "BCELoss",
    "BCEWithLogitsLoss",
    "Buffer",
    "CTCLoss",
    "CosineEmbeddingLoss",
    "CrossEntropyLoss",
    "DiceCELoss",
    "DiceLoss",
    "GaussianNLLLoss",
    "HingeEmbeddingLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "MSELoss",
    "MarginRankingLoss",
    "MultiLabelSoftMarginLoss",
    "MultiMarginLoss",
    "NLLLoss",
    "Parameter",
    "PoissonNLLLoss",
    "Scope",
    "SelectiveGrad",
    "SmoothL1Loss",
    "StripPadding",
    "TripletMarginLoss",
    "TripletMarginWithDistanceLoss",
    "functional",
]
