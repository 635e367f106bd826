"""Large batches of a torch DataLoader without their values: their shapes, derived from batches of a few samples."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from cstorch._internal.loader_processes import InProcessIterator, Snapshot
from cstorch._internal.random_state import random_state, same_random_state, set_random_state

# The sizes of the batches that are made. Two determine the coefficients; the third, above them, confirms these.
_COUNTS: Final = (2, 3, 8)
_FEW: Final = max(_COUNTS)
# A batch of samples of fewer bytes is made as usual.
_LEAST_BYTES: Final = 256 * 2**20


def spare_samples(iterator: Iterator[Any]) -> None:
    """Lets an iterator of a torch DataLoader return large batches without values; leaves other iterators alone."""
    if isinstance(iterator, InProcessIterator):
        iterator.wrap_fetcher = SparingFetcher
    elif isinstance(iterator, _SingleProcessDataLoaderIter):
        iterator._dataset_fetcher = SparingFetcher(iterator._dataset_fetcher)


class SparingFetcher:
    """A fetcher of torch that collates a few samples of a large batch, and returns its tensors on the meta device.

    It takes indices from the sampler, and the first samples from the dataset, as the fetcher does. It makes the whole
    batch unless the few samples have one form, and the shapes of batches of them are affine in the number of samples.
    Used by one thread.

    Args:
        fetcher: The loader's fetcher, of a class in `torch.utils.data._utils.fetch`, which nothing else uses.
    """

    def __init__(self, fetcher: Any) -> None:
        self._fetcher = fetcher
        self._is_iterable = isinstance(fetcher, _IterableDatasetFetcher)
        self._collate = fetcher.collate_fn
        if fetcher.auto_collation:
            fetcher.collate_fn = _uncollated

    def fetch(self, index: Any) -> Any:
        """Returns the batch of the indices. Raises StopIteration at the end of an IterableDataset."""
        if not self._fetcher.auto_collation:
            return self._fetcher.fetch(index)
        if not isinstance(index, Sequence) or len(index) <= _FEW:
            return self._collate(self._fetcher.fetch(index))
        before = random_state()
        samples: list[Any] = self._fetcher.fetch(index[:_FEW])
        form = self._form(samples, index, before)
        if form is None:
            return self._collate(samples + self._rest(index))
        return form.batch(self._count(index))

    def _form(self, samples: list[Any], index: Sequence[Any], before: dict[str, Any]) -> "_BatchForm | None":
        """Returns the form of the batch; None if its samples are needed. Leaves the random generators as they are."""
        if len(samples) < _FEW:
            return None  # an IterableDataset has ended
        form = _sample_form(samples[0])
        if form is None or form.nbytes * len(index) < _LEAST_BYTES:
            return None
        drawn, collate = random_state(), Snapshot((self._collate,))
        try:
            if any(_sample_form(sample) != form for sample in samples + self._last(index)):
                return None
            batches = [self._collate(_copied(samples[:count])) for count in _COUNTS]
            if get_worker_info() is None and not same_random_state(before, random_state()):
                return None  # the numbers that a whole batch draws would be missing in the script
        except Exception:  # noqa: BLE001  the collate_fn may need a whole batch; its own error comes again with that
            return None
        finally:
            collate.restore()
            set_random_state(drawn)
        return _batch_form(batches)

    def _last(self, index: Sequence[Any]) -> list[Any]:
        """Returns the last sample, since samples may be sorted by length, unless a dataset yields it only in turn."""
        return [] if self._is_iterable else self._fetcher.fetch(index[-1:])

    def _rest(self, index: Sequence[Any]) -> list[Any]:
        """Returns the samples after the few. Raises StopIteration if they are too few for a batch."""
        try:
            rest: list[Any] = self._fetcher.fetch(index[_FEW:])
        except StopIteration:
            if self._fetcher.drop_last:
                raise
            return []
        return rest

    def _count(self, index: Sequence[Any]) -> int:
        """Returns the size of the batch. Raises StopIteration as `_rest` does.

        The samples of an IterableDataset are made one by one, as nothing else shows where it ends.
        """
        if not self._is_iterable:
            return len(index)
        for count in range(_FEW, len(index)):
            try:
                self._fetcher.fetch(index[count : count + 1])
            except StopIteration:
                if self._fetcher.drop_last:
                    raise
                return count
        return len(index)


def _uncollated(samples: list[Any]) -> list[Any]:
    return samples


# --- Samples ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SampleForm:
    """The structure of a sample, the types and shapes of its leaves, and their bytes."""

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    nbytes: int


def _sample_form(sample: Any) -> _SampleForm | None:
    """Returns the form of a sample; None if it has a leaf that a collate_fn may turn into any shape, such as text."""
    leaves, structure = pytree.tree_flatten(sample)
    forms: list[Any] = []
    nbytes = 0
    for leaf in leaves:
        if _is_plain(leaf) or (isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject):
            forms.append((tuple(leaf.shape), leaf.dtype))
            nbytes += leaf.nbytes
        elif leaf is None or isinstance(leaf, int | float):
            forms.append(type(leaf))
        else:
            return None
    return _SampleForm(structure, tuple(forms), nbytes)


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is torch.Tensor and leaf.layout is torch.strided and leaf.device.type == "cpu"


def _copied(samples: list[Any]) -> Any:
    """Returns the samples with containers and arrays of their own: a collate_fn may change them in place."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else copy(leaf), samples)


# --- Batches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Affine:
    """The size of a dimension: so much for each sample, and a base."""

    slope: int
    base: int

    def size(self, count: int) -> int:
        return self.base + self.slope * count


@dataclass(frozen=True, slots=True)
class _BatchForm:
    """The structure of batches, and the type and dimensions of each tensor."""

    structure: pytree.TreeSpec
    tensors: list[tuple[torch.dtype, list[_Affine]]]

    def batch(self, count: int) -> Any:
        """Returns a batch of so many samples, with tensors on the meta device."""
        tensors = [
            torch.empty([dimension.size(count) for dimension in dimensions], dtype=dtype, device="meta")
            for dtype, dimensions in self.tensors
        ]
        return pytree.tree_unflatten(tensors, self.structure)


def _batch_form(batches: list[Any]) -> _BatchForm | None:
    """Returns the form that the batches, of `_COUNTS` samples, share; None if they have none."""
    leaves, structures = zip(*map(pytree.tree_flatten, batches), strict=True)
    if any(structure != structures[0] for structure in structures):
        return None
    tensors = []
    for same in zip(*leaves, strict=True):
        if not all(map(_is_plain, same)) or len({(leaf.dtype, leaf.dim()) for leaf in same}) > 1:
            return None
        dimensions = [_affine(sizes) for sizes in zip(*(leaf.shape for leaf in same), strict=True)]
        known = [dimension for dimension in dimensions if dimension is not None]
        if len(known) < len(dimensions) or sum(dimension.slope > 0 for dimension in known) > 1:
            return None
        tensors.append((same[0].dtype, known))
    return _BatchForm(structures[0], tensors)


def _affine(sizes: Sequence[int]) -> _Affine | None:
    """Returns the size of a dimension as a function of the samples; None if the sizes do not show it."""
    (first, second, third), (size, larger, largest) = _COUNTS, sizes
    slope = (larger - size) // (second - first)
    dimension = _Affine(slope, size - slope * first)
    # An empty dimension may be a share of the batch that is rounded down.
    is_known = size > 0 and slope >= 0 and dimension.size(second) == larger and dimension.size(third) == largest
    return dimension if is_known else None
