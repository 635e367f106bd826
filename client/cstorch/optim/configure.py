"""Optimizers, learning rate schedules and parameter groups from a configuration."""

import inspect
import itertools
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from torch import nn

from cstorch._internal.tracing.provenance import warn_user
from cstorch.optim.lr_scheduler import ChainedLR, ConstantLR, LRScheduler, ScalePerParamLR, SequentialLR
from cstorch.optim.optimizer import Optimizer, ParamsT

# --- Classes by their names in a configuration ------------------------------------------------------------------------


def class_named(base: type[Any], name: str, what: str, suffix: str = "") -> type[Any]:
    """Returns the subclass of that name, in any case, with or without the suffix. Raises ValueError without one."""
    classes = [found for found in _subclasses(base) if not inspect.isabstract(found)]
    wanted = name.lower()
    for found in classes:
        if found.__name__.lower() in (wanted, wanted + suffix.lower()):
            return found
    known = ", ".join(sorted(found.__name__ for found in classes))
    raise ValueError(f"there is no {what} {name!r}; there are {known}")


def _subclasses(base: type[Any]) -> list[type[Any]]:
    return [found for child in base.__subclasses__() for found in (child, *_subclasses(child))]


# --- Optimizers by name -----------------------------------------------------------------------------------------------


# Settings of older configuration files, and the setting whose first and second number they are.
_PAIRS = {
    "betas": ("beta1", "beta2"),
    "eps": ("eps1", "eps2"),
    "etas": ("eta1", "eta2"),
    "step_sizes": ("step_size_min", "step_size_max"),
}


def configure_optimizer(optimizer_type: str, params: ParamsT, **kwargs: Any) -> Optimizer:
    """Makes an optimizer from its name and settings.

    In settings, `weight_decay_rate` is `weight_decay`; `beta1` with `beta2` is `betas`, and so with `eps1` and `eps2`,
    `eta1` and `eta2`, `step_size_min` and `step_size_max`. A setting that the optimizer does not have is left out, with
    a warning. An optimizer that needs `lr` gets `learning_rate` if that is a number, and else 0.1 until a schedule
    writes another.

    Args:
        optimizer_type: The name of an optimizer of `cstorch.optim`, or of a subclass in the script, in any case.
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        **kwargs: The settings.

    Returns:
        The optimizer.

    Raises:
        ValueError: There is no such optimizer, or a setting is out of range.

    Example:
        ::

            optimizer = cstorch.optim.configure_optimizer("AdamW", model.parameters(), lr=1e-3)

    Reference: releases 2.0 and 2.1, `cerebras_pytorch.optim`.
    """
    optimizer_class = class_named(Optimizer, optimizer_type, "optimizer")
    known = inspect.signature(optimizer_class.__init__).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    settings = dict(kwargs)
    if "weight_decay_rate" in settings and "weight_decay" not in settings:
        settings["weight_decay"] = settings.pop("weight_decay_rate")
    for name, parts in _PAIRS.items():
        if name in known and name not in settings and all(part in settings for part in parts):
            settings[name] = tuple(settings.pop(part) for part in parts)
    if "lr" in known and known["lr"].default is inspect.Parameter.empty and "lr" not in settings:
        rate = settings.pop("learning_rate", None)
        settings["lr"] = float(rate) if isinstance(rate, (int, float, str)) else 0.1
    for name in [name for name in settings if name not in known and not takes_all]:
        warn_user(f"{optimizer_class.__name__} has no setting {name!r}: it is left out")
        del settings[name]
    optimizer: Optimizer = optimizer_class(params, **settings)
    return optimizer


# --- Learning rate schedules from a configuration ---------------------------------------------------------------------


LearningRate: TypeAlias = float | str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None

# Names in older configuration files, for schedules that have no setting of that name themselves.
_ALIASES = {
    "steps": "total_iters",
    "decay_steps": "total_iters",
    "learning_rate": "initial_learning_rate",
    "base_lr": "initial_learning_rate",
    "values": "learning_rates",
    "boundaries": "milestones",
}


def configure_lr_scheduler(
    optimizer: Optimizer, learning_rate: LearningRate, adjust_learning_rate: object = None
) -> LRScheduler | None:
    """Makes the learning rate schedule that a configuration describes.

    In configurations "steps" and "decay_steps" are `total_iters`, "learning_rate" and "base_lr" are
    `initial_learning_rate`, "values" is `learning_rates`, "boundaries" is `milestones`. A setting that the schedule
    does not have is left out, with a warning.

    Args:
        optimizer: The optimizer whose learning rate is scheduled.
        learning_rate: A number, for a constant rate. Or a mapping with "scheduler", the name of a schedule in any case
            and with or without "LR", and its settings. Or a list of such mappings, which follow each other, each but
            the last for its "total_iters"; with "main_scheduler": "chained" in one of them they are multiplied.
        adjust_learning_rate: If true, the rate of each group is multiplied by its "adjust_learning_rate".

    Returns:
        The schedule; None if `learning_rate` is None or empty.

    Raises:
        ValueError: There is no such schedule, or one that is followed by another has no number of steps.

    Example:
        ::

            schedule = cstorch.optim.configure_lr_scheduler(
                optimizer, {"scheduler": "CosineDecay", "learning_rate": 0.1, "end_learning_rate": 0, "total_iters": 9}
            )

    Reference: releases 2.0 and 2.1, `cerebras_pytorch.optim`.
    """
    if learning_rate is None or learning_rate == [] or learning_rate == {}:
        return None
    if isinstance(learning_rate, (int, float, str)):
        schedule: LRScheduler = ConstantLR(optimizer, float(learning_rate))
    elif isinstance(learning_rate, Mapping):
        schedule = _configured(optimizer, learning_rate)
    elif len(learning_rate) == 1:
        schedule = _configured(optimizer, learning_rate[0])
    else:
        schedule = _combined(optimizer, learning_rate)
    return ScalePerParamLR(optimizer, schedule) if adjust_learning_rate else schedule


