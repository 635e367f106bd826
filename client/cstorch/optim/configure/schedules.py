"""Learning rate schedules from a configuration."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from cstorch.optim.configure.named import class_named
from cstorch.optim.lr_scheduler import ChainedLR, ConstantLR, LRScheduler, ScalePerParamLR, SequentialLR
from cstorch.optim.optimizer import Optimizer

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
    """The schedule that a configuration describes; None where it is None or empty.

    learning_rate: a number, for that rate always; or a mapping with "scheduler", the name of a schedule in any case and
    with or without "LR", and its settings; or a list of such mappings, one after the other, each (but the last) for its
    "total_iters", or if one has "main_scheduler": "chained" multiplied. "steps" and "decay_steps" mean total_iters,
    "learning_rate" and "base_lr" initial_learning_rate, "values" learning_rates, "boundaries" milestones.
    adjust_learning_rate: if true, the rate of each parameter group is scaled by its "adjust_learning_rate".
    A setting that the schedule does not have is left out, with a warning. ValueError for an unknown schedule.
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
        # As for optimizers: public configurations have settings of another schedule, which was replaced by this one.
        warnings.warn(f"{schedule_class.__name__} has no setting {name!r}: it is left out", stacklevel=2)
        del settings[name]
    schedule: LRScheduler = schedule_class(optimizer, **settings)
    return schedule
