"""Small helpers of public scripts."""

import fnmatch
import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cstorch.distributed.worker import get_dir_size

__all__ = ["FilterCallable", "convert_glob_to_regex", "get_dir_size", "make_param_filter", "override_env_vars"]

FilterCallable = Callable[[str, nn.Parameter], bool]


def convert_glob_to_regex(f: str) -> re.Pattern[str]:
    """Returns the pattern that matches what a glob matches, as a whole.

    Args:
        f: The glob.

    Reference: release 2.10, `cerebras.pytorch.utils.utils`.
    """
    return re.compile(fnmatch.translate(f))


def make_param_filter(param_filter: str | list[str] | FilterCallable) -> FilterCallable:
    """Returns a function of a parameter's name, and the parameter, that says whether it is chosen.

    Args:
        param_filter: A glob, several of which one must match, or such a function.

    Raises:
        TypeError: It is none of these, or a function that does not take two arguments.

    Reference: release 2.10, `cerebras.pytorch.utils.utils`.
    """
    if isinstance(param_filter, str):
        param_filter = [param_filter]
    if isinstance(param_filter, list) and all(isinstance(glob, str) for glob in param_filter):
        patterns = [convert_glob_to_regex(glob) for glob in param_filter]
        return lambda name, _: any(pattern.match(name) for pattern in patterns)
    if not callable(param_filter):
        raise TypeError(f"a filter of parameters is a glob, a list of globs or a function, not {param_filter!r}")
    try:
        inspect.signature(param_filter).bind("name", None)
    except TypeError as error:
        raise TypeError(f"a filter of parameters is called with a name and a parameter: {error}") from None
    return param_filter


@contextmanager
def override_env_vars(**kwargs: str) -> Iterator[None]:
    """Sets environment variables within a `with` block.

    Args:
        **kwargs: The values by the names of the variables.

    Reference: release 2.10, `cerebras.pytorch.utils.utils`.
    """
    before = {name: os.environ.get(name) for name in kwargs}
    os.environ.update(kwargs)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- The loss among what a model returns ------------------------------------------------------------------------------


def extract_loss(model_outputs: Any) -> Any:
    """Returns the loss of a model's outputs: a tensor itself, the first of several outputs, or the attribute `loss`.

    Args:
        model_outputs: What the model returned.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(model_outputs, torch.Tensor):
        return model_outputs
    if isinstance(model_outputs, list | tuple) and model_outputs:
        return model_outputs[0]
    if hasattr(model_outputs, "loss"):
        return model_outputs.loss
    raise TypeError(f"a model returns its loss, a sequence that begins with it, or what has it, not {model_outputs!r}")
