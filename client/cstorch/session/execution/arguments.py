"""The arguments of the traced function: those of its first call are what every step runs with."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cstorch.errors import UsageError
from cstorch.session.execution.findings import report
from cstorch.tracing import LazyTensor, user_line

_PLAIN = (bool, int, float, str, type(None))


class Arguments:
    """What the traced function was called with the first time."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._function = function
        self._first = args, kwargs
        self._leaves, self._structure = self._flatten(args, kwargs)
        self._has_warned = False

    def _flatten(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[pytree.KeyPath, Any]], pytree.TreeSpec]:
        given: Mapping[str, Any]
        try:
            given = inspect.signature(self._function).bind(*args, **kwargs).arguments
        except ValueError:  # a function without a signature
            given = {"args": args, **kwargs}
        leaves, structure = pytree.tree_flatten_with_path(dict(given))
        return leaves, structure

    def by_name(self) -> dict[str, Any]:
        """The first ones, by the names of the parameters."""
        return {path[0].key + pytree.keystr(path[1:]): value for path, value in self._leaves}  # type: ignore[attr-defined]

    def with_tensors_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The first ones, with the tensors of a later call."""
        first, structure = pytree.tree_flatten(self._first)
        now, other_structure = pytree.tree_flatten((args, kwargs))
        if structure != other_structure:  # by name where the first were by position, or the other way round
            return args, kwargs
        leaves = [new if isinstance(new, torch.Tensor) else old for old, new in zip(first, now, strict=True)]
        made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, structure)
        return made

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warns, once, of a Python value that is another one than in the first call.

        Raises:
            TraceError: of it, where WAFERBOX_STRICT is 1.
            UsageError: the arguments have another structure than in the first call.
        """
        leaves, structure = self._flatten(args, kwargs)
        if structure != self._structure:
            raise UsageError(
                f"at {user_line()} the @cstorch.trace function is called with arguments of another structure than in "
                "the first step, which was traced and is what runs: an execution runs one graph. Use another "
                "DataExecutor for what differs"
            )
        if self._has_warned:
            return
        for (path, first), (_, now) in zip(self._leaves, leaves, strict=True):
            if _differs(first, now):
                self._has_warned = True
                name = path[0].key + pytree.keystr(path[1:])  # type: ignore[attr-defined]
                report(
                    f"at {user_line()} the argument {name!r} of the @cstorch.trace function is {_shown(now)}, and was "
                    f"{_shown(first)} in the first step. The function was traced once, and every step runs with its "
                    "first values: the change is not seen. What changes from step to step must be a tensor of the "
                    "batch, or a tensor that the step updates in place"
                )
                return


def _differs(first: Any, now: Any) -> bool:
    if isinstance(first, LazyTensor) and isinstance(now, LazyTensor):
        one, other = first._handle.deferred, now._handle.deferred
        if one is not None and other is not None:
            return not one.is_like(other)
    if isinstance(first, torch.Tensor) or isinstance(now, torch.Tensor):
        return first is not now
    if not isinstance(first, _PLAIN) and not isinstance(now, _PLAIN):
        return False  # nobody knows what it would mean for these to be equal
    return type(first) is not type(now) or (first != now and first == first)


def _shown(value: Any) -> str:
    return f"another {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
