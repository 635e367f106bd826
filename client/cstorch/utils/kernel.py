"""Which kernel of the real system is to compute a function."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel_annotater(kernel: str | None = None) -> Callable[[Function], Function]:
    """A decorator for functions that a kernel is named for. Here the compiler chooses kernels: it changes nothing.

    Raises:
        TypeError: the name is no str.
    """
    if not isinstance(kernel, str | None):
        raise TypeError(f"kernel must be a str or None, not {type(kernel).__name__}")
    return lambda function: function
