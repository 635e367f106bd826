"""Batches: nested structures of tensors with one batch dimension, their size and its checks."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from cstorch.errors import ConfigurationError, InputError
from waferbox.cirh.dialect.elements import can_be_sent, is_element
from waferbox.input_process.hidden_tensors import hides_tensors


def infer_batch_size(data: Any, batch_size: int | None = None) -> int | None:
    """Returns the size of dimension 0 that all tensors of a nested structure share; None without a tensor.

    Args:
        data: The nested structure.
        batch_size: The expected size, if any.

    Raises:
        InputError: A tensor has no dimension, or the sizes differ.

    Reference: release 2.10, `cerebras.pytorch.utils.data.utils`.
    """
    for tensor in pytree.tree_leaves(data):
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.dim() == 0:
            raise InputError(
                "a tensor of the batch that the input_fn yields has no dimensions: dimension 0 is the batch dimension. "
                "Give it one row for each sample: `value.expand(batch_size)`"
            )
        if batch_size is not None and tensor.shape[0] != batch_size:
            raise InputError(
                f"the tensors of a batch have different sizes in dimension 0: {batch_size} and {tensor.shape[0]}; "
                "dimension 0 of every tensor is the batch dimension, in which a batch is divided over systems. With "
                "num_csx=1 a batch need not be divided, and its tensors may have any sizes"
            )
        batch_size = tensor.shape[0]
    return batch_size


def num_samples(batch: Any) -> int:
    """Returns the batch size; a batch whose tensors differ in dimension 0, such as one of graphs, is one sample.

    Raises:
        InputError: A tensor has no dimension.
    """
    sizes = {infer_batch_size(leaf) for leaf in pytree.tree_leaves(batch)} - {None}
    return 1 if len(sizes) > 1 else sizes.pop() if sizes else 0  # type: ignore[return-value]


def _place(path: str) -> str:
    return f"the batch that the input_fn yields has{f' at {path}' if path else ''}"


def _check_object(path: str, leaf: Any) -> None:
    if hides_tensors(leaf):
        raise InputError(
            f"{_place(path)} an object of {type(leaf).__name__}, whose tensors would be those of the first batch in "
            "every step. Turn it into a dict, list, tuple or namedtuple of its tensors in the collate_fn or the "
            "input_fn: `dict(batch)` of one that has keys, `vars(batch)` of one with fields, such as a dataclass"
        )


def _check_tensor(path: str, tensor: torch.Tensor) -> None:
    where = f"{_place(path)} a"
    if tensor.device.type != "cpu":
        raise InputError(
            f"{where} tensor on the device {str(tensor.device)!r}: the cluster takes batches from the CPU. Leave "
            "`.to(device)` and torch.set_default_device out of the input_fn"
        )
    if tensor.layout is not torch.strided:
        raise InputError(f"{where} sparse tensor: wafers take dense ones, `tensor.to_dense()`")
    if tensor.is_complex():
        raise InputError(
            f"{where} tensor of {tensor.dtype}: wafers compute with real numbers; `torch.view_as_real(tensor)` has "
            "them in a last dimension of two"
        )
    if not (is_element(tensor.dtype) and can_be_sent(tensor.dtype)):
        cast = "dequantize" if tensor.is_quantized else "float" if tensor.is_floating_point() else "long"
        raise InputError(
            f"{where} tensor of {tensor.dtype}, which cannot be sent to wafers: convert it in the input_fn, "
            f"`tensor.{cast}()`"
        )


def check_batch(batch: Any, num_csx: int) -> int:
    """Checks that a batch can be divided over num_csx systems; returns the batch size.

    Raises:
        InputError: The batch has no tensors, or such that are sparse, of a type that cannot be sent, not on the CPU
            or hidden in objects, or its tensors have no common batch dimension and num_csx is above 1.
        ConfigurationError: The rows cannot be spread evenly over num_csx systems.
    """
    if num_csx > 1:
        infer_batch_size(batch)
    leaves, _ = pytree.tree_flatten_with_path(batch)
    for path, leaf in leaves:
        check = _check_tensor if isinstance(leaf, torch.Tensor) else _check_object
        check(pytree.keystr(path), leaf)
    if not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves):
        raise InputError(
            f"the loader of the input_fn yields {type(batch).__name__}, in which no tensor is found: a batch is a "
            "tensor, or a dict, list, tuple or namedtuple of such. Turn NumPy arrays into tensors "
            "(`torch.as_tensor(array)`)"
        )
    rows = num_samples(batch)
    if rows == 0 or rows % num_csx != 0:
        raise ConfigurationError(
            f"a batch of {rows} rows cannot be spread evenly over num_csx={num_csx} systems: choose a batch size that "
            f"is a multiple of {num_csx}, or another num_csx"
        )
    return rows
