"""Operations without a lowering of their own, by their parts: torch's tables of decompositions, and ours.

A decomposition is a function of tensors. It is recorded as a step is, so that views and what it writes in place become
pure functions, and its parts are lowered in the operation's place.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._ops import OpOverload

from cirh.dialect.source import Source
from cstorch.lowering.formulas import FORMULAS
from cstorch.tracing import Argument, Call, Ref, functionalize

Decomposition = Callable[..., Any]

_META = torch.device("meta")
# What a decomposition raises that needs values, or has no form for these arguments.
_CANNOT = (RuntimeError, TypeError, ValueError, IndexError, KeyError, NotImplementedError, AssertionError)


def decomposition_of(func: OpOverload) -> Decomposition | None:
    """The function that says what the operation consists of, if there is one.

    There is none of random operations, which would draw other numbers.
    """
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    known = FORMULAS.get(func) or decomposition_table.get(func)
    if known is not None:
        return known
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    return func.decompose if is_composite else None


def parts_of(node: fx.Node, decomposition: Decomposition, source: Source) -> fx.Graph | None:
    """The graph that computes the operation's results from the nodes that it reads; None if there is none.

    Its placeholders are those nodes in order; its results are the tensors among the operation's.
    """
    read = list(node.all_input_nodes)
    arguments = [
        Argument(kind="input", name="", value=number, meta=_like(operand.meta["val"]))
        for number, operand in enumerate(read)
    ]
    references = {operand: Ref(number) for number, operand in enumerate(read)}
    args, named = fx.node.map_arg((node.args, node.kwargs), references.__getitem__)  # type: ignore[arg-type]
    kwargs = dict(named)
    if any(argument.name == "device" for argument in node.target._schema.arguments):  # type: ignore[union-attr]
        kwargs["device"] = _META
    results = [len(read) + number if leaf is not None else None for number, leaf in enumerate(results_of(node))]
    call = Call(decomposition, args, kwargs, tuple(results), source)
    try:
        return functionalize(arguments, [call], [result for result in results if result is not None])
    except _CANNOT:
        return None


def results_of(node: fx.Node) -> list[torch.Tensor | None]:
    """What the operation returns, as meta tensors; None for what is no tensor."""
    made = node.meta["val"]
    listed = made if isinstance(made, (list, tuple)) else [made]
    return [item if isinstance(item, torch.Tensor) else None for item in listed]


def _like(meta: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=_META)
