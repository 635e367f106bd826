"""How scripts of 1.8 and 1.9 group the weights that are sent to the cluster."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["TensorGroup", "TensorGrouper", "TensorSendPayload"]


@dataclass(slots=True, kw_only=True)
class TensorSendPayload:
    """A weight that is sent. fw_name: its name in the state; tensor: its value."""

    fw_name: str
    tensor: Any = None


@dataclass(slots=True)
class TensorGroup:
    """Weights that are sent together. closure: changes their values, in place, before that."""

    tensors: list[TensorSendPayload]
    closure: Callable[[list[TensorSendPayload]], None] | None = None


TensorGrouper: TypeAlias = Callable[[Iterable[TensorSendPayload]], Iterable[TensorGroup]]
