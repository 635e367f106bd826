"""A note for the real system's kernels: the kernel of a function."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel_annotater(kernel: str | None = None) -> Callable[[Function], Function]:
    """Returns a decorator for functions with a chosen kernel. It changes nothing: here the compiler chooses kernels.

    Args:
        kernel: The name of the kernel.

    Raises:
        TypeError: The name is no str.
    """
    if not isinstance(kernel, str | None):
        raise TypeError(f"kernel must be a str or None, not {type(kernel).__name__}")
    return lambda function: function
