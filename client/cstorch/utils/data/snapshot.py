"""What Python objects hold, so that it can be put back: of a dataset that a worker process would have changed."""

import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np
import torch

# What lies in a container of more items are samples: their order is put back, and what is in each is not looked at.
_MOST_ITEMS: Final = 1000
# Arrays and tensors beyond that hold samples, too: nobody changes these in place to read them.
_COPIED_BYTES: Final = 64 * 2**20

_LEAVES: Final = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, torch.dtype)


class Snapshot:
    """What objects hold that can be reached from others: attributes, items, states of generators, and small arrays.

    Objects are neither copied nor replaced, so that all who know one go on to see the same.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._restorers: list[Callable[[], None]] = []
        self._left_bytes = _COPIED_BYTES
        self._kept: list[Any] = []  # what has been seen lives on, so that no other object gets its id
        seen: set[int] = set()
        waiting = deque(roots)  # breadth first: what is near counts most where room is limited
        while waiting:
            value = waiting.popleft()
            if isinstance(value, _LEAVES) or id(value) in seen:
                continue
            seen.add(id(value))
            self._kept.append(value)
            waiting.extend(self._take(value))

    def restore(self) -> None:
        """Puts back what has changed."""
        for restorer in self._restorers:
            restorer()

    def _take(self, value: Any) -> Iterator[Any]:
        """Keeps what an object holds; gives what is to be looked at as well."""
        if isinstance(value, np.ndarray | torch.Tensor):
            self._take_array(value)
            return
        if (generator := _generator(value)) is not None:
            self._restorers.append(generator)
            return
        if isinstance(value, list | deque):
            items = list(value)
            self._restorers.append(functools.partial(_restore_list, value, items))
            yield from items if len(items) <= _MOST_ITEMS else ()
        elif isinstance(value, dict):
            self._restorers.append(functools.partial(_restore_dict, value, dict(value)))
            yield from value.values() if len(value) <= _MOST_ITEMS else ()
        elif isinstance(value, set):
            self._restorers.append(functools.partial(_restore_set, value, set(value)))
        elif isinstance(value, tuple):
            yield from value if len(value) <= _MOST_ITEMS else ()
        elif isinstance(value, types.CellType):
            try:
                content = value.cell_contents
            except ValueError:  # it is empty
                return
            self._restorers.append(lambda: setattr(value, "cell_contents", content))
            yield content
        elif isinstance(value, types.MethodType):
            yield value.__self__
        elif isinstance(value, types.FunctionType):
            yield from value.__closure__ or ()
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and not isinstance(value, types.FunctionType):
            yield attributes

    def _take_array(self, value: np.ndarray[Any, Any] | torch.Tensor) -> None:
        if value.nbytes > self._left_bytes:
            return
        if isinstance(value, torch.Tensor):
            if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
                return
            tensor, before = value.detach(), value.detach().clone()
            self._restorers.append(lambda: None if torch.equal(tensor, before) else _copy(tensor, before))
        else:
            if type(value) is not np.ndarray or value.dtype.hasobject or not value.flags.writeable:
                return
            array, old = value, value.copy()
            self._restorers.append(lambda: None if np.array_equal(array, old) else np.copyto(array, old))
        self._left_bytes -= value.nbytes


def _generator(value: Any) -> Callable[[], None] | None:
    """What puts a random generator back; None for what is none."""
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, torch.Generator):
        return functools.partial(_set_generator, value, value.get_state())
    return None


def _set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _copy(tensor: torch.Tensor, source: torch.Tensor) -> None:
    tensor.copy_(source)


def _same(now: Iterable[Any], before: Iterable[Any]) -> bool:
    now, before = list(now), list(before)
    return len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True))


def _restore_list(value: Any, items: list[Any]) -> None:
    if not _same(value, items):
        value.clear()
        value.extend(items)


def _restore_dict(value: dict[Any, Any], items: dict[Any, Any]) -> None:
    if not (_same(value, items) and _same(value.values(), items.values())):
        value.clear()
        value.update(items)


def _restore_set(value: set[Any], items: set[Any]) -> None:
    if value != items:
        value.clear()
        value.update(items)
