"""GMP, SET and RigL: what stays, what goes, and what comes."""

from typing import Any

import torch

from cstorch.sparse.base import SparseParameter
from cstorch.sparse.dynamic import DynamicSparsityAlgorithm
from cstorch.sparse.masks import ScoreShaper, drop_and_grow, keep_highest
from cstorch.sparse.schedules import HyperParameterSchedule, ScheduleLike, make_schedule


class GMP(DynamicSparsityAlgorithm):
    """Gradual magnitude pruning: the weights of largest magnitude stay, as many as the schedule leaves."""

    def update_mask(self, p: torch.Tensor, mask: torch.Tensor, sparsity: torch.Tensor) -> torch.Tensor:
        return keep_highest(p.abs(), sparsity)


class SET(DynamicSparsityAlgorithm):
    """Sparse evolutionary training: the smallest connections are dropped, and random ones grow, from zero.

    drop_fraction: of the connections that there are; a number or a schedule.
    """

    def __init__(self, drop_fraction: ScheduleLike = 0.3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.drop_fraction = make_schedule(drop_fraction)
        self._dropped: torch.Tensor | None = None  # the fraction in this step

    def schedules(self) -> list[HyperParameterSchedule]:
        return [*super().schedules(), self.drop_fraction]

    def prepare_update(self, is_update_step: torch.Tensor) -> None:
        self._dropped = self.drop_fraction(self.step, is_update_step)

    def update(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().update(optimizer)
        self._dropped = None

    def update_mask(self, p: torch.Tensor, mask: torch.Tensor, sparsity: torch.Tensor) -> torch.Tensor:
        return self._next_mask(p, mask, torch.rand_like(p), sparsity)

    def _next_mask(
        self, p: torch.Tensor, mask: torch.Tensor, scores: torch.Tensor, sparsity: torch.Tensor
    ) -> torch.Tensor:
        assert self._dropped is not None
        return drop_and_grow(
            p.abs(), mask, scores, drop_fraction=self._dropped, sparsity=sparsity, shaper=self._shaper()
        )


class RigL(SET):
    """Rigging the lottery: as SET, but those connections grow whose gradient is largest in magnitude.

    balance_in_groups, balance_out_groups: divide the input or the output channels in so many groups of equal sparsity.
    """

    def __init__(
        self,
        drop_fraction: ScheduleLike = 0.3,
        balance_in_groups: int | None = None,
        balance_out_groups: int | None = None,
        **kwargs: Any,
    ) -> None:
        if balance_in_groups is not None and balance_out_groups is not None:
            raise ValueError("balance_in_groups and balance_out_groups exclude each other: choose one")
        self._balance = ScoreShaper(
            dim=0 if balance_in_groups is None else 1, groups=balance_in_groups or balance_out_groups or 1
        )
        super().__init__(drop_fraction, **kwargs)
        self._gradients: dict[int, torch.Tensor] = {}  # of this step, before they are masked

    def _shaper(self) -> ScoreShaper:
        return self._balance

    def _mask_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for sparse in self.get_sparse_params(optimizer):
            if sparse.param.grad is not None:
                self._gradients[id(sparse.param)] = sparse.param.grad
        super()._mask_gradients(optimizer)

    def update(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().update(optimizer)
        self._gradients.clear()

    def _update_one(self, sparse: SparseParameter, sparsity: torch.Tensor, is_update_step: torch.Tensor) -> None:
        if id(sparse.param) in self._gradients:
            super()._update_one(sparse, sparsity, is_update_step)

    def update_mask(self, p: torch.Tensor, mask: torch.Tensor, sparsity: torch.Tensor) -> torch.Tensor:
        return self._next_mask(p, mask, self._gradients[id(p)].abs(), sparsity)
