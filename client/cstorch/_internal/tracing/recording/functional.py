"""Turns a recording with views and in-place operations into a graph of pure functions.

By torch's own functionalisation: the recording runs again on functional tensors over meta tensors, and the pure calls
below them become the nodes of the graph.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from cstorch._internal.tracing.context import context
from cstorch._internal.tracing.recording.trace import Argument, Call, Ref
from cstorch._internal.tracing.shape_inference import run_on_meta, run_on_zeros
from waferbox.cirh.dialect.source import Source

# Arguments for the placement of a tensor; the device has one placement.
_PLACEMENT = frozenset({"device", "pin_memory", "layout", "non_blocking"})


def functionalize(arguments: Sequence[Argument], calls: Sequence[Call], outputs: Sequence[int]) -> fx.Graph:
    """Returns the graph that computes `outputs` (values at the end of the recording) from `arguments`.

    States and inputs become placeholders in the given order; small constants become `get_attr` nodes with the CPU
    tensor in meta["constant"]. Each node has its meta tensor in meta["val"] and, if it is an operation, its Source in
    meta["source"]; a random operation has its index among those of the step in meta["draw"]. Nothing else refers to
    the user's objects, and no name in the graph is the user's.
    """
    writer = _Writer()
    env: dict[int, Any] = {}
    for argument in arguments:
        node = (
            writer.graph.create_node("get_attr", argument.name)
            if argument.kind == "constant"
            else writer.graph.placeholder(f"argument_{len(env)}")
        )
        if argument.constant is not None:
            node.meta["constant"] = argument.constant
        # A clone, since functional tensors must be made of tensors that are not part of a recording.
        inner = argument.meta.clone() if argument.kind == "constant" else argument.meta
        writer.bind(inner, node)
        env[argument.value] = torch._to_functional_tensor(inner)
    torch._enable_functionalization(reapply_views=True)
    try:
        with writer, torch.no_grad():
            for call in calls:
                _replay(call, env, writer)
            results = []
            for value in outputs:
                tensor = env[value]
                torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
                results.append(writer.node_of(torch._from_functional_tensor(tensor)))
    finally:
        torch._disable_functionalization()  # type: ignore[no-untyped-call]
    writer.graph.output(tuple(results))
    _remove_dead(writer.graph)
    return writer.graph


def _replay(call: Call, env: dict[int, Any], writer: "_Writer") -> None:
    writer.source, writer.draw = call.source, call.draw
    args = [_resolve(argument, env) for argument in call.args]
    out = call.func(*args, **{name: _resolve(argument, env) for name, argument in call.kwargs.items()})
    items = out if isinstance(out, (list, tuple)) else (out,)
    for value, item in zip(call.results, items, strict=False):
        if value is not None:
            env[value] = item


def _resolve(argument: Any, env: Mapping[int, Any]) -> Any:
    if isinstance(argument, Ref):
        return env[argument.value]
    if isinstance(argument, list):
        return [_resolve(item, env) for item in argument]
    return argument


class _Writer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode that adds a node to the graph for each pure call below functionalisation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.source = Source()
        self.draw: int | None = None
        self._nodes: dict[int, fx.Node] = {}
        self._kept: list[torch.Tensor] = []

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        node.meta["val"] = tensor
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)  # alive, so that its id stays unique

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        return self._nodes[id(tensor)]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would pass each call through torch._dynamo

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        node = self.graph.call_function(
            func,
            tuple(self._recorded(argument) for argument in args),
            {name: self._recorded(argument) for name, argument in kwargs.items() if name not in _PLACEMENT},
        )
        node.meta["source"] = self.source
        if self.draw is not None:
            node.meta["draw"] = self.draw
        if func is torch.ops.aten.view.default:
            # A write to a transposed view leaves its base transposed, which may have no such view.
            args = (args[0].contiguous(), *args[1:])
        try:
            out = run_on_meta(func, args, kwargs)
        except RuntimeError:
            if context.on_refusal is None:
                raise
            out = run_on_zeros(func, args, kwargs)  # the operation was reported when it was recorded
        if isinstance(out, torch.Tensor):
            self.bind(out, node)
        elif isinstance(out, (list, tuple)):
            node.meta["val"] = out
            for index, item in enumerate(out):
                if isinstance(item, torch.Tensor):
                    self.bind(item, self.graph.call_function(operator.getitem, (node, index)))
        return out

    def _recorded(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return self.node_of(argument)
        if isinstance(argument, (list, tuple)):
            return [self._recorded(item) for item in argument]
        return argument


def _remove_dead(graph: fx.Graph) -> None:
    """Removes unused nodes, which is safe because all are pure. Placeholders stay."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
