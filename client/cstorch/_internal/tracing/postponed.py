"""Calls on large device tensors of a process that runs no step: run when a result is read, which mostly never happens.

With `compile_only` and `validate_only` nobody needs the value of a weight, so that an initialisation that cannot be
deferred to the cluster, such as an orthogonal one, costs neither time nor space. Random numbers that a postponed call
draws are not those that it would have drawn at once.
"""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from cstorch._internal.tracing.cell import RAM_BYTES, Cell
from cstorch._internal.tracing.operators import as_meta, moves_to_host, operator
from cstorch._internal.tracing.tensor import META, LazyTensor, is_device, new_tensor

_CPU = torch.device("cpu")


# By cell: the arguments of postponed calls that are views of it. Used by the script's thread.
_views: "weakref.WeakKeyDictionary[Cell, weakref.WeakSet[_View]]" = weakref.WeakKeyDictionary()


class _View:
    """A device tensor as it was when a call was postponed.

    cell: The cell that has its value now.
    version: The version of that cell with this value.
    """

    __slots__ = ("__weakref__", "cell", "meta", "version")

    def __init__(self, tensor: LazyTensor) -> None:
        cell = tensor._handle.cell
        assert cell is not None
        self.cell = cell
        self.meta = tensor._handle.meta
        self.version = cell.version
        _views.setdefault(cell, weakref.WeakSet()).add(self)

    def read(self) -> torch.Tensor:
        """The bytes of the tensor."""
        if self.cell.version != self.version:
            raise RuntimeError(
                "with compile_only and validate_only a tensor is computed when it is read, but another tensor that it "
                "is computed from was changed since: read it before the change, or run without these modes"
            )
        return self.of(self.cell.data())

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """The view of the bytes of a cell."""
        data = data.view(-1) if self.meta.dtype == data.dtype else data.view(-1).view(self.meta.dtype)
        return data.as_strided(self.meta.shape, self.meta.stride(), self.meta.storage_offset())


def _move(cell: Cell) -> Cell | None:
    """Moves the value of a cell, and the views of it, to another cell; None if it is in the spool."""
    before = cell.moved()
    if before is not None:
        for view in _views.pop(cell, ()):
            if view.version == cell.version:
                view.cell, view.version = before, before.version
                _views.setdefault(before, weakref.WeakSet()).add(view)
    return before


class _Call:
    """A postponed call, which runs once."""

    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._func = func
        self._args = args
        self._kwargs = kwargs
        self._results: tuple[torch.Tensor, ...] | None = None

    def result(self, index: int) -> torch.Tensor:
        """One of the results."""
        if self._results is None:
            made = self._func(*map(_read, self._args), **{name: _read(value) for name, value in self._kwargs.items()})
            self._results = (made,) if isinstance(made, torch.Tensor) else tuple(made)
        return self._results[index]


def _read(argument: Any) -> Any:
    if isinstance(argument, _View):
        return argument.read()
    if isinstance(argument, (list, tuple)):
        return [_read(item) for item in argument]
    return _CPU if isinstance(argument, torch.device) else argument


def postpone(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Postpones a call, and returns its result; NotImplemented if it has to run at once."""
    op = operator(func)
    tensors = [item for argument in (*args, *kwargs.values()) for item in _items(argument)]
    own = [tensor for tensor in tensors if isinstance(tensor, LazyTensor)]
    hosts = [tensor for tensor in tensors if not isinstance(tensor, LazyTensor)]
    if any(not is_device(tensor.device) and tensor.dim() for tensor in hosts):
        return NotImplemented
    if moves_to_host(func, args, kwargs) or op.reads_values or (op.views and not op.written):
        return NotImplemented
    try:
        on_meta = {name: as_meta(value) for name, value in kwargs.items()}
        meta = func(*map(as_meta, args), **({**on_meta, "device": META} if "device" in kwargs else on_meta))
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return NotImplemented
    made = (meta,) if isinstance(meta, torch.Tensor) else meta
    if not isinstance(made, (list, tuple)) or not all(isinstance(result, torch.Tensor) for result in made):
        return NotImplemented
    nbytes = sum(tensor._handle.meta.nbytes for tensor in own) + sum(result.nbytes for result in made)
    if nbytes < RAM_BYTES and not any(tensor._handle.cell.remote for tensor in own if tensor._handle.cell is not None):
        return NotImplemented
    if op.written:
        return _change(func, args, kwargs) if op.written == (0,) else NotImplemented
    if not own:
        return NotImplemented
    call = _Call(func, tuple(map(_as_view, args)), {name: _as_view(value) for name, value in kwargs.items()})
    results = [_later(result, call, index) for index, result in enumerate(made)]
    return results[0] if isinstance(meta, torch.Tensor) else type(meta)(results)


def _items(argument: Any) -> Iterator[torch.Tensor]:
    for item in argument if isinstance(argument, (list, tuple)) else (argument,):
        if isinstance(item, torch.Tensor):
            yield item


def _later(meta: torch.Tensor, call: _Call, index: int) -> LazyTensor:
    cell = Cell(tuple(meta.shape), meta.dtype)
    cell.set_remote(lambda: iter([call.result(index)]))
    return new_tensor(cell)


def _as_view(argument: Any) -> Any:
    if isinstance(argument, LazyTensor):
        return _View(argument)
    if isinstance(argument, (list, tuple)):
        return [_as_view(item) for item in argument]
    return argument


def _change(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Postpones a call that writes to its first argument, whose value before moves to a cell of its own."""
    target = args[0]
    cell = target._handle.cell if isinstance(target, LazyTensor) else None
    if cell is None:
        return NotImplemented
    target_view, *others = map(_as_view, args)
    named = {name: _as_view(value) for name, value in kwargs.items()}
    before = _move(cell)
    if before is None:
        return NotImplemented

    def fetch() -> Iterator[torch.Tensor]:
        changed = before.data().clone()  # others may read the value before
        func(target_view.of(changed), *map(_read, others), **{name: _read(value) for name, value in named.items()})
        yield changed

    cell.set_remote(fetch)
    cell.version += 1
    return target
