"""Operations that the recorder refuses or warns of: aliases of weights, and random tensors drawn on the CPU."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from cstorch._internal.tracing import messages
from cstorch._internal.tracing.context import context, refuse
from cstorch._internal.tracing.operators import aten, draws_numbers, operator
from cstorch._internal.tracing.provenance import user_line
from cstorch._internal.tracing.tensor import META, LazyTensor

# --- Explicit aliases of weights --------------------------------------------------------------------------------------

# Functions whose purpose is an alias; others, such as linear, alias a weight internally.
_ALIASING = frozenset(
    {"__get__", "__getitem__", "chunk", "expand", "expand_as", "flatten", "movedim", "moveaxis", "narrow", "permute"}
    | {"reshape", "reshape_as", "select", "split", "squeeze", "swapaxes", "swapdims", "t", "t_", "tensor_split"}
    | {"transpose", "transpose_", "unbind", "unflatten", "unsqueeze", "view", "view_as", "swapaxes_", "squeeze_"}
    | {"unsqueeze_", "as_strided", "diagonal"}
)
_SAME = frozenset({aten.detach.default, aten.alias.default})


@dataclass(slots=True)
class AliasRule:
    """The rule for aliases of weights that are initialised lazily.

    Waferbox needs none. Old releases, with `backend.device.config.lazy_initialization`, refuse explicit aliases in the
    forward pass, and a script that runs here must run there.
    """

    refuses_explicit: bool = False


alias_rule = AliasRule()


def check_alias(func: OpOverload, args: tuple[Any, ...]) -> None:
    """Checks an operation of a forward pass.

    Raises:
        TraceError: It aliases a weight that is initialised lazily, and the rule refuses that.
    """
    if not alias_rule.refuses_explicit or func in _SAME or not args or not isinstance(args[0], LazyTensor):
        return
    cell = args[0]._handle.cell
    if cell is None or cell.initialisation is None or not args[0].requires_grad:
        return
    called = getattr(context.functions[-1], "__name__", "") if context.functions else ""
    op = operator(func)
    if called in _ALIASING and (op.views or op.reshapes):
        refuse(messages.explicit_alias(func, args[0]))


# --- Random tensors of the CPU ----------------------------------------------------------------------------------------


class HostRandom:
    """The CPU tensors of a step that were drawn in it, or computed from such, with the lines that drew them.

    The recording draws them once, so they would be the same in every step. Storages identify tensors, so that views are
    included; they are kept until the recording ends, so that their addresses stay unique.
    """

    def __init__(self) -> None:
        self._drawn: dict[int, tuple[torch.UntypedStorage, str]] = {}

    def add_call(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Adds the results of an operation on the CPU, if they are random."""
        operands = list(_tensors((args, tuple(kwargs.values()))))
        line = user_line() if draws_numbers(func, args, kwargs) else self._first_line(operands)
        if line is None:
            return
        written = operator(func).written
        for tensor in (*_tensors(result), *_tensors([args[index] for index in written if index < len(args)])):
            storage = tensor.untyped_storage()
            self._drawn[storage._cdata] = storage, line

    def line_of(self, tensor: torch.Tensor) -> str | None:
        """Returns the line that drew the values of a CPU tensor; None unless this step drew them."""
        if not self._drawn or tensor.layout is not torch.strided:
            return None
        known = self._drawn.get(tensor.untyped_storage()._cdata)
        return known[1] if known is not None else None

    def _first_line(self, operands: list[torch.Tensor]) -> str | None:
        lines = (self.line_of(tensor) for tensor in operands) if self._drawn else ()
        return next((line for line in lines if line is not None), None)


def _tensors(nest: Any) -> Iterator[torch.Tensor]:
    """Yields the strided CPU tensors in lists and tuples."""
    if isinstance(nest, torch.Tensor):
        if nest.layout is torch.strided and nest.device != META:
            yield nest
    elif isinstance(nest, (list, tuple)):
        for item in nest:
            yield from _tensors(item)
