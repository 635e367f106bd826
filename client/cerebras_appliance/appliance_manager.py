"""The groups of weights that scripts of 1.8 and 1.9 send to the cluster."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["TensorGroup", "TensorGrouper", "TensorSendPayload"]


@dataclass(slots=True, kw_only=True)
class TensorSendPayload:
    """A weight to send.

    Args:
        fw_name: Its name in the state.
        tensor: Its value.
    """

    fw_name: str
    tensor: Any = None


@dataclass(slots=True)
class TensorGroup:
    """Weights that are sent together.

    Args:
        tensors: The weights.
        closure: A function that changes their values, in place, before they are sent.
    """

    tensors: list[TensorSendPayload]
    closure: Callable[[list[TensorSendPayload]], None] | None = None


TensorGrouper: TypeAlias = Callable[[Iterable[TensorSendPayload]], Iterable[TensorGroup]]
