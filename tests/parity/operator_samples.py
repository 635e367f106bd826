"""Samples of torch's own table of operators, in sizes that can be cut over wafers.

`op_db` has every public operator with inputs to try it on. It was not written for us, so it knows of cases that we
forgot. Its sizes are set to even ones: dimension 0 of a tensor can then be the batch.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# Names of sizes in the table's generators. Some do not work with the first ones.
_SIZES: tuple[Mapping[str, int], ...] = (
    {"XS": 2, "S": 4, "M": 8, "L": 12},
    {"XS": 2, "S": 6, "M": 8, "L": 12},
    {"XS": 3, "S": 5, "M": 10, "L": 20},
)
_MOST_ELEMENTS = 6000
# torch itself damages its memory with these samples.
_LEFT_OUT = frozenset({"_segment_reduce.offsets"})
# They have samples that are no tensors of the device, or run on other devices only.
_NO_OPERATORS = ("jiterator_", "broadcast_shapes")


def name_of(operator: Any) -> str:
    """The operator's name with its variant."""
    return f"{operator.name}.{operator.variant_test_name}" if operator.variant_test_name else operator.name


def operators(dtype: torch.dtype) -> list[Any]:
    """The table's entries for an element type, in its order."""
    from torch.testing._internal.common_methods_invocations import op_db

    # The table's wrapper seeds each call of a random operator, and takes the device type for one of torch's own.
    for module in _modules():
        if hasattr(module, "wrapper_set_seed"):
            module.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)
    return [
        operator
        for operator in op_db
        if dtype in operator.dtypes
        and name_of(operator) not in _LEFT_OUT
        and not name_of(operator).startswith(_NO_OPERATORS)
    ]


def samples(operator: Any, dtype: torch.dtype, count: int) -> list[tuple[int, Any]]:
    """Up to `count` samples with their places in the table, spread over those that have rows to cut, if any have."""
    small = [(place, sample) for place, sample in enumerate(_all(operator, dtype)) if _is_small_and_dense(sample)]
    chosen = [pair for pair in small if rows_of(pair[1])] or small
    if len(chosen) <= count:
        return chosen
    return [chosen[round(number * (len(chosen) - 1) / max(count - 1, 1))] for number in range(count)]


def tensors_of(sample: Any) -> list[torch.Tensor]:
    """All tensors of a sample."""
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def rows_of(sample: Any) -> int | None:
    """The rows of the first tensor that can be a batch for two wafers."""
    for tensor in tensors_of(sample):
        if tensor.dim() and tensor.numel() and tensor.shape[0] % 2 == 0:
            return tensor.shape[0]
    return None


def _all(operator: Any, dtype: torch.dtype) -> list[Any]:
    for sizes in _SIZES:
        for module in _modules():
            for name, size in sizes.items():
                if isinstance(getattr(module, name, None), int):
                    setattr(module, name, size)
        torch.manual_seed(0)
        try:
            return list(operator.sample_inputs("cpu", dtype, requires_grad=False))
        except (RuntimeError, ValueError, IndexError, AssertionError, TypeError):
            continue  # its generator counts on other sizes
    return []


def _modules() -> Iterator[Any]:
    yield from [module for name, module in list(sys.modules.items()) if name.startswith("torch.testing._internal")]


def _is_small_and_dense(sample: Any) -> bool:
    tensors = tensors_of(sample)
    dense = all(t.layout is torch.strided and not t.is_nested and not t.is_quantized for t in tensors)
    return dense and sum(tensor.numel() for tensor in tensors) <= _MOST_ELEMENTS
