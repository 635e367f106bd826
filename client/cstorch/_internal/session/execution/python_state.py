"""Snapshots of the Python values that a function of the script can reach, and the differences between two of them.

No code of the script is called: attributes are read from the dictionaries and slots of objects, and only values of
Python's own types are compared.
"""

import collections
import enum
import functools
import hashlib
import itertools
import operator
import os
import random
import sys
import time
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from cstorch._internal import state
from cstorch._internal.tracing.provenance import is_user_file

MOST_VALUES = 50_000
MOST_SECONDS = 0.5
_LARGEST = 1000  # elements of a container that are read
_LONGEST = 200  # characters of a text that is stored as it is

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_ITERATED: tuple[Iterable[Any], ...] = ([], (), {}, {}.values(), {}.items(), set(), "", range(0), range(1 << 70))
_ITERATORS = (*(type(iter(iterated)) for iterated in _ITERATED), type(reversed([])))
_CONTAINERS: tuple[type[Collection[Any]], ...] = (list, tuple, dict, set, frozenset, collections.deque)
# Attributes that nn.Module itself has in each module. Their tensors are states of the step.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training", "_buffers", "_modules"}
_GENERATORS = ("`random`", "`numpy.random`", "`torch` on the CPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A Python value that has changed.

    name: The expression that the script would use, such as "self.count".
    before, now: The two values as text.
    certain: Whether the values differ; if not, only the object is another one, which may mean nothing.
    """

    name: str
    before: str
    now: str
    certain: bool

    def __str__(self) -> str:
        return f"{self.name} was {self.before} and is {self.now}"


@dataclass(frozen=True, slots=True)
class _Value:
    """A value in a form that can be compared later; `shown` is its text in messages."""

    key: Any
    shown: str
    certain: bool = True


class PythonState:
    """A snapshot of the values that a function, and the script's optimizers, schedules and modules, can reach.

    The number of values and the time are bounded; the nearest values come first. A value has the name of the first path
    to it.

    Args:
        function: A function, a method, or any other callable.
        arguments: The arguments of the function, by name.
        keeps: Whether `restore` can be called. The snapshot then keeps all reached objects alive.
    """

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any], *, keeps: bool = False) -> None:
        self.values: dict[str, _Value] = {}
        self._restorers: list[Callable[[], None]] = []
        self._setters: dict[str, Callable[[Any], None]] = {}  # of integers
        self._keeps = keeps
        self._seen: set[int] = set()
        self._held: list[Any] = []  # alive, so that no other object gets the same id
        self._waiting: collections.deque[tuple[str, Any]] = collections.deque()
        registered = [stateful for kind in get_args(state.Kind) for stateful in state.registered(kind)]
        self._registered = {id(stateful) for stateful in registered}
        deadline = time.thread_time() + MOST_SECONDS
        self._reach_function("", function)
        for name, value in arguments.items():
            self._add(name, value)
        for stateful in registered:
            self._add("model" if isinstance(stateful, nn.Module) else type(stateful).__name__, stateful)
        while self._waiting and len(self.values) < MOST_VALUES and time.thread_time() < deadline:
            self._reach(*self._waiting.popleft())
        for name, key in zip(_GENERATORS, _generator_states(), strict=True):
            self.values[name] = _Value(key, "")
        self._held.clear()
        self._waiting.clear()

    def changes(self, later: "PythonState") -> list[Change]:
        """Returns the values that differ in a later snapshot; values first, then objects."""
        found = [
            Change(name=name, before=value.shown, now=other.shown, certain=value.certain and other.certain)
            for name, value in self.values.items()
            if name not in _GENERATORS and (other := later.values.get(name)) is not None and other.key != value.key
        ]
        return sorted(found, key=lambda change: not change.certain)

    def drawn(self, later: "PythonState") -> list[str]:
        """Returns the generators of random numbers that were used up to a later snapshot."""
        return [name for name in _GENERATORS if self.values[name].key != later.values[name].key]

    def growth(self, later: "PythonState") -> dict[str, int]:
        """Returns the growth of each integer that can be set, up to a later snapshot."""
        grown = {
            name: other.key[1] - self.values[name].key[1]
            for name in later._setters
            if (other := later.values[name]).key[0] is int and name in self.values and self.values[name].key[0] is int
        }
        return {name: step for name, step in grown.items() if step}

    def set_ahead(self, steps: Mapping[str, int], calls: int) -> None:
        """Sets integers to their values after some more calls, if each call adds the same step."""
        for name, step in steps.items():
            self._setters[name](self.values[name].key[1] + step * calls)

    def restore(self) -> None:
        """Restores the reached values that are in Python's own containers or in attributes of objects."""
        for restore in self._restorers:
            restore()

    # --- Paths to values ----------------------------------------------------------------------------------------------

    def _add(self, name: str, value: Any, setter: Callable[[Any], None] | None = None) -> None:
        if name in self.values or len(self.values) >= MOST_VALUES:
            return
        if any("__class__" in vars(base) for base in type(value).__mro__[:-1]):
            return  # a proxy: isinstance would call its code
        self.values[name] = _value(value)
        if type(value) is int and setter is not None and self._keeps:
            self._setters[name] = setter
        if isinstance(value, (*_PLAIN, torch.Tensor)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._held.append(value)
        self._waiting.append((name, value))

    def _reach(self, name: str, value: Any) -> None:
        if isinstance(value, dict):
            self._keep_dict(value)
            if _is_own(type(value)):
                self._reach_object(name, value)
            for index, (key, item) in enumerate(itertools.islice(dict.items(value), _LARGEST)):
                self._add(
                    f"{name}[{key!r}]" if type(key) in (str, int, bool, float) else f"{name}[#{index}]",
                    item,
                    functools.partial(dict.__setitem__, value, key),
                )
        elif isinstance(value, (list, tuple, collections.deque)):
            self._keep_sequence(value)
            if _is_own(type(value)):
                self._reach_object(name, value)
            base = next(kind for kind in (list, tuple, collections.deque) if isinstance(value, kind))
            for index, item in enumerate(itertools.islice(base.__iter__(value), _LARGEST)):  # type: ignore[arg-type]
                self._add(f"{name}[{index}]", item)
        elif type(value) is set:
            if self._keeps:
                self._restorers += [value.clear, functools.partial(value.update, set(value))]
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self._reach_function(name, value)
        elif isinstance(value, type) and _is_own(value):
            self._reach_class(name, value)
        elif self._has_attributes(value):
            self._reach_object(name, value)

    def _has_attributes(self, value: Any) -> bool:
        """Whether the attributes of an object are read: it is the script's, or belongs to the step."""
        kind = type(value)
        if isinstance(value, (types.FunctionType, types.ModuleType, type)):
            return False
        if isinstance(value, (nn.Module, torch.optim.Optimizer, types.SimpleNamespace)) or _is_own(kind):
            return True
        return kind.__module__ == "cstorch.core.compile" or id(value) in self._registered

    def _reach_object(self, name: str, value: Any) -> None:
        attributes = _attributes(value)
        self._keep_dict(attributes)
        is_module = isinstance(value, nn.Module)
        for attribute, item in list(attributes.items()):
            if is_module and attribute in _OF_MODULES and not (attribute.endswith("hooks") and item):
                continue
            if is_module and attribute in ("_modules", "_buffers"):
                self._keep_dict(item)
                for child, module in item.items():
                    self._add(f"{name}.{child}", module)
                continue
            self._add(f"{name}.{attribute}", item, functools.partial(attributes.__setitem__, attribute))
        kind: Any = type(value)
        for slot, member in _slots(kind):
            try:
                item = member.__get__(value)
            except AttributeError:
                continue
            if self._keeps:
                self._restorers.append(functools.partial(member.__set__, value, item))
            self._add(f"{name}.{slot}", item, functools.partial(member.__set__, value))
        for base in kind.__mro__ if _is_own(kind) else ():
            if _is_own(base) and id(base) not in self._seen:
                self._seen.add(id(base))
                self._reach_class(base.__name__, base)

    def _reach_class(self, name: str, kind: type) -> None:
        attributes = vars(kind)
        for attribute, item in attributes.items():
            function = item.__func__ if isinstance(item, (staticmethod, classmethod)) else item
            if isinstance(function, property):
                function = function.fget
            if isinstance(function, types.FunctionType):
                if id(function) not in self._seen:
                    self._seen.add(id(function))
                    self._reach_function(f"{name}.{attribute}", function)
            elif not attribute.startswith("__") and not isinstance(item, types.MemberDescriptorType):
                self._add(f"{name}.{attribute}", item, functools.partial(type.__setattr__, kind, attribute))
                if self._keeps and type(kind) is type:
                    self._restorers.append(functools.partial(_set_class_attribute, kind, attribute, item))

    def _reach_function(self, name: str, function: Any) -> None:
        """Reads the variables of a function: those of its closure, globals, defaults, and its own attributes."""
        while isinstance(function, (functools.partial, types.MethodType)):
            if isinstance(function, types.MethodType):
                self._add("self", function.__self__)
                function = function.__func__
            else:
                for index, item in enumerate(function.args):
                    self._add(f"{name or 'partial'}.args[{index}]", item)
                for key, item in function.keywords.items():
                    self._add(f"{name or 'partial'}.keywords[{key!r}]", item)
                function = function.func
        if not isinstance(function, types.FunctionType):
            self._add(name or "the traced function", function)
            return
        if name and not is_user_file(function.__code__.co_filename):
            return
        own = name or function.__name__
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                item = cell.cell_contents
            except ValueError:  # not set yet
                continue
            if self._keeps:
                self._restorers.append(functools.partial(setattr, cell, "cell_contents", item))
            self._add(variable, item, functools.partial(setattr, cell, "cell_contents"))
        if not _is_installed(function.__code__.co_filename):
            self._reach_globals(function)
        for index, item in enumerate(function.__defaults__ or ()):
            self._add(f"the default {index} of {own}", item)
        for key, item in (function.__kwdefaults__ or {}).items():
            self._add(f"the default of {own}'s {key}", item)
        if function.__dict__:
            self._keep_dict(function.__dict__)
            for attribute, item in function.__dict__.items():
                self._add(f"{own}.{attribute}", item)

    def _reach_globals(self, function: types.FunctionType) -> None:
        read = list(_names_read(function.__code__))
        for variable in read:
            if variable not in function.__globals__:
                continue
            item = function.__globals__[variable]
            if isinstance(item, types.ModuleType):
                if _is_own_file(getattr(item, "__file__", None)):
                    for attribute in read:  # for config.warmup the code has both names
                        if attribute in vars(item):
                            self._add(f"{variable}.{attribute}", vars(item)[attribute])
                continue
            if self._keeps and not isinstance(item, (types.FunctionType, type)):
                self._restorers.append(functools.partial(function.__globals__.__setitem__, variable, item))
            self._add(variable, item, functools.partial(function.__globals__.__setitem__, variable))

    # --- Actions of `restore` -----------------------------------------------------------------------------------------

    def _keep_dict(self, value: dict[Any, Any]) -> None:
        if self._keeps:
            self._restorers.append(functools.partial(_restore_dict, value, list(dict.items(value))))

    def _keep_sequence(self, value: Any) -> None:
        if not self._keeps or isinstance(value, tuple):
            return
        if isinstance(value, list):
            self._restorers.append(functools.partial(_restore_list, value, list(list.__iter__(value))))
        else:
            kept = list(collections.deque.__iter__(value))

            def restore() -> None:
                collections.deque.clear(value)
                collections.deque.extend(value, kept)

            self._restorers.append(restore)


def _restore_dict(value: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    now = list(dict.items(value))
    if len(now) == len(items) and all(a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True)):
        return
    base = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
    base.clear(value)
    for key, item in items:
        base.__setitem__(value, key, item)


def _restore_list(value: list[Any], items: list[Any]) -> None:
    now = list(list.__iter__(value))
    if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
        list.__setitem__(value, slice(None), items)


def _set_class_attribute(kind: type, attribute: str, item: Any) -> None:
    if vars(kind).get(attribute) is not item:
        type.__setattr__(kind, attribute, item)


def _value(value: Any) -> _Value:
    if isinstance(value, (enum.Enum, type)):
        return _Value(
            (type(value), id(value)), getattr(value, "__name__", "another"), certain=isinstance(value, enum.Enum)
        )
    if type(value) in (str, bytes) and len(value) > _LONGEST:
        return _Value((type(value), len(value), hash(value)), f"{value[:20]!r}...")
    if type(value) in _PLAIN:
        return _Value((type(value), repr(value) if isinstance(value, (float, complex, slice)) else value), repr(value))
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if type(value) is np.ndarray and value.nbytes <= 1 << 16 and value.dtype.kind in "biufcSU":
        content = repr(value.tolist()) if value.size <= 4 else f"an array of shape {value.shape}"
        return _Value((value.shape, value.dtype, hashlib.blake2b(value.tobytes()).digest()), content)
    if isinstance(value, np.generic):
        return _Value((type(value), repr(value)), repr(value))
    if (base := next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)) is not None:
        size = base.__len__(value)
        return _Value((type(value), size), f"of {size} elements")
    if type(value) in _ITERATORS:
        left = operator.length_hint(value)
        return _Value((type(value), left), f"an iterator with {left} left")
    if type(value) is itertools.count:
        return _Value((type(value), repr(value)), repr(value))
    if type(value) is types.GeneratorType:
        instruction = value.gi_frame.f_lasti if value.gi_frame is not None else None
        return _Value((type(value), instruction), "a used up generator" if instruction is None else "a generator")
    if type(value) is random.Random:
        return _Value(hash(random.Random.getstate(value)), "a generator of random numbers")
    if type(value) is torch.Generator:
        return _Value(bytes(value.get_state().numpy().tobytes()), "a generator of random numbers")
    if type(value) in (np.random.Generator, np.random.RandomState):
        return _Value(_numpy_state(value), "a generator of random numbers")
    return _Value((type(value), id(value)), f"a {type(value).__name__}", certain=False)


def _tensor(value: torch.Tensor) -> _Value:
    kind = type(value)
    if kind is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided and value.numel() <= 16:
        content = value.detach().tolist()
        return _Value((tuple(value.shape), value.dtype, repr(content)), f"tensor({content})")
    return _Value(
        (id(value), tuple(value.shape), value.dtype), f"a tensor of shape {tuple(value.shape)}", certain=False
    )


def _generator_states() -> Iterator[Any]:
    yield hash(random.getstate())
    yield _numpy_state(np.random.mtrand._rand)
    yield torch.get_rng_state().numpy().tobytes()


def _numpy_state(generator: Any) -> Any:
    bits = generator._bit_generator if isinstance(generator, np.random.RandomState) else generator.bit_generator
    return (
        repr(bits.state)
        if type(bits) is not np.random.MT19937
        else (
            bits.state["state"]["pos"],
            bits.state["state"]["key"].tobytes(),
        )
    )


_own: "weakref.WeakKeyDictionary[type, bool]" = weakref.WeakKeyDictionary()


@functools.cache
def _holds_packages(folder: str) -> bool:
    """Whether packages are installed in a folder, of this environment or another."""
    return any(Path(folder).glob("*.dist-info"))


def _is_installed(file: str) -> bool:
    """Whether a file belongs to an installed package, and not to the script."""
    # Scripts add folders with a separator at the end, and values of other types, which Python's import ignores.
    folders = (os.path.join(folder, "") for folder in sys.path if isinstance(folder, str) and folder)
    return any(file.startswith(folder) and _holds_packages(folder) for folder in folders)


def _is_own_file(file: Any) -> bool:
    """Whether a file is the script's, and not of Python or an installed package."""
    return isinstance(file, str) and is_user_file(file) and not _is_installed(file)


def _is_own(kind: type) -> bool:
    """Whether a class is the script's, and not of Python or an installed package."""
    known = _own.get(kind)
    if known is None:
        name = type.__getattribute__(kind, "__module__")
        module = sys.modules.get(name) if isinstance(name, str) else None
        file = vars(module).get("__file__") if module is not None else None
        known = _own[kind] = name == "__main__" or _is_own_file(file)
    return known


def _attributes(value: Any) -> dict[str, Any]:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes if type(attributes) is dict else {}


@functools.cache
def _slots(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, member)
        for base in kind.__mro__
        if _is_own(base) and "__slots__" in vars(base)  # a class of C has members that can only be read
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    )


def _names_read(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_read(constant)
