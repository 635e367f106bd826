"""The input of an execution: the request to the workers, and the states of loaders that they send back."""

import base64
import json
import math
import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cstorch._internal.check.private_files import process_folder
from cstorch._internal.session.execution.compiling import half_type
from cstorch.backends.mixed_precision import mixed_precision
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import ConfigurationError, InputError
from wsc.v1 import node_pb2


def loader_name(artifact_dir: Path) -> str:
    """Returns the name of an execution's input within its job."""
    return f"loader_{artifact_dir.name}"


def prepared_input(builder: bytes, config: ClusterConfig, artifact_dir: Path) -> node_pb2.PrepareInput:
    """Returns the request to the workers: the input_fn, and the Python process that it was written for.

    Args:
        builder: The pickled function that calls the input_fn.
        config: The folders to add and to mount.
        artifact_dir: The folder of the execution.
    """
    before, after, same = _search_paths(sys.path)
    return node_pb2.PrepareInput(
        loader=loader_name(artifact_dir),
        builder=builder,
        interpreter=os.fsencode(sys.executable),
        python_paths=_encoded([*_absolute(config.python_paths), *before]),
        last_python_paths=_encoded(after),
        interpreter_python_paths=_encoded(same),
        working_directory=os.fsencode(process_folder()),
        mount_dirs=_encoded(_absolute(config.mount_dirs)),
        half_type=half_type(),
        mixed_precision=mixed_precision(),
        script_arguments=_encoded(sys.argv),
    )


def _encoded(names: Sequence[str]) -> list[bytes]:
    return [os.fsencode(name) for name in names]


def _search_paths(paths: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Returns the parts of sys.path: the script's own folders before, and after the interpreter's; and all after these.

    The first folder of the interpreter begins the third part, which has the second.
    """
    installed = {*site.getsitepackages(), site.getusersitepackages()}
    installed |= {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    version = "{}{}".format(*sys.version_info)
    installed.add(
        f"{sys.base_prefix}/{sys.platlibdir}/python{version}.zip"
    )  # in every sys.path, though it seldom exists
    roots = [Path(folder).resolve() for folder in installed]
    there = [path for entry in paths if (path := _absolute_path(entry)) is not None]  # "": the current folder
    resolved = [path.resolve() for path in there]
    own = [not any(path.is_relative_to(root) for root in roots) for path in resolved]
    # The interpreter's folders begin with a root; a package may have put a folder inside of one before them (ray does).
    first = next((index for index, path in enumerate(resolved) if path in roots), len(resolved))
    after = [str(path) for path, is_own in zip(resolved[first:], own[first:], strict=True) if is_own]
    return [str(path) for path in resolved[:first]], after, list(map(str, there[first:]))


def _absolute_path(entry: str) -> Path | None:
    """Returns the folder of an entry of sys.path; None: it lies in a current folder that has been removed."""
    try:
        return Path(entry).absolute()
    except FileNotFoundError:
        return None


def _absolute(folders: Sequence[str]) -> list[str]:
    try:
        return [str(Path(folder).absolute()) for folder in folders]
    except FileNotFoundError:
        raise ConfigurationError(
            f"the current folder has been removed, and of python_paths or mount_dirs of the cluster_config, {folders}, "
            "at least one is relative to it: name absolute paths"
        ) from None


# --- The states of loaders --------------------------------------------------------------------------------------------


def read_state(text: bytes) -> Any:
    """Returns the state of a loader from the form in which workers send it (waferbox/input_process/loader.py).

    Raises:
        InputError: The text is not of this form.
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
