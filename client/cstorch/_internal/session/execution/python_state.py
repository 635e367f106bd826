"""The Python values that a function of the script reaches: which they are at a moment, and what has changed since.

Nothing here calls code of the script: attributes are read from the dictionaries and slots of objects, and only values
of Python's own types are compared.
"""

import collections
import enum
import functools
import hashlib
import itertools
import operator
import random
import sys
import sysconfig
import time
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from cstorch._internal import state
from cstorch._internal.tracing.provenance import is_user_file

MOST_VALUES = 50_000
MOST_SECONDS = 0.5
_LARGEST = 1000  # elements of a container that are looked at one by one
_LONGEST = 200  # characters of a text that is kept

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_SITE = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_ITERATED: tuple[Iterable[Any], ...] = ([], (), {}, {}.values(), {}.items(), set(), "", range(0), range(1 << 70))
_ITERATORS = (*(type(iter(iterated)) for iterated in _ITERATED), type(reversed([])))
_CONTAINERS: tuple[type[Collection[Any]], ...] = (list, tuple, dict, set, frozenset, collections.deque)
# What nn.Module keeps in each module for itself. Its tensors are states of the step.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training", "_buffers", "_modules"}
_GENERATORS = ("`random`", "`numpy.random`", "`torch` on the CPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A Python value that is another one than before.

    name: as the script would write it: "self.count".
    before, now: shown as text.
    certain: whether it is a value, and not only another object, of which nobody knows what it means.
    """

    name: str
    before: str
    now: str
    certain: bool

    def __str__(self) -> str:
        return f"{self.name} was {self.before} and is {self.now}"


@dataclass(frozen=True, slots=True)
class _Value:
    """A value as it can be compared later; `shown` is for people."""

    key: Any
    shown: str
    certain: bool = True


class PythonState:
    """The values that a function and the optimizers, schedules and modules of the script reach, as they are now.

    It is bounded in number and time: nearest values first. A value has the name by which it is reached first.

    Args:
        function: a function, a method, or anything that can be called.
        arguments: of the function, by name.
        keeps: whether `restore` is wanted. It keeps all that is reached alive.
    """

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any], *, keeps: bool = False) -> None:
        self.values: dict[str, _Value] = {}
        self._put_back: list[Callable[[], None]] = []
        self._setters: dict[str, Callable[[Any], None]] = {}  # of integers
        self._keeps = keeps
        self._seen: set[int] = set()
        self._held: list[Any] = []  # so that no id is given to another object meanwhile
        self._waiting: collections.deque[tuple[str, Any]] = collections.deque()
        registered = [stateful for kind in get_args(state.Kind) for stateful in state.registered(kind)]
        self._registered = {id(stateful) for stateful in registered}
        deadline = time.monotonic() + MOST_SECONDS
        self._reach_function("", function)
        for name, value in arguments.items():
            self._add(name, value)
        for stateful in registered:
            self._add("model" if isinstance(stateful, nn.Module) else type(stateful).__name__, stateful)
        while self._waiting and len(self.values) < MOST_VALUES and time.monotonic() < deadline:
            self._reach(*self._waiting.popleft())
        for name, key in zip(_GENERATORS, _generator_states(), strict=True):
            self.values[name] = _Value(key, "")
        self._held.clear()
        self._waiting.clear()

    def changes(self, later: "PythonState") -> list[Change]:
        """What is another value later; values first, then objects, then generators of random numbers that moved on."""
        found = [
            Change(name=name, before=value.shown, now=other.shown, certain=value.certain and other.certain)
            for name, value in self.values.items()
            if name not in _GENERATORS and (other := later.values.get(name)) is not None and other.key != value.key
        ]
        return sorted(found, key=lambda change: not change.certain)

    def drawn(self, later: "PythonState") -> list[str]:
        """The generators of random numbers that have moved on."""
        return [name for name in _GENERATORS if self.values[name].key != later.values[name].key]

    def growth(self, later: "PythonState") -> dict[str, int]:
        """By how much integers have grown, of those that can be set."""
        grown = {
            name: other.key[1] - self.values[name].key[1]
            for name in later._setters
            if (other := later.values[name]).key[0] is int and name in self.values and self.values[name].key[0] is int
        }
        return {name: step for name, step in grown.items() if step}

    def set_ahead(self, steps: Mapping[str, int], calls: int) -> None:
        """Sets integers to what they are after so many calls more, in each of which they grow by the same."""
        for name, step in steps.items():
            self._setters[name](self.values[name].key[1] + step * calls)

    def restore(self) -> None:
        """Puts all back that was reached, as far as Python's own containers and the attributes of objects hold it."""
        for put_back in self._put_back:
            put_back()

    # What is reached, and from where.

    def _add(self, name: str, value: Any, setter: Callable[[Any], None] | None = None) -> None:
        if name in self.values or len(self.values) >= MOST_VALUES:
            return
        if any("__class__" in vars(base) for base in type(value).__mro__[:-1]):
            return  # a proxy, which calls code of its own to say what it is
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
            for place, (key, item) in enumerate(itertools.islice(dict.items(value), _LARGEST)):
                self._add(
                    f"{name}[{key!r}]" if type(key) in (str, int, bool, float) else f"{name}[#{place}]",
                    item,
                    functools.partial(dict.__setitem__, value, key),
                )
        elif isinstance(value, (list, tuple, collections.deque)):
            self._keep_sequence(value)
            if _is_own(type(value)):
                self._reach_object(name, value)
            base = next(kind for kind in (list, tuple, collections.deque) if isinstance(value, kind))
            for place, item in enumerate(itertools.islice(base.__iter__(value), _LARGEST)):  # type: ignore[arg-type]
                self._add(f"{name}[{place}]", item)
        elif type(value) is set:
            if self._keeps:
                self._put_back += [value.clear, functools.partial(value.update, set(value))]
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self._reach_function(name, value)
        elif isinstance(value, type) and _is_own(value):
            self._reach_class(name, value)
        elif self._has_attributes(value):
            self._reach_object(name, value)

    def _has_attributes(self, value: Any) -> bool:
        """Whether its attributes are looked at: those of the script's objects, and of what belongs to its step."""
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
                self._put_back.append(functools.partial(member.__set__, value, item))
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
                    self._put_back.append(functools.partial(_set_class_attribute, kind, attribute, item))

    def _reach_function(self, name: str, function: Any) -> None:
        """The variables that a function reads: its closure's, globals, defaults, and attributes of its own."""
        while isinstance(function, (functools.partial, types.MethodType)):
            if isinstance(function, types.MethodType):
                self._add("self", function.__self__)
                function = function.__func__
            else:
                for place, item in enumerate(function.args):
                    self._add(f"{name or 'partial'}.args[{place}]", item)
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
                self._put_back.append(functools.partial(setattr, cell, "cell_contents", item))
            self._add(variable, item, functools.partial(setattr, cell, "cell_contents"))
        if not function.__code__.co_filename.startswith(_SITE):
            self._reach_globals(function)
        for place, item in enumerate(function.__defaults__ or ()):
            self._add(f"the default {place} of {own}", item)
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
                if is_user_file(getattr(item, "__file__", None) or "") and not (item.__file__ or "").startswith(_SITE):
                    for attribute in read:  # config.warmup: both are names that the code has
                        if attribute in vars(item):
                            self._add(f"{variable}.{attribute}", vars(item)[attribute])
                continue
            if self._keeps and not isinstance(item, (types.FunctionType, type)):
                self._put_back.append(functools.partial(function.__globals__.__setitem__, variable, item))
            self._add(variable, item, functools.partial(function.__globals__.__setitem__, variable))

    # What `restore` puts back.

    def _keep_dict(self, value: dict[Any, Any]) -> None:
        if self._keeps:
            self._put_back.append(functools.partial(_put_dict_back, value, list(dict.items(value))))

    def _keep_sequence(self, value: Any) -> None:
        if not self._keeps or isinstance(value, tuple):
            return
        if isinstance(value, list):
            self._put_back.append(functools.partial(_put_list_back, value, list(list.__iter__(value))))
        else:
            kept = list(collections.deque.__iter__(value))

            def put_back() -> None:
                collections.deque.clear(value)
                collections.deque.extend(value, kept)

            self._put_back.append(put_back)


def _put_dict_back(value: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    now = list(dict.items(value))
    if len(now) == len(items) and all(a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True)):
        return
    base = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
    base.clear(value)
    for key, item in items:
        base.__setitem__(value, key, item)


def _put_list_back(value: list[Any], items: list[Any]) -> None:
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
        place = value.gi_frame.f_lasti if value.gi_frame is not None else None
        return _Value((type(value), place), "a used up generator" if place is None else "a generator")
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


def _is_own(kind: type) -> bool:
    """Whether a class is the script's, and neither Python's nor one of an installed package."""
    known = _own.get(kind)
    if known is None:
        name = type.__getattribute__(kind, "__module__")
        module = sys.modules.get(name) if isinstance(name, str) else None
        file = vars(module).get("__file__") if module is not None else None
        is_file_own = isinstance(file, str) and is_user_file(file) and not file.startswith(_SITE)
        known = _own[kind] = name == "__main__" or is_file_own
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
        if _is_own(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    )


def _names_read(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_read(constant)
