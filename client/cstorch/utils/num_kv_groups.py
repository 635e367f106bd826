"""How many groups of heads share keys and values, as a note for the real system's kernels."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def groups_annotater(num_kv_groups: int | None = None) -> Callable[[Function], Function]:
    """A decorator for the products of an attention. Here the compiler sees the shapes: it changes nothing.

    Raises:
        TypeError: the number is no int.
    """
    if not isinstance(num_kv_groups, int | None):
        raise TypeError(f"num_kv_groups must be an int or None, not {type(num_kv_groups).__name__}")
    return lambda function: function
