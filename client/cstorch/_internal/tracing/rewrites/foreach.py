"""Operations on lists of tensors (`torch._foreach_*`), traced as operations on single tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

_PREFIX = "aten::_foreach_"


def applies(func: OpOverload) -> bool:
    """Whether an operation is one on lists of tensors."""
    return func._schema.name.startswith(_PREFIX)


def run(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
    """Returns the results; None for an operation that writes to its first list."""
    name = func._schema.name.removeprefix(_PREFIX)
    if name == "zero_":  # stays this operation, by which `kept_gradients` finds that a step clears its gradients
        for tensor in args[0]:
            tensor.zero_()
        return None
    function = _function(name.removesuffix("_"))
    count = next(len(argument) for argument in args if isinstance(argument, (list, tuple)))
    results = [
        function(*(_item(argument, index) for argument in args), **{key: _item(kwargs[key], index) for key in kwargs})
        for index in range(count)
    ]
    if not name.endswith("_"):
        return results
    for tensor, result in zip(args[0], results, strict=True):
        tensor.copy_(result)
    return None


def _item(argument: Any, index: int) -> Any:
    return argument[index] if isinstance(argument, (list, tuple)) else argument


def _function(name: str) -> Callable[..., torch.Tensor]:
    function: Callable[..., torch.Tensor] = _FUNCTIONS.get(name) or getattr(torch, name)
    return function


def _extreme(of_tensors: Callable[..., torch.Tensor], of_number: Callable[..., torch.Tensor]) -> Any:
    def function(tensor: torch.Tensor, other: Any) -> torch.Tensor:
        return (of_tensors if isinstance(other, torch.Tensor) else of_number)(tensor, other)

    return function


def _lerp_(self: Sequence[torch.Tensor], tensors1: Sequence[torch.Tensor], weight: Any) -> None:
    """torch._foreach_lerp_ for a weight that is a tensor, of which torch would make a number."""
    for index, (tensor, other) in enumerate(zip(self, tensors1, strict=True)):
        part = _item(weight, index)
        tensor.lerp_(other, part.to(tensor.dtype) if isinstance(part, torch.Tensor) else part)


FORMS: Mapping[Callable[..., Any], Callable[..., Any]] = {torch._foreach_lerp_: _lerp_}

_FUNCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "addcdiv": lambda tensor, one, other, value=1: tensor + value * (one / other),
    "addcmul": lambda tensor, one, other, value=1: tensor + value * (one * other),
    "copy": lambda tensor, source, non_blocking=False: source.to(tensor.dtype),
    "max": torch.amax,
    "maximum": _extreme(torch.maximum, torch.clamp_min),
    "minimum": _extreme(torch.minimum, torch.clamp_max),
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    "norm": lambda tensor, ord=2, dtype=None: torch.linalg.vector_norm(tensor, ord, dtype=dtype),
    "zero": torch.zeros_like,  # of _foreach_zero, which is not in place
}
