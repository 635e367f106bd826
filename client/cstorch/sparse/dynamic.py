"""Dynamic sparsity: masks that change while training goes on."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cstorch import state
from cstorch.sparse.base import SparseParameter, SparsityAlgorithm
from cstorch.sparse.schedules import HyperParameterSchedule, ScheduleLike, UpdateLike, make_update_schedule


class DynamicSparsityAlgorithm(SparsityAlgorithm, ABC):
    """Subclasses say in `update_mask` what the next mask is.

    The masks and `step` (int64, rank 0: optimizer steps so far) are loop-carried state. A mask is computed in every
    step, and taken where the step is one of `update`. In others it is asked for sparsity 1, which costs little.

    sparsity: as in SparsityAlgorithm; the first mask has that of step 0.
    update: {"freq", "start", "stop"}, {"steps"}, a function of the step, or None for every step.
    **kwargs: as in Static.
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
        """The next mask of a parameter (bool), in tensor operations only."""

    def schedules(self) -> list[HyperParameterSchedule]:
        """All that it has."""
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
        """Called once before the masks of all parameters are updated."""

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
