"""Settings that the script's loop may change after the step was traced, and that the step would not see."""

from collections.abc import Sequence
from typing import Any

import torch

from cstorch import state
from cstorch.session.execution.python_state import Change

_PLAIN = (bool, int, float, str, type(None))
_MOST_VARIANTS = 4


class LoopValues:
    """Settings of parameter groups, `requires_grad` and `training`, as they are now.

    A comparison takes a microsecond for each of them that a parameter, a module or a group has.

    Args:
        optimizers: that stepped in the traced step.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        known: list[torch.optim.Optimizer] = [*state.registered("optimizer")]
        known += [optimizer for optimizer in optimizers if not any(optimizer is one for one in known)]
        self._groups = [
            (group, key, f"{type(optimizer).__name__}.param_groups[{number}][{key!r}]")
            for optimizer in known
            for number, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if _is_plain(value)
        ]
        models = state.registered("model")
        modules = {module: path for model in models for path, module in model.named_modules()}
        parameters = {parameter: name for model in models for name, parameter in model.named_parameters()}
        self._modules, self._paths = list(modules), list(modules.values())
        self._parameters, self._names = list(parameters), list(parameters.values())
        self._variants = [self._now()]

    def _now(self) -> tuple[list[Any], list[bool], list[bool]]:
        return (
            [group.get(key) for group, key, _ in self._groups],
            [module.training for module in self._modules],
            [parameter.requires_grad for parameter in self._parameters],
        )

    def changes(self) -> list[Change]:
        """What differs from the step that was traced, and was not met before."""
        if not self._variants:
            return []
        now = self._now()
        for variant in self._variants:
            if variant[1] == now[1] and variant[2] == now[2] and all(map(_same, variant[0], now[0])):
                return []
        first = self._variants[0]
        self._variants = [] if len(self._variants) == _MOST_VARIANTS else [*self._variants, now]
        names = (
            [name for _, _, name in self._groups],
            [f"model.{path}.training".replace("..", ".") for path in self._paths],
            [f"model.{name}.requires_grad" for name in self._names],
        )
        return [
            Change(name=name, before=repr(before), now=repr(value), certain=True)
            for kind in range(3)
            for name, before, value in zip(names[kind], first[kind], now[kind], strict=True)
            if not _same(before, value)
        ]

    def stop(self) -> None:
        """Looks at nothing any more: what changes was said."""
        self._variants = []


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) in (tuple, list) and all(type(item) in _PLAIN for item in value))


def _same(first: Any, now: Any) -> bool:
    """Equal, or nothing that the loop has set: schedules write tensors."""
    return first is now or not _is_plain(now) or bool(first == now)
