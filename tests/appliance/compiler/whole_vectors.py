"""Operations whose results do not depend on where an element lies in its tensor, or a tensor in memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# A multiple of the elements that a loop of torch takes at once, of any type on any processor.
_COPIES = 128


@contextmanager
def whole_vectors() -> Iterator[None]:
    """Context in which torch's results depend on the values of tensors only, to the last bit.

    * Each element of an element-wise operation is computed by the vector code of torch. Otherwise torch computes the
      elements after the last whole vector, and those of strided tensors, by other code, which may round functions such
      as sigmoid otherwise.
    * Other operations, such as products and sums, take copies of their operands with the default strides. Otherwise the
      order in which they add depends on the strides and, in the processor's library, on the alignment.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the parts of several threads may end within a vector
    try:
        with _Copies():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_num_threads(threads)


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types of it
    """A mode in which operations take copies: element-wise ones many of each element, in a last dimension more."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = (args, dict(kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        is_elementwise = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
        names = [argument.name for argument in func._schema.arguments]
        if not is_elementwise or not tensors or any(tensor.numel() == 0 for tensor in tensors):
            # What is viewed or written stays itself.
            kept = {argument.name for argument in func._schema.arguments if argument.alias_info is not None}

            def read(name: str, value: Any) -> Any:
                return value if name in kept else pytree.tree_map_only(torch.Tensor, _copy, value)

            by_position = [read(name, value) for name, value in zip(names, args, strict=False)]
            return func(*by_position, **{name: read(name, value) for name, value in given[1].items()})
        has_dims = any(tensor.dim() for tensor in tensors)
        copied: dict[int, torch.Tensor] = {}

        def copies(tensor: torch.Tensor) -> torch.Tensor:
            if has_dims and not tensor.dim():
                return tensor  # beside others, a tensor of rank 0 is promoted by other rules
            if id(tensor) not in copied:
                copied[id(tensor)] = tensor.unsqueeze(-1).expand(*tensor.shape, _COPIES).contiguous()
            return copied[id(tensor)]

        wide_args, wide_kwargs = pytree.tree_map_only(torch.Tensor, copies, given)
        result = func(*wide_args, **wide_kwargs)
        by_name = {**dict(zip(names, args, strict=False)), **given[1]}
        written = [
            by_name[argument.name]
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in by_name
        ]
        for tensor in written:
            tensor.copy_(copied[id(tensor)][..., 0])
        if written:
            return written[0] if len(written) == 1 else tuple(written)
        return pytree.tree_map_only(torch.Tensor, _first_copies, result)


def _first_copies(wide: torch.Tensor) -> torch.Tensor:
    return _copy(wide[..., 0])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
