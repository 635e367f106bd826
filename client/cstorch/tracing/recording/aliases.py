"""Explicit aliases of weights, which lazy initialisation forbids where a script asks for it as in older releases."""

from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from cstorch.tracing import messages
from cstorch.tracing.context import context
from cstorch.tracing.operators import aten, operator
from cstorch.tracing.tensors.tensor import LazyTensor

# Functions that are called to get an alias; others, such as linear, alias a weight for their own use.
_ALIASING = frozenset(
    {"__get__", "__getitem__", "chunk", "expand", "expand_as", "flatten", "movedim", "moveaxis", "narrow", "permute"}
    | {"reshape", "reshape_as", "select", "split", "squeeze", "swapaxes", "swapdims", "t", "t_", "tensor_split"}
    | {"transpose", "transpose_", "unbind", "unflatten", "unsqueeze", "view", "view_as", "swapaxes_", "squeeze_"}
    | {"unsqueeze_", "as_strided", "diagonal"}
)
_SAME = frozenset({aten.detach.default, aten.alias.default})


@dataclass(slots=True)
class AliasRule:
    """`refuses_explicit`: the forward pass may not alias a weight that is initialised lazily.

    Nothing here needs that. The releases in which a script asks for lazy initialisation by `backend.device.config` have
    this limitation, and a script that runs here must run there.
    """

    refuses_explicit: bool = False


alias_rule = AliasRule()


def check_alias(func: OpOverload, args: tuple[Any, ...]) -> None:
    """To be called for each operation of a forward pass.

    Raises:
        TraceError: it aliases a weight that is initialised lazily, where that is refused.
    """
    if not alias_rule.refuses_explicit or func in _SAME or not args or not isinstance(args[0], LazyTensor):
        return
    cell = args[0]._handle.cell
    if cell is None or cell.initialisation is None or not args[0].requires_grad:
        return
    called = getattr(context.functions[-1], "__name__", "") if context.functions else ""
    op = operator(func)
    if called in _ALIASING and (op.views or op.reshapes):
        raise messages.explicit_alias(func, args[0])
