"""Tensors that a batch hides in objects of a script's classes, such as a dataclass or a subclass of dict.

For torch's pytree such an object is one leaf, so that a traced step would have the tensors of the first batch.
"""

import types
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

_ATOMS: Final = (type, types.ModuleType, types.FunctionType, types.MethodType, str, bytes, int, float, complex)
_SEQUENCES: Final = (list, tuple, set, frozenset, deque)


def hides_tensors(leaf: Any) -> bool:
    """Whether a leaf, which is no tensor itself, has some in its fields or items, or in what these hold.

    Modules have parameters, and are not searched.
    """
    import torch

    known = {id(leaf): leaf}  # objects by their ids, which are theirs while they live
    ahead = [leaf]
    while ahead:
        for part in _parts(ahead.pop()):
            if isinstance(part, torch.Tensor):
                return True
            if id(part) not in known:
                known[id(part)] = part
                ahead.append(part)
    return False


def _parts(value: Any) -> Iterator[Any]:
    """Yields what an object holds; nothing for atoms."""
    import numpy as np
    import torch

    if value is None or isinstance(value, (*_ATOMS, torch.Tensor, torch.nn.Module, np.ndarray)):
        return
    if isinstance(value, dict):
        yield from dict.values(value)  # whatever the class has in the place of dict's methods
    elif isinstance(value, _SEQUENCES):
        base: Any = next(base for base in _SEQUENCES if isinstance(value, base))
        yield from base.__iter__(value)
    yield from _fields(value)


def _fields(value: Any) -> Iterator[Any]:
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from dict.values(attributes)
    for base in type(value).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and name != "__dict__":
                try:
                    yield member.__get__(value, type(value))
                except AttributeError:  # a slot without a value
                    continue
