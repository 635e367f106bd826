"""Static sparsity: the first mask stays."""

from cstorch.sparse.base import InitMethod, SparsityAlgorithm


class Static(SparsityAlgorithm):
    """The mask never changes. sparsity: a number; None with init_method="from_zeros"."""

    def __init__(self, sparsity: float | None = None, init_method: str | InitMethod = "random") -> None:
        super().__init__(sparsity, init_method)
