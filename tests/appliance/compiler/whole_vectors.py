"""Element-wise operations whose results do not depend on where an element lies in its tensor."""

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
    """Context in which each element of an element-wise operation is computed by the vector code of torch.

    Otherwise torch computes the elements after the last whole vector, and those of strided tensors, by other code. It
    may round functions such as sigmoid otherwise.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the parts of several threads may end within a vector
    try:
        with _Copies():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_num_threads(threads)


class _Copies(TorchDispatchMode):
    """A mode in which element-wise operations have a last dimension more, of copies of each element."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = (args, dict(kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        is_elementwise = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
        if not is_elementwise or not tensors or any(tensor.numel() == 0 for tensor in tensors):
            return func(*given[0], **given[1])
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
        names = [argument.name for argument in func._schema.arguments]
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
    return wide[..., 0].clone(memory_format=torch.contiguous_format)
