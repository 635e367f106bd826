"""The base class of every metric."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from cstorch._internal import state
from cstorch.backend import current_torch_device, has_backend, use_cs
from cstorch.core.closures import step_closure
from cstorch.errors import UsageError


class Metric(nn.Module, ABC):
    """A figure over all batches of an evaluation.

    What it accumulates are buffers, made in `reset` with `register_state` and changed in `update`; they are
    loop-carried state, so the sums are kept where the step runs. Calling the metric in the traced step updates it and
    returns the figure so far; `float(metric)` is the figure as of the last activation step that the script has seen.

    name: tells metrics apart in reports, state names and `get_all_metrics`; None: that of the class.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = type(self).__name__ if name is None else name
        self._num_updates = 0
        self._last_value: Any = None
        self.reset()
        state.register("metric", self)

    @abstractmethod
    def reset(self) -> None:
        """Set the state to where an evaluation begins, by `register_state`. Not inside a traced step."""

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take one batch into the state, in place and in tensor operations only."""

    @abstractmethod
    def compute(self) -> Any:
        """The figure from the state, in tensor operations only."""

    def register_state(self, name: str, tensor: torch.Tensor, persistent: bool = False) -> None:
        """Make a state tensor, or set the one of that name back to a value.

        It is put on the device of the current backend. persistent: whether it is part of the metric's state dict.
        """
        self._num_updates = 0
        self._last_value = None
        existing = self._buffers.get(name)
        if existing is not None and existing.shape == tensor.shape and existing.dtype == tensor.dtype:
            with torch.no_grad():
                existing.copy_(tensor)
        else:
            self.register_buffer(name, tensor.to(current_torch_device()), persistent=persistent)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Update with one batch; returns the figure so far."""
        with torch.no_grad():
            self.update(*args, **kwargs)
            value = self.compute()
        step_closure(self._keep)(value)
        return value

    def _keep(self, value: Any) -> None:
        self._last_value = value
        self._num_updates += 1

    @property
    def num_updates(self) -> int:
        """How many updates since the last reset the script has seen: on CSX those of activation steps."""
        return self._num_updates

    def __float__(self) -> float:
        if self._num_updates == 0:
            raise UsageError(
                f"the metric {self.name!r} has no value yet: no step has called it since it was made, or reset"
            )
        return float(self._last_value)


def get_all_metrics() -> Iterator[tuple[str, Metric]]:
    """Name and metric of all live metrics; where several have one name, NAME.0, NAME.1, ... in the order in which they
    were made."""
    by_name: dict[str, list[Metric]] = {}
    for metric in state.registered("metric"):
        by_name.setdefault(metric.name, []).append(metric)
    for name, metrics in by_name.items():
        for number, metric in enumerate(metrics):
            yield (name if len(metrics) == 1 else f"{name}.{number}"), metric


def not_on_csx(metric: Metric) -> None:
    """NotImplementedError where the steps run on CSX."""
    if has_backend() and use_cs():
        raise NotImplementedError(
            f"{type(metric).__name__} is not supported on CSX: return the labels and predictions from the step, "
            "and compute it in a step closure"
        )
