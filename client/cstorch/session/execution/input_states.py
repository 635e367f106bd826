"""The states of loaders in the form in which workers send them."""

import base64
import json
import math
from typing import Any

import numpy as np
import torch

from cstorch.errors import InputError


def read_state(text: bytes) -> Any:
    """A state of a loader. The form is described in workers/child.py.

    Raises:
        InputError: the text is not of this form.
    """
    try:
        return _value(json.loads(text))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, AttributeError) as error:
        raise InputError(f"a worker sent a state of its loader that cannot be read: {error}") from error


def _value(form: Any) -> Any:
    if not isinstance(form, list):
        if isinstance(form, dict):
            raise ValueError("it holds a bare JSON object")
        return form
    word, *rest = form
    match word:
        case "list":
            return [_value(item) for item in rest]
        case "tuple":
            return tuple(_value(item) for item in rest)
        case "dict":
            return {_value(key): _value(item) for key, item in rest}
        case "bytes":
            return _content(*rest)
        case "tensor":
            dtype, shape, content = rest
            return _tensor(getattr(torch, dtype), shape, _content(content))
        case "array":
            dtype, shape, content = rest
            return _array(np.dtype(dtype), shape, _content(content))
    raise ValueError(f"it holds a list that begins with {word!r}")


def _content(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _tensor(dtype: torch.dtype, shape: list[int], content: bytes) -> torch.Tensor:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is no type of tensors")
    _check_size(shape, dtype.itemsize, content)
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def _array(dtype: np.dtype[Any], shape: list[int], content: bytes) -> np.ndarray[Any, np.dtype[Any]]:
    if dtype.kind not in "biufc":
        raise ValueError(f"an array of {dtype} is no plain data")
    _check_size(shape, dtype.itemsize, content)
    return np.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def _check_size(shape: list[int], itemsize: int, content: bytes) -> None:
    if any(not isinstance(size, int) or size < 0 for size in shape) or math.prod(shape) * itemsize != len(content):
        raise ValueError(f"{len(content)} bytes do not fill the shape {shape}")
