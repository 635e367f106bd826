"""Loaders that can be restarted where they stood, and how their states come from the workers."""

import base64
import json
import math
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from cstorch.errors import InputError


@runtime_checkable
class RestartableDataLoader(Protocol):
    """What the loader that an input_fn returns must have to be saved with checkpoints, besides `__iter__`."""

    def state_dict(self) -> dict[str, Any]:
        """Where this worker's loader stands: behind the batches that have been taken from it.

        It is made of numbers, strings, bytes, tensors, arrays, and lists, tuples and dicts of these. In here
        `cstorch.distributed.get_worker_state()` says how many batches and samples the worker has streamed.
        """

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Makes the next pass begin there. strict: whether a state that does not fit is an error."""

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        """One state of the states of all workers, those of a wafer after those of the wafer before."""

    def deaggregate_state_dict(self, aggregated_state_dict: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        """The state of this worker, which knows its number: the number of workers may be another than before."""


def read_state(text: bytes) -> Any:
    """A state in the form in which workers send it, which workers/child/__init__.py describes.

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
