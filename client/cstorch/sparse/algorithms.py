"""Sparsity algorithms: static, and GMP, SET and RigL, whose masks change during the training."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cstorch._internal import state
from cstorch.sparse.base import SparseParameter, SparsityAlgorithm
from cstorch.sparse.masks import ScoreShaper, drop_and_grow, keep_highest
from cstorch.sparse.schedules import (
    HyperParameterSchedule,
    ScheduleLike,
    UpdateLike,
    make_schedule,
    make_update_schedule,
)

# --- Static sparsity: the first mask stays ----------------------------------------------------------------------------


class Static(SparsityAlgorithm):
    """Static sparsity: the mask never changes.

    The arguments of SparsityAlgorithm go through `**kwargs`, as in the real class: scripts that make a configuration
    class of the signature then accept the settings of `configure` too, such as param_filter.

    Args:
        sparsity: The fraction of elements that are zero, from 0 to less than 1; None with init_method="from_zeros".
        **kwargs: The other arguments of SparsityAlgorithm.

    Raises:
        ValueError: A setting is out of range.

    Example:
        ::

            sparsity = cstorch.sparse.Static(sparsity=0.75)
            model.apply(sparsity)
            optimizer.apply(sparsity)

    Reference: release 2.10, `cerebras.pytorch.sparse`.
    """

    def __init__(self, sparsity: float | None = None, **kwargs: Any) -> None:
        super().__init__(sparsity, **kwargs)


# --- Dynamic sparsity: masks that change during the training ----------------------------------------------------------


class DynamicSparsityAlgorithm(SparsityAlgorithm, ABC):
    """The base class of algorithms whose masks change. A subclass computes the next mask in `update_mask`.

    The masks and `step` (int64, rank 0: optimizer steps so far) are state of the step. A mask is computed in every
    step, and taken if the step is one of `update`. In the other steps it is computed for sparsity 1, which costs
    little.

    Args:
        sparsity: The fraction of elements that are zero, or a schedule. The first mask has that of step 0.
        update: The steps that update masks: {"freq", "start", "stop"}, {"steps"}, or a function of the step; None: all.
        **kwargs: The other arguments of SparsityAlgorithm.

    Raises:
        ValueError: A setting is out of range, or there is no sparsity.

    Reference: release 2.10, `cerebras.pytorch.sparse`.
    """

    def __init__(
        self,
        sparsity: ScheduleLike | None = None,
        update: UpdateLike = None,
        **kwargs: Any,
    ) -> None:
        if sparsity is None:
            raise ValueError(f"{type(self).__name__} needs a sparsity")
        super().__init__(sparsity, **kwargs)
        self.step = torch.zeros((), dtype=torch.int64)
        self.is_update_step = make_update_schedule(update)

    @abstractmethod
    def update_mask(self, p: torch.Tensor, mask: torch.Tensor, sparsity: torch.Tensor) -> torch.Tensor:
        """Returns the next mask of a parameter (bool), in tensor operations only.

        Args:
            p: The parameter.
            mask: The present mask, bool, of its shape.
            sparsity: The fraction of elements that are to be zero (float32, rank 0).
        """

    def schedules(self) -> list[HyperParameterSchedule]:
        """Returns all schedules of the algorithm."""
        assert self._schedule is not None
        return [self._schedule]

    def sparsify_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        super().sparsify_optimizer(optimizer)
        device = next(self.get_sparse_params(optimizer)).param.device
        self.visit_state(lambda tensor: tensor.to(device))
        for holder in (self, *self.schedules()):
            state.register("sparsity", holder)

    def update(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        with torch.no_grad():
            is_update_step = self.is_update_step(self.step)
            assert self._schedule is not None
            sparsity = self._schedule(self.step, is_update_step)
            self.prepare_update(is_update_step)
            for sparse in self.get_sparse_params(optimizer or self._optimizer):
                self._update_one(sparse, sparsity, is_update_step)
            self.step.add_(1)
        super().update(optimizer)

    def prepare_update(self, is_update_step: torch.Tensor) -> None:
        """Is called once in each step, before the masks of all parameters are updated.

        Args:
            is_update_step: Whether the step updates masks (bool, rank 0).
        """

    def _update_one(self, sparse: SparseParameter, sparsity: torch.Tensor, is_update_step: torch.Tensor) -> None:
        asked = torch.where(is_update_step, sparsity, 1.0)
        new = self.update_mask(sparse.param, sparse.mask, asked)
        sparse.mask.copy_(torch.where(is_update_step, new, sparse.mask))
        for hook in self._target_hooks.values():
            hook(self, sparse.name, sparsity)

    def visit_state(self, f: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        new = f(self.step)
        if new is not None:
            self.step = new
        for schedule in self.schedules():
            schedule.visit_state(f)

    def state_dict(self) -> dict[str, Any]:
        tensors: list[torch.Tensor] = []
        self.visit_state(tensors.append)
        return {"step": tensors[0], "schedules": tensors[1:]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        values = iter([state_dict["step"], *state_dict["schedules"]])
        with torch.no_grad():
            self.visit_state(lambda tensor: tensor.copy_(torch.as_tensor(next(values))))


# --- GMP, SET and RigL ------------------------------------------------------------------------------------------------


class GMP(DynamicSparsityAlgorithm):
    """Gradual magnitude pruning: the weights of largest magnitude stay, as many as the schedule leaves.

    Args:
        sparsity: The fraction of elements that are zero, or a schedule. The first mask has that of step 0.
        update: The steps that update masks: {"freq", "start", "stop"}, {"steps"}, or a function of the step; None: all.
        **kwargs: The other arguments of SparsityAlgorithm.

    Raises:
        ValueError: A setting is out of range, or there is no sparsity.

    Reference: release 2.10, `cerebras.pytorch.sparse`.
    """

    def update_mask(self, p: torch.Tensor, mask: torch.Tensor, sparsity: torch.Tensor) -> torch.Tensor:
        return keep_highest(p.abs(), sparsity)


class SET(DynamicSparsityAlgorithm):
    """Sparse evolutionary training: the smallest connections are dropped, and random ones grow, from zero.

    Args:
        drop_fraction: The fraction of the connections that is dropped; a number or a schedule.
        **kwargs: The arguments of DynamicSparsityAlgorithm.

    Raises:
        ValueError: A setting is out of range, or there is no sparsity.

    Reference: release 2.10, `cerebras.pytorch.sparse`.
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
    """Rigging the lottery: as SET, but the connections grow whose gradients are largest in magnitude.

    Args:
        drop_fraction: The fraction of the connections that is dropped; a number or a schedule.
        balance_in_groups: The number of groups of input channels with equal sparsity; None: one.
        balance_out_groups: The number of groups of output channels with equal sparsity; excludes `balance_in_groups`.
        **kwargs: The arguments of DynamicSparsityAlgorithm.

    Raises:
        ValueError: A setting is out of range, there is no sparsity, or both balances are given.

    Example:
        ::

            sparsity = cstorch.sparse.RigL(sparsity=0.9, update={"freq": 100})
            model.apply(sparsity)
            optimizer.apply(sparsity)

    Reference: release 2.10, `cerebras.pytorch.sparse`.
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
