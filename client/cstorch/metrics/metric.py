"""The base class of every metric."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from cstorch._internal import state
from cstorch._internal.tracing import metric_operations
from cstorch.backend import current_torch_device, has_backend, is_on_csx
from cstorch.core.closures import step_closure
from cstorch.errors import UsageError


class Metric(nn.Module, ABC):
    """The base class of metrics: a figure over all batches of an evaluation.

    What a metric accumulates are buffers, made in `reset` with `register_state` and changed in `update`. They are state
    of the step, so the sums are kept where the step runs. A call of the metric in the traced step updates it and
    returns the figure so far. `float(metric)` is the figure of the last activation step whose values have arrived.
    `update` and `compute` run in the types of their tensors, also in mixed precision; what autocast made half precision
    comes to `update` as float32.

    Args:
        name: The name of the metric in reports, state names and `get_all_metrics`; None: that of the class.

    Example:
        ::

            accuracy = cstorch.metrics.AccuracyMetric()

            @cstorch.trace
            def eval_step(batch):
                inputs, labels = batch
                accuracy(labels=labels, predictions=model(inputs).argmax(-1))

            for batch in executor:
                eval_step(batch)
            print(float(accuracy))

    Reference: release 2.10, `cerebras.pytorch.metrics`.
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
        """Sets the state to that of no batches, with `register_state`. Not inside a traced step."""

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Adds one batch to the state, in place and in tensor operations only.

        Args:
            *args: The tensors of the batch.
            **kwargs: The tensors of the batch by name.
        """

    @abstractmethod
    def compute(self) -> Any:
        """Returns the figure from the state, in tensor operations only."""

    def register_state(self, name: str, tensor: torch.Tensor, persistent: bool = False) -> None:
        """Makes a state tensor on the current backend's device, or sets the existing one of that name to a value.

        Args:
            name: The name of the buffer.
            tensor: The value.
            persistent: Whether the tensor is part of the metric's state dict.
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
        """Updates the state with one batch and returns the figure so far.

        Args:
            *args: The arguments of `update`.
            **kwargs: The arguments of `update`.
        """
        with ExitStack() as contexts:
            contexts.enter_context(torch.no_grad())
            contexts.enter_context(metric_operations())
            if torch.is_autocast_enabled("cpu"):
                contexts.enter_context(torch.autocast("cpu", enabled=False))
                args, kwargs = pytree.tree_map_only(torch.Tensor, _widened, (args, kwargs))
            self.update(*args, **kwargs)
            value = self.compute()
        step_closure(self._keep)(value)
        return value

    def _keep(self, value: Any) -> None:
        self._last_value = value
        self._num_updates += 1

    @property
    def num_updates(self) -> int:
        """The number of updates since the last reset whose values have arrived: on CSX those of activation steps."""
        return self._num_updates

    def __float__(self) -> float:
        if self._num_updates == 0:
            raise UsageError(
                f"the metric {self.name!r} has no value yet: no step has called it since it was made, or reset"
            )
        return float(self._last_value)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def get_all_metrics() -> Iterator[tuple[str, Metric]]:
    """Yields name and metric of all live metrics. Several of one name are NAME.0, NAME.1, ... in order of creation.

    Reference: release 2.10, `cerebras.pytorch.metrics`.
    """
    by_name: dict[str, list[Metric]] = {}
    for metric in state.registered("metric"):
        by_name.setdefault(metric.name, []).append(metric)
    for name, metrics in by_name.items():
        for number, metric in enumerate(metrics):
            yield (name if len(metrics) == 1 else f"{name}.{number}"), metric


def not_on_csx(metric: Metric) -> None:
    """Raises NotImplementedError if the steps run on CSX."""
    if has_backend() and is_on_csx():
        raise NotImplementedError(
            f"{type(metric).__name__} is not supported on CSX: return the labels and predictions from the step, "
            "and compute it in a step closure"
        )
