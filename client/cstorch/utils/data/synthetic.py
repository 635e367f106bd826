"""Synthetic data: to try a model, or to measure it without input."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset


class SyntheticDataset(Dataset[Any]):
    """A map-style data set whose samples have a given form.

    Args:
        sample_spec: A nest of tensors, each of which is the same in every sample, and of functions that return a tensor
            for the index of a sample.
        num_samples: The number of samples; None: without end, so the DataExecutor needs `num_steps`, and a torch
            DataLoader must not shuffle.

    Raises:
        TypeError: A leaf of `sample_spec` is neither a tensor nor a function.
        ValueError: `num_samples` is less than 1, or `sample_spec` has no leaves.

    Reference: release 2.10, `cerebras.pytorch.utils`.
    """

    def __init__(self, sample_spec: Any, num_samples: int | None = None) -> None:
        leaves, self._structure = pytree.tree_flatten(sample_spec)
        if not leaves:
            raise ValueError("sample_spec holds neither a tensor nor a function")
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) and not callable(leaf):
                raise TypeError(f"sample_spec is made of tensors and functions of the index, not {type(leaf).__name__}")
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        self._leaves: list[torch.Tensor | Callable[[int], torch.Tensor]] = leaves
        self._num_samples = num_samples

    def __len__(self) -> int:
        return sys.maxsize if self._num_samples is None else self._num_samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no sample {index}: there are {len(self)}")
        values = [leaf if isinstance(leaf, torch.Tensor) else leaf(index) for leaf in self._leaves]
        return pytree.tree_unflatten(values, self._structure)
