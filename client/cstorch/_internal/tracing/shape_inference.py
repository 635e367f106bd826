"""Shapes, strides and types of an operation's results: computed once for equal arguments.

Torch infers them in Python, which takes most of the time of a trace; layers repeat the same operations on the same
shapes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from cstorch._internal.tracing.operators import aten

_META: Final = torch.device("meta")
# Of arguments of other types, such as generators, nothing is known that stays the same.
_PLAIN: Final = frozenset(
    {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
# torch has no rule for the results of these: they are like the first argument.
_LIKE_FIRST: Final = frozenset({aten._standard_gamma_grad.default, aten._dirichlet_grad.default})
# A step of many different shapes begins again, so that memory stays bounded.
_MOST_REMEMBERED: Final = 1 << 14

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """What is remembered of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        made: torch.Tensor = torch.ops.aten.empty_strided.default(
            self.shape, self.strides, dtype=self.dtype, device=_META
        )
        return made


class _NotPlain(Exception):
    """Raised for arguments by which results cannot be remembered."""


def run_on_meta(func: OpOverload, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation on meta tensors, or makes tensors like those that it has returned for equal arguments.

    Args:
        func: the operation. One that returns views of its arguments, or writes to them, is always run.
        args: its arguments; tensors are on the meta device.
        kwargs: its arguments by name.

    Returns:
        What the operation returns.

    Raises:
        RuntimeError: as the operation.
    """
    if func in _LIKE_FIRST:
        return torch.empty_like(args[0])
    if not _is_pure(func):
        return func(*args, **kwargs)
    try:
        # True division of integers has the default type.
        key = func, torch.get_default_dtype(), _key(args), _key(tuple(kwargs)), _key(tuple(kwargs.values()))
    except _NotPlain:
        return func(*args, **kwargs)
    remembered = _remembered.get(key)
    if remembered is None:
        out = func(*args, **kwargs)
        results = _results(out, [*_tensors(args), *_tensors(kwargs.values())])
        if results is not None:
            if len(_remembered) >= _MOST_REMEMBERED:
                _remembered.clear()
            _remembered[key] = results
        return out
    if isinstance(remembered, _Result):
        return remembered.tensor()
    return tuple(None if result is None else result.tensor() for result in remembered)


def run_on_zeros(func: OpOverload, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation that torch has no rule of shapes for on zeros of the host.

    Args:
        func: the operation.
        args: its arguments; tensors are on the meta device.
        kwargs: its arguments by name.

    Returns:
        What the operation returns, on the meta device.

    Raises:
        Exception: as the operation; zeros may be no valid operands.
    """

    def as_zeros(meta: torch.Tensor) -> torch.Tensor:
        return torch.zeros(meta.shape, dtype=meta.dtype, device="cpu")

    host_args, host_kwargs = pytree.tree_map_only(torch.Tensor, as_zeros, (args, dict(kwargs)))
    if "device" in host_kwargs:
        host_kwargs["device"] = torch.device("cpu")
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(_META), func(*host_args, **host_kwargs))


_remembered: dict[Any, _Result | tuple[_Result | None, ...]] = {}


@cache
def _is_pure(func: OpOverload) -> bool:
    schema = func._schema
    return not any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))


def _key(arguments: Arguments) -> Arguments:
    """What results depend on: of tensors not their values, and of numbers their types, too."""
    return tuple(map(_part, arguments))


def _part(argument: Any) -> Any:
    kind = type(argument)
    if kind is torch.Tensor:
        if argument.layout is not torch.strided or argument.is_conj() or argument.is_neg():
            raise _NotPlain
        return argument.shape, argument.stride(), argument.dtype, argument.device
    if kind in (list, tuple, torch.Size):
        return _key(argument)
    if kind not in _PLAIN:
        raise _NotPlain
    return kind, argument


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _results(out: Any, arguments: list[torch.Tensor]) -> _Result | tuple[_Result | None, ...] | None:
    """What is remembered of results; None if they are of other kinds, or one of the arguments."""
    if isinstance(out, torch.Tensor):
        return _result(out, arguments)
    if type(out) is not tuple:
        return None
    results = [None if item is None else _result(item, arguments) for item in out]
    if any(item is not None and result is None for item, result in zip(out, results, strict=True)):
        return None
    return tuple(results)


def _result(out: Any, arguments: list[torch.Tensor]) -> _Result | None:
    is_plain = type(out) is torch.Tensor and out.device == _META and out.layout is torch.strided
    if not is_plain or out.is_conj() or out.is_neg() or out.storage_offset():
        return None
    if any(out is argument for argument in arguments):
        return None
    return _Result(shape=tuple(out.shape), strides=out.stride(), dtype=out.dtype)
