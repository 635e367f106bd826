"""Optimizers whose step can be traced, and the schedules of their settings."""

from typing import Any

from cstorch.optim import lr_scheduler, scheduler
from cstorch.optim.adam import Adam, AdamW
from cstorch.optim.optimizer import Optimizer, Parameters
from cstorch.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "configure_optimizer", "lr_scheduler", "scheduler"]

_OPTIMIZERS: dict[str, type[Optimizer]] = {cls.__name__.lower(): cls for cls in (SGD, Adam, AdamW)}


def configure_optimizer(optimizer_type: str, params: Parameters, **kwargs: Any) -> Optimizer:
    """The optimizer of that name (in any case), made with kwargs. ValueError for a name that is not known."""
    try:
        optimizer_class = _OPTIMIZERS[optimizer_type.lower()]
    except KeyError:
        known = ", ".join(cls.__name__ for cls in _OPTIMIZERS.values())
        raise ValueError(f"there is no optimizer {optimizer_type!r}; there are {known}") from None
    optimizer: Optimizer = optimizer_class(params, **kwargs)
    return optimizer
