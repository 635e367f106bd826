"""StepValue: a value that comes when a step has run."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

Source = int | torch.Tensor
"""A tensor of the batch by its place, or a tensor of the trace, or the whole of a state."""


@dataclass(slots=True, eq=False, kw_only=True)
class StepValue:
    """A value of one step.

    source: what the step gives it by; None for a result of `call`.
    call: function, arguments and keyword arguments, with StepValues among them.
    value: as soon as it is known. A call that returns several tensors has a tuple.
    """

    step: int
    source: Source | None = None
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None
    value: Any = None

    def sources(self) -> Iterator["StepValue"]:
        """The values that it is computed of and that are not known yet."""
        if self.value is not None:
            return
        if self.source is not None:
            yield self
        if self.call is not None:
            for item in pytree.tree_leaves(self.call[1:]):
                if isinstance(item, StepValue):
                    yield from item.sources()

    def evaluate(self, given: Callable[[Source], torch.Tensor]) -> Any:
        """The value.

        Args:
            given: the value of a source.
        """
        if self.value is None:
            if self.source is not None:
                self.value = given(self.source)
            else:
                assert self.call is not None
                function, args, kwargs = self.call
                args, kwargs = pytree.tree_map(lambda item: _on_cpu(item, given), (args, kwargs))
                with torch.no_grad():
                    self.value = function(*args, **kwargs)
                self.call = None
        return self.value

    def replay(self, inputs: Mapping[int, torch.Tensor]) -> Any:
        """The same computed of other tensors of the batch, by their places."""
        if isinstance(self.source, int):
            return inputs[self.source]
        if self.value is not None:
            return self.value.to("lazy")
        assert self.call is not None
        function, args, kwargs = self.call
        args, kwargs = pytree.tree_map_only(StepValue, lambda item: item.replay(inputs), (args, kwargs))
        return function(*args, **kwargs)

    def is_like(self, other: "StepValue") -> bool:
        """Whether it is computed in the same way, of the same tensors of the batch, as a value of another step."""
        if self.call is None or other.call is None:
            return self.call is other.call and self.source is not None and self.source == other.source
        (function, *mine), (other_function, *theirs) = self.call, other.call
        leaves, structure = pytree.tree_flatten(mine)
        other_leaves, other_structure = pytree.tree_flatten(theirs)
        return function is other_function and structure == other_structure and all(map(_is_like, leaves, other_leaves))


def _on_cpu(item: Any, given: Callable[[Source], torch.Tensor]) -> Any:
    if isinstance(item, StepValue):
        return item.evaluate(given)
    return torch.device("cpu") if isinstance(item, torch.device) else item


def _is_like(one: Any, other: Any) -> bool:
    if isinstance(one, StepValue):
        return isinstance(other, StepValue) and one.is_like(other)
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
