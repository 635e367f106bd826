"""Static sparsity: the first mask stays."""

from typing import Any

from cstorch.sparse.base import SparsityAlgorithm


class Static(SparsityAlgorithm):
    """The mask never changes. sparsity: a number; None with init_method="from_zeros".

    All else is as SparsityAlgorithm takes it. It goes through `**kwargs`, as in the real class: scripts that make a
    configuration class of the signature take that as leave for the settings of `configure`, such as param_filter.
    """

    def __init__(self, sparsity: float | None = None, **kwargs: Any) -> None:
        super().__init__(sparsity, **kwargs)
