"""Classes of a script whose objects hold tensors, such as a dataclass, a `UserDict` or a subclass of dict.

For torch's pytree an object of a class that is not registered is one leaf, so that a traced step would have the tensors
of the first batch. Here the classes of such objects are registered, each as what its objects hold.
"""

import dataclasses
import itertools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

_CONTAINERS: Final = (OrderedDict, defaultdict, dict, list, tuple)  # a class before those that it is derived from
_BASES: Final = (*_CONTAINERS, types.SimpleNamespace, object)
_ATOMS: Final = (type, types.ModuleType, types.FunctionType, types.MethodType, str, bytes, int, float, complex)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """What an object holds.

    Attributes:
        keys: the keys of its items, or their positions.
        fields: the names of its attributes, slots included.
        aliases: the names of attributes that are items too, as in a dict whose items can be read as attributes.
        is_own_dict: whether its attributes are its items: `self.__dict__ = self`.
    """

    keys: Sequence[Any]
    fields: Sequence[str]
    aliases: Sequence[str]
    is_own_dict: bool


def is_container(cls: type) -> bool:
    """Whether a class is a subclass of dict, list or tuple."""
    return issubclass(cls, _CONTAINERS)


def is_container_or_dataclass(cls: type) -> bool:
    """Whether a class only holds data: the objects of others, such as a trainer, are more than what they hold."""
    return is_container(cls) or dataclasses.is_dataclass(cls)


def holds_tensors(value: Any) -> bool:
    """Whether an object has tensors in its fields or items, or in those of what it holds; a module is an atom."""
    return _search(value)[0]


def register_classes(tree: Any, is_meant: Callable[[type], bool] = lambda cls: True) -> None:
    """Registers the classes of all objects in a tree that hold tensors with torch's pytree.

    An object that holds itself somewhere, or that Python cannot make without its class's help, stays a leaf.

    Args:
        tree: the batch of a loader, or what a step returns.
        is_meant: whether a class is to be registered.
    """
    from torch.utils import _pytree as pytree

    while classes := {
        type(leaf) for leaf in pytree.tree_leaves(tree) if is_meant(type(leaf)) and _can_be_registered(leaf)
    }:
        for cls in classes:  # what their objects hold are the leaves of the next turn
            _register(cls)


def _can_be_registered(leaf: Any) -> bool:
    if not _parts(leaf):
        return False
    has_tensors, is_cyclic = _search(leaf)
    if not has_tensors or is_cyclic:
        return False
    try:
        _base(type(leaf)).__new__(type(leaf))
    except TypeError:  # a class that is written in C
        return False
    return True


def _search(value: Any) -> tuple[bool, bool]:
    """Returns whether an object holds tensors, and whether something in it holds itself."""
    import torch

    has_tensors = is_cyclic = False
    open_ids: set[int] = set()  # of the objects that hold the present one
    done: dict[int, Any] = {}  # objects by their ids, which are theirs while they live
    ahead: list[tuple[Any, bool]] = [(value, False)]
    while ahead:
        item, is_end = ahead.pop()
        if is_end:
            open_ids.remove(id(item))
            done[id(item)] = item
        elif id(item) in open_ids:
            is_cyclic = True
        elif id(item) not in done:
            has_tensors = has_tensors or isinstance(item, torch.Tensor)
            open_ids.add(id(item))
            ahead.append((item, True))
            ahead.extend((part, False) for part in _parts(item))
    return has_tensors, is_cyclic


def _parts(value: Any) -> Sequence[Any]:
    """Returns what an object holds; nothing for atoms."""
    import numpy as np
    import torch

    if value is None or isinstance(value, (*_ATOMS, torch.Tensor, torch.nn.Module, np.ndarray)):
        return ()
    return [*_items(value).values(), *_fields(value).values()]


def _base(cls: type) -> Any:
    return next(base for base in _BASES if issubclass(cls, base))


def _items(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, dict):
        return dict(_base(type(value)).items(value))  # whatever the class has in the place of dict's methods
    return dict(enumerate(_base(type(value)).__iter__(value))) if isinstance(value, list | tuple) else {}


def _fields(value: Any) -> Mapping[str, Any]:
    fields = {}
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and attributes is not value:
        fields.update(attributes)
    for base in type(value).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and name != "__dict__" and hasattr(value, name):
                fields[name] = getattr(value, name)
    return fields


def _layout(value: Any) -> _Layout:
    items, fields = _items(value), _fields(value)
    aliases = [name for name, held in fields.items() if isinstance(value, dict) and items.get(name, items) is held]
    return _Layout(
        keys=tuple(items),
        fields=tuple(name for name in fields if name not in aliases),
        aliases=tuple(aliases),
        is_own_dict=getattr(value, "__dict__", None) is value,
    )


def _register(cls: type) -> None:
    from torch.utils import _pytree as pytree

    def flatten(value: Any) -> tuple[list[Any], _Layout]:
        layout, fields = _layout(value), _fields(value)
        return [*_items(value).values(), *(fields[name] for name in layout.fields)], layout

    def flatten_with_keys(value: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], _Layout]:
        children, layout = flatten(value)
        of_item: Callable[[Any], pytree.KeyEntry] = pytree.MappingKey if isinstance(value, dict) else pytree.SequenceKey
        keys: list[pytree.KeyEntry] = [of_item(key) for key in layout.keys]
        keys.extend(map(pytree.GetAttrKey, layout.fields))
        return list(zip(keys, children, strict=True)), layout

    def unflatten(children: Iterable[Any], layout: _Layout) -> Any:
        children = list(children)
        items = dict(zip(layout.keys, itertools.islice(children, len(layout.keys)), strict=True))
        fields = dict(zip(layout.fields, children[len(items) :], strict=True))
        return _made(cls, items, fields | {name: items[name] for name in layout.aliases}, layout.is_own_dict)

    pytree.register_pytree_node(cls, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)


def _made(cls: type, items: Mapping[Any, Any], fields: Mapping[str, Any], is_own_dict: bool) -> Any:
    """Makes an object of a class without its constructor."""
    base = _base(cls)
    value: Any
    if base is tuple:
        value = tuple.__new__(cls, items.values())
    else:
        value = base.__new__(cls)
        if base is list:
            list.extend(value, items.values())
        elif issubclass(base, dict):
            for key, item in items.items():
                base.__setitem__(value, key, item)
    if is_own_dict:
        value.__dict__ = value
    for name, field in fields.items():
        object.__setattr__(value, name, field)  # also of a frozen dataclass
    return value