def _combined(optimizer: Optimizer, configurations: Sequence[Mapping[str, Any]]) -> LRScheduler:
    schedules = [_configured(optimizer, configuration) for configuration in configurations]
    mains = [configuration["main_scheduler"] for configuration in configurations if "main_scheduler" in configuration]
    if any(str(main).lower() in ("chained", "chainedlr") for main in mains):
        return ChainedLR(schedules)
    lengths = [_length(configuration) for configuration in configurations[:-1]]
    return SequentialLR(optimizer, schedules, list(accumulate(lengths)))


def _length(configuration: Mapping[str, Any]) -> int:
    for name in ("total_iters", "steps", "decay_steps"):
        if name in configuration:
            return int(configuration[name])
    raise ValueError(
        f"the schedule {configuration['scheduler']!r} is followed by another: it needs total_iters, its number of steps"
    )


def _configured(optimizer: Optimizer, configuration: Mapping[str, Any]) -> LRScheduler:
    settings = {name: value for name, value in configuration.items() if name != "main_scheduler"}
    if "scheduler" not in settings:
        raise ValueError(f"a learning rate schedule needs the key 'scheduler', its name; it has {sorted(settings)}")
    schedule_class = class_named(LRScheduler, settings.pop("scheduler"), "learning rate schedule", "LR")
    known = inspect.signature(schedule_class).parameters
    for alias, name in _ALIASES.items():
        if alias in settings and alias not in known and name in known:
            settings[name] = settings.pop(alias)
    for name in ("total_iters", "steps", "decay_steps"):
        if name not in known:
            settings.pop(name, None)  # how long it is followed by no other
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for name in [name for name in settings if name not in known and not takes_all]:
        # As for optimizers: public configurations have settings of a schedule that this one has replaced.
        warn_user(f"{schedule_class.__name__} has no setting {name!r}: it is left out")
        del settings[name]
    schedule: LRScheduler = schedule_class(optimizer, **settings)
    return schedule


# --- Groups of parameters, and checks of an optimizer's configuration, for scripts of releases 2.0 to 2.2 -------------


_NORMS = (
    nn.LayerNorm,
    nn.modules.batchnorm._NormBase,  # batch and instance norms
    nn.GroupNorm,
    nn.RMSNorm,
)


# Kinds of layers that a scale of the learning rate can be for: what the names of their parameters match.
_LAYER_KINDS = {"decoder_kernel": re.compile("(linear|dense).*weight"), "embedding": re.compile("embedding.*weight")}


def configure_param_groups(model: nn.Module, optimizer_params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a model's trained parameters, in groups of one weight decay and one scale of the learning rate.

    Biases and the parameters of norms have no weight decay.

    Args:
        model: The model.
        optimizer_params: "weight_decay" (or "weight_decay_rate"), and in "adjust_learning_rate" scales by a kind of
            layer ("decoder_kernel": weights of linear and dense layers; "embedding") or by a part of the parameters'
            names.

    Returns:
        Groups for the constructor of an optimizer.

    Raises:
        ValueError: No parameter is in a layer of such a kind, or has a name with such a part.

    Reference: releases 2.0 and 2.1, `cerebras_pytorch.optim`.
    """
    decay = optimizer_params.get("weight_decay", optimizer_params.get("weight_decay_rate", 0.0)) or 0.0
    scales: Mapping[str, float] = optimizer_params.get("adjust_learning_rate") or {}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    patterns = {_LAYER_KINDS.get(part) or re.compile(re.escape(part)): scale for part, scale in scales.items()}
    for part, pattern in zip(scales, patterns, strict=True):
        if not any(pattern.search(name) for name in trained):
            raise ValueError(f"adjust_learning_rate has {part!r}, which is in no parameter's name")
    not_decayed = _not_decayed(model)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in trained.items():
        own_decay = 0.0 if name in not_decayed else decay
        scale = next((scale for pattern, scale in patterns.items() if pattern.search(name)), 1.0)
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
    """Returns the class of an optimizer, and those of the settings that it has.

    Args:
        optimizer_type: The name of the optimizer, in any case.
        kwargs: The settings, and more of them in "optim_params".

    Raises:
        ValueError: There is no such optimizer.
    """
    optimizer_class = class_named(Optimizer, optimizer_type, "optimizer")
    settings = {**kwargs, **(kwargs.get("optim_params") or {})}
    return optimizer_class, _settings_of(optimizer_class, settings)


def configure_scheduler_params(learning_rate: Mapping[str, Any]) -> tuple[type[LRScheduler], dict[str, Any]]:
    """Returns the class of a learning rate schedule, and those of the settings that it has.

    Args:
        learning_rate: The settings, with the name of the schedule in "scheduler".

    Raises:
        ValueError: There is no such schedule, or none is named.
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
