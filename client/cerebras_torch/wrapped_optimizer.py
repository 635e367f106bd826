"""Optimizers of torch.optim as those of cstorch.optim that do the same."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from cstorch import optim
from cstorch.errors import UsageError
from cstorch.optim import Optimizer

# How torch computes, and not what.
_WITHOUT_EFFECT = frozenset({"foreach", "fused", "capturable", "differentiable"})


def wrap(optimizer: torch.optim.Optimizer) -> Optimizer:
    """The optimizer of the same name in cstorch.optim, with the parameter groups and settings of this one.

    Raises:
        UsageError: there is none, or it does not have a setting that is on; or the given one has stepped already.
    """
    name = type(optimizer).__name__
    same = getattr(optim, name, None) if type(optimizer).__module__.startswith("torch.optim.") else None
    if same is None:
        raise UsageError(
            f"{name} makes its state within the step, which is recorded before it runs: make it a subclass of "
            "cerebras_torch.optim.Optimizer"
        )
    if any(float(values.get("step", 1)) for values in optimizer.state.values()):
        raise UsageError(
            f"this {name} has stepped already: wrap an optimizer before its first step, then load its state"
        )
    known = inspect.signature(same.__init__).parameters
    groups = [{"params": group["params"], **_settings(name, group, known)} for group in optimizer.param_groups]
    wrapped: Optimizer = same(groups, **_settings(name, optimizer.defaults, known))
    return wrapped


def _settings(name: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    left = {key: value for key, value in given.items() if key != "params" and key not in _WITHOUT_EFFECT}
    for key in left.keys() - known.keys():
        # What is off, and what a schedule of the script notes for itself, changes nothing.
        if left[key] and key in inspect.signature(getattr(torch.optim, name).__init__).parameters:
            raise UsageError(
                f"cerebras_torch.optim.{name} has no setting {key!r}, which is {left[key]!r}: leave it out"
            )
    return {key: value for key, value in left.items() if key in known}
