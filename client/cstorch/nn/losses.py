"""torch's losses, with the argument `use_autogen` of the real API: it asks for other kernels there, and changes nothing
here."""

from typing import Any, TypeVar

from torch import nn

_Loss = TypeVar("_Loss", bound=nn.Module)


def _with_autogen(base: type[_Loss]) -> type[_Loss]:
    """The loss, taking `use_autogen` too."""

    def __init__(self: nn.Module, *args: Any, use_autogen: bool = False, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)

    members = {"__init__": __init__, "__module__": __name__, "__doc__": f"torch.nn.{base.__name__}."}
    return type(base.__name__, (base,), members)


BCELoss = _with_autogen(nn.BCELoss)
BCEWithLogitsLoss = _with_autogen(nn.BCEWithLogitsLoss)
CTCLoss = _with_autogen(nn.CTCLoss)
CosineEmbeddingLoss = _with_autogen(nn.CosineEmbeddingLoss)
CrossEntropyLoss = _with_autogen(nn.CrossEntropyLoss)
GaussianNLLLoss = _with_autogen(nn.GaussianNLLLoss)
HingeEmbeddingLoss = _with_autogen(nn.HingeEmbeddingLoss)
HuberLoss = _with_autogen(nn.HuberLoss)
KLDivLoss = _with_autogen(nn.KLDivLoss)
L1Loss = _with_autogen(nn.L1Loss)
MSELoss = _with_autogen(nn.MSELoss)
MarginRankingLoss = _with_autogen(nn.MarginRankingLoss)
MultiLabelSoftMarginLoss = _with_autogen(nn.MultiLabelSoftMarginLoss)
MultiMarginLoss = _with_autogen(nn.MultiMarginLoss)
NLLLoss = _with_autogen(nn.NLLLoss)
PoissonNLLLoss = _with_autogen(nn.PoissonNLLLoss)
SmoothL1Loss = _with_autogen(nn.SmoothL1Loss)
TripletMarginLoss = _with_autogen(nn.TripletMarginLoss)
TripletMarginWithDistanceLoss = _with_autogen(nn.TripletMarginWithDistanceLoss)
