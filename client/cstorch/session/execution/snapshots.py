"""What the tensors of a closure are at the moment of its call: the step may write to them afterwards."""

from dataclasses import replace

import torch
from torch.utils import _pytree as pytree

from cstorch.execution import Closure
from cstorch.tracing import LazyTensor


class Snapshots:
    """Copies of the tensors that closures are called with in the recording of a step."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[LazyTensor, int | None]] = {}  # by id of the copy: its source, and its version

    def take(self, closure: Closure) -> Closure:
        """The closure with copies of its tensors."""
        args, kwargs = pytree.tree_map_only(LazyTensor, self._copy, (closure.args, closure.kwargs))
        return replace(closure, args=args, kwargs=kwargs)

    def settle(self, closure: Closure) -> Closure:
        """The closure with its own tensors again where nothing was written to them since: these are one output."""
        args, kwargs = pytree.tree_map_only(LazyTensor, self._unless_written, (closure.args, closure.kwargs))
        return replace(closure, args=args, kwargs=kwargs)

    def _copy(self, tensor: LazyTensor) -> torch.Tensor:
        with torch.no_grad():
            copy = tensor.detach().clone()
        self._sources[id(copy)] = tensor, _version(tensor)
        return copy

    def _unless_written(self, copy: LazyTensor) -> LazyTensor:
        source, version = self._sources[id(copy)]
        return source if version is not None and _version(source) == version else copy


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # those of inference mode count no writes
