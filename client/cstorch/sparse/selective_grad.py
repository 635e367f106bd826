"""SelectiveGrad: some elements of a weight are trained, the others stay as they are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from cstorch.sparse.base import outermost_applied
from cstorch.utils.utils import FilterCallable, make_param_filter

InitMethod = Callable[[torch.Tensor], torch.Tensor]

_OUTLIER_DEVIATIONS = 2.25


class SelectiveGrad:
    """Trains chosen elements of chosen parameters: `model.apply(SelectiveGrad("*.fc.weight"))`, before the optimizer.

    The elements are chosen once and kept in a bool buffer of the parameter's module, `NAME_requires_grad`. The others
    keep their value, have the gradient 0, count as 0 while an optimizer steps, and are 0 in its state.

    Args:
        param_filter: A glob of parameters' names, several, or a function of name and parameter.
        init_method: A function that returns the bool tensor of a parameter, or "outlier": the elements whose magnitude
            is at least 2.25 standard deviations of the magnitudes in their column.

    Raises:
        TypeError: `param_filter` is none of these.
        ValueError: `init_method` is none of these.

    Reference: release 2.10, `cerebras.pytorch.nn`.
    """

    def __init__(
        self, param_filter: str | list[str] | FilterCallable, init_method: str | InitMethod = "outlier"
    ) -> None:
        if init_method != "outlier" and not callable(init_method):
            raise ValueError(f'init_method is "outlier" or a function of a parameter, not {init_method!r}')
        self._filter = make_param_filter(param_filter)
        self._choose: InitMethod = init_method if callable(init_method) else _outliers
        self._parts: list[_Part] = []

    def __call__(self, module: nn.Module) -> None:
        """Applies it to the model whose `apply` was called."""
        if outermost_applied(self, module) is module:
            self.apply(module)

    def apply(self, module: nn.Module) -> None:
        """Chooses elements of a model's parameters, except of those that have chosen elements already.

        Args:
            module: The model.

        Raises:
            TypeError: It is no module.
            ValueError: `init_method` returned something else than a bool tensor of the parameter's shape.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"SelectiveGrad is applied to a torch.nn.Module, not to {type(module).__name__}")
        if not self._parts:
            register_optimizer_step_pre_hook(self._hide)
            register_optimizer_step_post_hook(self._restore)
        for path, parameter in module.named_parameters():
            owner_path, _, name = path.rpartition(".")
            part = _Part(owner=module.get_submodule(owner_path), name=name)
            if part.buffer in part.owner._buffers or not self._filter(path, parameter):
                continue
            with torch.no_grad():
                mask = self._choose(parameter.detach())
            if mask.shape != parameter.shape or mask.dtype is not torch.bool:
                raise ValueError(f"init_method made {mask.dtype}{list(mask.shape)} for {path}, not a bool mask of it")
            part.owner.register_buffer(part.buffer, mask.clone(memory_format=torch.contiguous_format))
            parameter.register_hook(lambda gradient, part=part: torch.where(part.mask, gradient, 0.0))  # type: ignore[no-untyped-call]
            self._parts.append(part)

    def _hide(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Zeroes the elements that are not trained while the optimizer steps."""
        with torch.no_grad():
            for part in self._parts_of(optimizer):
                part.whole = part.parameter.clone()
                part.parameter.mul_(part.mask)
                for value in optimizer.state[part.parameter].values():
                    if isinstance(value, torch.Tensor) and value.shape == part.mask.shape:
                        value.mul_(part.mask)

    def _restore(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for part in self._parts_of(optimizer):
                assert part.whole is not None
                part.parameter.copy_(torch.where(part.mask, part.parameter, part.whole))
                part.whole = None

    def _parts_of(self, optimizer: torch.optim.Optimizer) -> "list[_Part]":
        updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [part for part in self._parts if id(part.parameter) in updated]


@dataclass(slots=True, kw_only=True)
class _Part:
    """A parameter of which some elements are trained. whole: its value before the running step of the optimizer."""

    owner: nn.Module
    name: str
    whole: torch.Tensor | None = None

    @property
    def buffer(self) -> str:
        return f"{self.name}_requires_grad"

    @property
    def parameter(self) -> torch.Tensor:
        parameter = self.owner._parameters[self.name]
        assert parameter is not None
        return parameter

    @property
    def mask(self) -> torch.Tensor:
        mask = self.owner._buffers[self.buffer]
        assert mask is not None
        return mask


def _outliers(parameter: torch.Tensor) -> torch.Tensor:
    magnitude = parameter.abs()
    return magnitude >= _OUTLIER_DEVIATIONS * magnitude.std(dim=0, keepdim=True)
