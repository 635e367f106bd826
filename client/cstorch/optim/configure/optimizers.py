"""Optimizers by name."""

import inspect
import warnings
from typing import Any

from cstorch.optim.configure.named import class_named
from cstorch.optim.optimizer import Optimizer, ParamsT

# Settings of older configuration files, and the setting whose first and second number they are.
_PAIRS = {
    "betas": ("beta1", "beta2"),
    "eps": ("eps1", "eps2"),
    "etas": ("eta1", "eta2"),
    "step_sizes": ("step_size_min", "step_size_max"),
}


def configure_optimizer(optimizer_type: str, params: ParamsT, **kwargs: Any) -> Optimizer:
    """The optimizer of that name (in any case), of cstorch.optim or a subclass of the script, made with kwargs.

    `weight_decay_rate` means weight_decay, and `beta1` with `beta2` betas; so do `eps1` and `eps2`, `eta1` and `eta2`,
    `step_size_min` and `step_size_max`. A setting that the optimizer does not have is left out, with a warning. An
    optimizer that needs `lr` gets `learning_rate` for it if that is a number, and else 0.1 until a schedule gives
    another. ValueError for a name that is not known.
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
        warnings.warn(f"{optimizer_class.__name__} has no setting {name!r}: it is left out", stacklevel=2)
        del settings[name]
    optimizer: Optimizer = optimizer_class(params, **settings)
    return optimizer
