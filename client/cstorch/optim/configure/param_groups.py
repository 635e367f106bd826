"""Groups of parameters, and checks of an optimizer's configuration, for scripts of releases 2.0 to 2.2."""

import inspect
import itertools
from collections.abc import Mapping
from typing import Any

from torch import nn

from cstorch.optim.configure.named import class_named
from cstorch.optim.lr_scheduler import LRScheduler
from cstorch.optim.optimizer import Optimizer

_NORMS = (
    nn.LayerNorm,
    nn.modules.batchnorm._NormBase,  # batch and instance norms
    nn.GroupNorm,
    nn.RMSNorm,
)


def configure_param_groups(model: nn.Module, optimizer_params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A model's parameters that are trained, in groups of one weight decay and one scale of the learning rate.

    Biases and the parameters of norms have no weight decay.

    Args:
        model: any module.
        optimizer_params: "weight_decay" (or "weight_decay_rate"), and in "adjust_learning_rate" scales by a part of
            the parameters' names.

    Raises:
        ValueError: no parameter's name has such a part.
    """
    decay = optimizer_params.get("weight_decay", optimizer_params.get("weight_decay_rate", 0.0)) or 0.0
    scales: Mapping[str, float] = optimizer_params.get("adjust_learning_rate") or {}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for part in scales:
        if not any(part in name for name in trained):
            raise ValueError(f"adjust_learning_rate has {part!r}, which is in no parameter's name")
    not_decayed = _not_decayed(model)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in trained.items():
        own_decay = 0.0 if name in not_decayed else decay
        scale = next((scale for part, scale in scales.items() if part in name), 1.0)
        group = groups.setdefault((own_decay, scale), {"params": [], "weight_decay": own_decay})
        group["params"].append(parameter)
        if scales:
            group["adjust_learning_rate"] = scale
    return list(groups.values())


def _not_decayed(model: nn.Module) -> set[str]:
    in_norms = (
        [f"{path}.{name}".removeprefix(".") for name, _ in module.named_parameters()]
        for path, module in model.named_modules()
        if isinstance(module, _NORMS) or type(module).__name__ == "RMSNorm"
    )
    biases = [name for name, _ in model.named_parameters() if "bias" in name]
    return {*itertools.chain.from_iterable(in_norms), *biases}


def configure_optimizer_params(
    optimizer_type: str, kwargs: Mapping[str, Any]
) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class of an optimizer's name and those of the settings that it has; also those in "optim_params".

    Raises:
        ValueError: there is no such optimizer.
    """
    optimizer_class = class_named(Optimizer, optimizer_type, "optimizer")
    settings = {**kwargs, **(kwargs.get("optim_params") or {})}
    return optimizer_class, _settings_of(optimizer_class, settings)


def configure_scheduler_params(learning_rate: Mapping[str, Any]) -> tuple[type[LRScheduler], dict[str, Any]]:
    """The class of the schedule that a mapping names with "scheduler", and those of the settings that it has.

    Raises:
        ValueError: there is no such schedule, or none is named.
    """
    if "scheduler" not in learning_rate:
        raise ValueError(
            f"a learning rate schedule needs the key 'scheduler', its name; it has {sorted(learning_rate)}"
        )
    schedule_class = class_named(LRScheduler, learning_rate["scheduler"], "learning rate schedule", "LR")
    return schedule_class, _settings_of(schedule_class, learning_rate)


def _settings_of(cls: type[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    known = inspect.signature(cls.__init__).parameters
    return {name: value for name, value in settings.items() if name in known}
