"""Numbers of a batch that are no tensors, which the traced step has as they are in the first batch."""

import numbers
import sys
from typing import Any

from .failures import InputFailure


class Constants:
    """Python numbers and arrays of NumPy in the batches of a loader: they may not change from batch to batch.

    source: what the input_fn is called, and where it is written.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._first: list[Any] | None = None

    def check(self, number: int, batch: Any, leaves: list[Any]) -> None:
        """InputFailure where those of the batch of this number are not those of the first one. leaves: its own."""
        known = [_comparable(leaf) for leaf in leaves if _is_number(leaf)]
        if self._first is None:
            self._first = known
        if known == self._first:
            return
        from torch.utils import _pytree as pytree

        paths = [
            (pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(batch)[0] if _is_number(leaf)
        ]
        changed = [place for place, value in enumerate(known) if value not in self._first[place : place + 1]]
        path, leaf = paths[changed[0]] if changed else ("some list", None)
        value = f", {leaf!r}," if isinstance(leaf, numbers.Number) else ""
        raise InputFailure(
            f"batch {number} of the input_fn {self._source} has at {path} a number or NumPy array that is no tensor"
            f"{value} and another one than before: the step is traced once, with those of the first batch. Return a "
            "tensor with one row for each sample in the collate_fn (`torch.full((len(rows),), value)`, "
            "`torch.as_tensor(array)`), or leave it out of the batch"
        )


def _is_number(leaf: Any) -> bool:
    """A number, or an array of them; strings and other objects cannot be computed with."""
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and isinstance(leaf, numpy.ndarray)
    return leaf.dtype.kind in "biufc" if is_array else isinstance(leaf, numbers.Number)


def _comparable(leaf: Any) -> Any:
    """Equal for equal values, of which NaN is one."""
    if isinstance(leaf, numbers.Number):
        return repr(leaf)
    return leaf.dtype.str, leaf.shape, leaf.tobytes()
