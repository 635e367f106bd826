"""Conversion of tensors to numpy arrays and back, with bfloat16, which numpy lacks."""

import numpy as np
import torch

# Bit patterns of bfloat16: an int16 for numpy, marked by a field.
BFLOAT16 = np.dtype((np.int16, {"bfloat16": (np.int16, 0)}))


def to_numpy(tensor: torch.Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    """Returns the values of a tensor as an array, which shares its memory if possible; bfloat16 as its bit patterns.

    Args:
        tensor: The tensor.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    tensor = tensor.detach().cpu()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    # asarray, since the dtype object of int16 is shared and has no mark.
    return np.asarray(tensor.view(torch.int16).numpy()).view(BFLOAT16)


def from_numpy(array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> torch.Tensor:
    """Returns the tensor of an array, with its memory; bfloat16 for arrays of `to_numpy` and of ml_dtypes.

    Args:
        array: The array.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    if "bfloat16" in (array.dtype.fields or {}) or array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
