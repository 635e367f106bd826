"""A note for the real system's kernels: the groups of heads that share keys and values."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def groups_annotater(num_kv_groups: int | None = None) -> Callable[[Function], Function]:
    """Returns a decorator for the products of an attention. It changes nothing: here the compiler has the shapes.

    Args:
        num_kv_groups: The number of groups of heads that share keys and values.

    Raises:
        TypeError: The number is no int.
    """
    if not isinstance(num_kv_groups, int | None):
        raise TypeError(f"num_kv_groups must be an int or None, not {type(num_kv_groups).__name__}")
    return lambda function: function
