"""Nests: tensors and other values in dicts, lists and tuples.

A scope is the list of keys and positions that lead to a value, as strings.
"""

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from cstorch._internal.tracing import LazyTensor

Scope = list[str]
VisitFunction = Callable[[Any], Iterator[tuple[Scope, Any]]]
Visit = TypeVar("Visit", bound=VisitFunction)

_visit_functions: dict[type, VisitFunction] = {}


def register_visit_fn(*types: type) -> Callable[[Visit], Visit]:
    """Registers a function that yields scope and value of each part of structures of some types; a decorator.

    Args:
        *types: The types.

    Raises:
        ValueError: A type has a function already.

    Reference: release 2.10, `cerebras.pytorch.utils.nest`.
    """

    def register(function: Visit) -> Visit:
        for kind in types:
            if kind in _visit_functions:
                raise ValueError(f"{kind.__name__} has a visit function: unregister it first")
            _visit_functions[kind] = function
        return function

    return register


def unregister_visit_fn(*types: type) -> None:
    """Makes values of these types leaves again.

    Args:
        *types: The types.

    Reference: release 2.10, `cerebras.pytorch.utils.nest`.
    """
    for kind in types:
        _visit_functions.pop(kind, None)


def find_visit_fn(struct: Any) -> VisitFunction | None:
    """Returns the function registered for the type of a value, or for the nearest of its bases; None: it is a leaf.

    Args:
        struct: The value.

    Reference: release 2.10, `cerebras.pytorch.utils.nest`.
    """
    return next((_visit_functions[kind] for kind in type(struct).__mro__ if kind in _visit_functions), None)


@register_visit_fn(dict, UserDict)
def visit_dict(struct: Mapping[Any, Any]) -> Iterator[tuple[Scope, Any]]:
    """Yields scope and value of the items of a dict.

    Args:
        struct: The dict.

    Reference: release 2.10, `cerebras.pytorch.utils.nest`.
    """
    for key, value in struct.items():
        yield [str(key)], value


@register_visit_fn(list, tuple)
def visit_list_tuple(struct: list[Any] | tuple[Any, ...]) -> Iterator[tuple[Scope, Any]]:
    """Yields scope and value of the items of a list or tuple; those of a named tuple by their names.

    Args:
        struct: The list or tuple.

    Reference: release 2.10, `cerebras.pytorch.utils.nest`.
    """
    names = getattr(struct, "_fields", range(len(struct)))
    for name, value in zip(names, struct, strict=True):
        yield [str(name)], value


def visit_structure(
    data_structure: Any, select_fn: Callable[[Any], bool], strict: bool = False, scope: Scope | None = None
) -> Iterator[tuple[Scope, Any]]:
    """Yields scope and value of all selected values, in order.

    Args:
        data_structure: The nest.
        select_fn: Whether a value is selected. The parts of a selected value are not visited.
        strict: Whether a value that is neither selected nor a structure is an error.
        scope: The scope of the nest itself; None: the top.

    Raises:
        TypeError: `strict` is true, and there is such a value.

    Reference: release 2.10, `cerebras.pytorch.utils.nest`.
    """
    scope = scope or []
    if select_fn(data_structure):
        yield scope, data_structure
    elif (visit := find_visit_fn(data_structure)) is not None:
        for part, value in visit(data_structure):
            yield from visit_structure(value, select_fn, strict, [*scope, *part])
    elif strict:
        where = ".".join(scope) or "the top"
        raise TypeError(f"at {where} there is a {type(data_structure).__name__}, which is no structure")


def visit_torch_tensors(
    data_structure: Any, strict: bool = False, scope: Scope | None = None
) -> Iterator[tuple[Scope, torch.Tensor]]:
    """Yields scope and value of all tensors.

    Args:
        data_structure: The nest.
        strict: Whether a leaf that is no tensor is an error.
        scope: The scope of the nest itself; None: the top.

    Raises:
        TypeError: `strict` is true, and there is such a leaf.

    Reference: release 2.10, `cerebras.pytorch.utils.data.utils`.
    """
    return visit_structure(data_structure, _is_tensor, strict, scope)


def visit_lazy_tensors(
    data_structure: Any, strict: bool = False, scope: Scope | None = None
) -> Iterator[tuple[Scope, torch.Tensor]]:
    """Yields scope and value of all tensors on the device of a CSX backend.

    Args:
        data_structure: The nest.
        strict: Whether another leaf is an error.
        scope: The scope of the nest itself; None: the top.

    Raises:
        TypeError: `strict` is true, and there is such a leaf.

    Reference: release 2.10, `cerebras.pytorch.utils.nest`.
    """
    return visit_structure(data_structure, _is_lazy, strict, scope)


