"""Losses: torch's, with the parameter `use_autogen` of the real API, and the Dice losses."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from cstorch.nn.functional import one_hot

# --- Losses of torch --------------------------------------------------------------------------------------------------


_Loss = TypeVar("_Loss", bound=nn.Module)


_LOSS_DOC = """torch.nn.{name}, with the parameter `use_autogen` of the real API.

Args:
    *args: The arguments of torch.nn.{name}.
    use_autogen: Accepted without effect: it selects other kernels on the real system.
    **kwargs: The arguments of torch.nn.{name}.

Reference: release 2.10, `cerebras.pytorch.nn`.
"""


def _with_autogen(base: type[_Loss]) -> type[_Loss]:
    """Returns the loss with the parameter `use_autogen`."""

    def __init__(self: nn.Module, *args: Any, use_autogen: bool = False, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)

    members = {"__init__": __init__, "__module__": __name__, "__doc__": _LOSS_DOC.format(name=base.__name__)}
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

# --- Losses from the Dice coefficient: twice the overlap over the sum of both areas -----------------------------------


_SMOOTH = 1e-6  # in numerator and denominator: a class that is nowhere, rightly, has coefficient 1


class DiceLoss(nn.Module):
    """One minus the Dice coefficient of a segmentation: a mean over samples and classes.

    Args:
        num_classes: The number of classes. Class 0 is the background.
        to_onehot_y: Whether labels are class numbers, `(N, 1, *spatial)` or `(N, *spatial)`.
        to_onehot_x: Whether predictions are class numbers.
        use_softmax: Whether predictions are scores, `(N, num_classes, *spatial)`, of which the softmax is taken.
        use_argmax: Whether the class of the highest score counts.
        include_background: Whether the background counts.

    Raises:
        ValueError: There are too few classes, or `use_softmax` comes with `use_argmax` or `to_onehot_x`.

    Reference: release 2.10, `cerebras.pytorch.nn`.
    """

    def __init__(
        self,
        num_classes: int,
        to_onehot_y: bool = True,
        to_onehot_x: bool = False,
        use_softmax: bool = True,
        use_argmax: bool = False,
        include_background: bool = False,
    ) -> None:
        super().__init__()
        if not include_background and num_classes < 2:
            raise ValueError("num_classes must be at least 2 without the background")
        if use_softmax and (use_argmax or to_onehot_x):
            raise ValueError("use_softmax takes scores: it goes neither with use_argmax nor with to_onehot_x")
        self.num_classes = num_classes
        self.to_onehot_y = to_onehot_y
        self.to_onehot_x = to_onehot_x
        self.use_softmax = use_softmax
        self.use_argmax = use_argmax
        self.include_background = include_background

    def forward(
        self, outputs: torch.Tensor, labels: torch.Tensor, input_shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Returns the loss, of rank 0.

        Args:
            outputs: The predictions.
            labels: The labels.
            input_shape: The shape of the images, `(N, C, *spatial)`, to whose spatial dimensions the labels are
                reshaped; None: not.
        """
        if self.use_softmax:
            outputs = torch.softmax(outputs, 1)
        elif self.use_argmax:
            outputs = self._one_hot(outputs.argmax(1)).to(outputs.dtype)
        elif self.to_onehot_x:
            outputs = self._one_hot(outputs)
        if self.to_onehot_y:
            labels = self._one_hot(_shaped(labels, input_shape))
        labels = labels.to(outputs.dtype)
        if not self.include_background:
            outputs, labels = outputs[:, 1:], labels[:, 1:]
        outputs, labels = outputs.flatten(2), labels.flatten(2)
        overlap = (outputs * labels).sum(2)
        areas = outputs.sum(2) + labels.sum(2)
        return 1 - ((2 * overlap + _SMOOTH) / (areas + _SMOOTH)).mean()

    def _one_hot(self, classes: torch.Tensor) -> torch.Tensor:
        """Returns class numbers as `(N, num_classes, *spatial)`."""
        if classes.dim() > 2 and classes.shape[1] == 1:
            classes = classes.squeeze(1)
        return one_hot(classes, self.num_classes).movedim(-1, 1)


class DiceCELoss(nn.Module):
    """The sum of the cross entropy and the Dice loss of a segmentation, each with a weight.

    Args:
        num_classes: The number of classes.
        include_background: Whether class 0, the background, counts in the Dice loss.
        wc: The weight of the cross entropy.
        wd: The weight of the Dice loss.

    Reference: release 2.10, `cerebras.pytorch.nn`.
    """

    def __init__(self, num_classes: int, include_background: bool, wc: float = 0.5, wd: float = 0.5) -> None:
        super().__init__()
        self.dice = DiceLoss(num_classes, include_background=include_background)
        self.wc = wc
        self.wd = wd

    def forward(
        self, outputs: torch.Tensor, labels: torch.Tensor, input_shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Returns the loss, of rank 0.

        Args:
            outputs: Scores, `(N, num_classes, *spatial)`.
            labels: Class numbers, `(N, 1, *spatial)` or `(N, *spatial)`.
            input_shape: The shape of the images, `(N, C, *spatial)`, to whose spatial dimensions the labels are
                reshaped; None: not.
        """
        classes = _shaped(labels, input_shape)
        if classes.dim() == outputs.dim():
            classes = classes.squeeze(1)
        return self.wc * F.cross_entropy(outputs, classes.long()) + self.wd * self.dice(outputs, classes)


def _shaped(labels: torch.Tensor, input_shape: Sequence[int] | None) -> torch.Tensor:
    return labels if input_shape is None else labels.reshape(labels.shape[0], *input_shape[2:])
