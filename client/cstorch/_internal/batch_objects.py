"""Strings and other objects beside the tensors of a batch, which a traced step has as those of the first batch.

Numbers and NumPy arrays of them must be equal in all batches, which the workers check. Others, such as the names of
files, may change as long as the step computes the same with them: so the step is traced again with those of the
following batches.
"""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils import _pytree as pytree

LOOKED_AT: Final = 3  # batches whose objects are compared, the first included


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedObjects:
    """The objects of a later batch that differ from those of the first.

    number: The batch, from 1.
    structure: Of all batches that are compared.
    first: The objects of the first batch that differ, by their leaves' numbers.
    now: Those of this batch.
    paths: Where they are in the batch, such as "['kind']".
    """

    number: int
    structure: pytree.TreeSpec
    first: Mapping[int, Any]
    now: Mapping[int, Any]
    paths: Sequence[str]

    def placed(self, value: Any) -> Any:
        """Returns an argument of the step with these objects in the place of the first batch's."""
        leaves, structure = pytree.tree_flatten(value)
        if structure == self.structure:
            return pytree.tree_unflatten([self.now.get(index, leaf) for index, leaf in enumerate(leaves)], structure)
        # A part of the batch: objects are known by their identity, which None shares with all others.
        known = {id(old): self.now[index] for index, old in self.first.items() if old is not None}
        return pytree.tree_unflatten([known.get(id(leaf), leaf) for leaf in leaves], structure)

    def __str__(self) -> str:
        changes = (
            f"{path} is {new!r} and was {old!r}"
            for path, old, new in zip(self.paths, self.first.values(), self.now.values(), strict=True)
        )
        return ", ".join(changes)


def has_objects(batch: Any) -> bool:
    """Whether a batch has a leaf that is neither a tensor, nor a number or an array of numbers."""
    return any(_is_object(leaf) for leaf in pytree.tree_leaves(batch))


def changed_objects(batches: Sequence[Any]) -> Iterable[ChangedObjects]:
    """Yields the objects of each later batch that differ from those of the first."""
    first, structure = pytree.tree_flatten_with_path(batches[0])
    for number, batch in enumerate(batches[1:], 2):
        leaves, other_structure = pytree.tree_flatten(batch)
        if other_structure != structure:
            continue  # the workers refuse it if its tensors are elsewhere
        changed = [
            index
            for index, ((_, old), new) in enumerate(zip(first, leaves, strict=True))
            if _is_object(old) and _is_object(new) and not _is_same(old, new)
        ]
        if changed:
            yield ChangedObjects(
                number=number,
                structure=structure,
                first={index: first[index][1] for index in changed},
                now={index: leaves[index] for index in changed},
                paths=[pytree.keystr(first[index][0]) for index in changed],
            )


def _is_object(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "biufc"
    return not isinstance(leaf, torch.Tensor | numbers.Number)


def _is_same(old: Any, new: Any) -> bool:
    try:
        return type(old) is type(new) and bool(old == new)
    except Exception:  # noqa: BLE001 - whatever the __eq__ of an object raises: the trace decides
        return False