def visit_device_tensors(
    data_structure: Any, device_type: str, strict: bool = False, scope: Scope | None = None
) -> Iterator[tuple[Scope, torch.Tensor]]:
    """Yields scope and value of all tensors on a type of device.

    Args:
        data_structure: The nest.
        device_type: The type of device, such as "cpu".
        strict: Whether another leaf is an error.
        scope: The scope of the nest itself; None: the top.

    Raises:
        TypeError: `strict` is true, and there is such a leaf.

    Reference: release 2.10, `cerebras.pytorch.utils.nest`.
    """

    def is_there(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == device_type

    return visit_structure(data_structure, is_there, strict, scope)


def recurse_spec(spec: pytree.TreeSpec, scope: Scope | None = None) -> Iterator[Scope]:
    """Yields the scope of each leaf of a tree of torch's pytree, in order.

    Args:
        spec: The structure of the tree.
        scope: The scope of the tree itself; None: the top.

    Reference: release 2.10, `cerebras.pytorch.utils.nest`.
    """
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    for path, _ in pytree.tree_flatten_with_path(tree)[0]:
        yield [*(scope or []), *map(_part, path)]


def map_structure(
    map_fn: Callable[[Scope, Any], Any],
    data_structure: Any,
    select_fn: Callable[[Any], bool],
    scope: Scope | None = None,
) -> Any:
    """Returns the nest with another value for each selected leaf. Leaves are those of torch's pytree.

    Args:
        map_fn: A function of scope and leaf that returns the other value.
        data_structure: The nest.
        select_fn: Whether a leaf is selected.
        scope: The scope of the nest itself; None: the top.

    Reference: release 2.10, `cerebras.pytorch.utils.nest`.
    """

    def map_leaf(path: pytree.KeyPath, value: Any) -> Any:
        return map_fn([*(scope or []), *map(_part, path)], value) if select_fn(value) else value

    return pytree.tree_map_with_path(map_leaf, data_structure)


def map_torch_tensors(
    map_fn: Callable[[Scope, torch.Tensor], Any], data_structure: Any, scope: Scope | None = None
) -> Any:
    """Returns the nest with another value for each tensor.

    Args:
        map_fn: A function of scope and tensor that returns the other value.
        data_structure: The nest.
        scope: The scope of the nest itself; None: the top.

    Reference: release 2.10, `cerebras.pytorch.utils.nest`.
    """
    return map_structure(map_fn, data_structure, _is_tensor, scope)


def map_lazy_tensors(
    map_fn: Callable[[Scope, torch.Tensor], Any], data_structure: Any, scope: Scope | None = None
) -> Any:
    """Returns the nest with another value for each tensor on the device of a CSX backend.

    Args:
        map_fn: A function of scope and tensor that returns the other value.
        data_structure: The nest.
        scope: The scope of the nest itself; None: the top.

    Reference: release 2.10, `cerebras.pytorch.utils.nest`.
    """
    return map_structure(map_fn, data_structure, _is_lazy, scope)


# Names of releases before 1.8.
visit_xla_tensors = visit_lazy_tensors
map_xla_tensors = map_lazy_tensors


def diff(data_structure_1: Any, data_structure_2: Any) -> Iterator[str]:
    """Yields a sentence for each difference of two nests; none if they are equal.

    Args:
        data_structure_1: The first nest.
        data_structure_2: The second nest.

    Reference: release 2.10, `cerebras.pytorch.utils.nest`.
    """
    one, other = (
        {".".join(scope): value for scope, value in visit_structure(nest, _is_leaf)}
        for nest in (data_structure_1, data_structure_2)
    )
    for place in [*one, *(place for place in other if place not in one)]:
        if place not in other:
            yield f"{place or 'the top'} is only in the first"
        elif place not in one:
            yield f"{place or 'the top'} is only in the second"
        elif not _are_equal(one[place], other[place]):
            yield f"{place or 'the top'} differs: {one[place]!r} and {other[place]!r}"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_lazy(value: Any) -> bool:
    return isinstance(value, LazyTensor)


def _is_leaf(value: Any) -> bool:
    visit = find_visit_fn(value)
    return visit is None or next(visit(value), None) is None


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _part(entry: pytree.KeyEntry) -> str:
    match entry:
        case pytree.MappingKey():
            return str(entry.key)
        case pytree.SequenceKey():
            return str(entry.idx)
        case pytree.GetAttrKey():
            return entry.name
    return str(entry)
