"""Helpers for the tests of tracing and lowering: run a functional graph on CPU tensors."""

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from xdsl.dialects.builtin import ModuleOp

from cstorch._internal.tracing import LazyTensor, Trace, move_module, trace_step
from waferbox.cirh.execution.kernel import Kernel

Getter = Callable[[], torch.Tensor]
Step = Callable[[Any], Any]
Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def linear() -> tuple[nn.Linear, nn.Linear]:
    """A linear layer on the tracing device, and the same as it was."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    reference = copy.deepcopy(model)
    move_module(model)
    return model, reference


def states_of(**holders: nn.Module | Getter) -> dict[str, Getter]:
    """Named getters of modules ("model=m") and of plain functions ("count=lambda: t")."""
    getters: dict[str, Getter] = {}
    for prefix, holder in holders.items():
        if isinstance(holder, nn.Module):
            for name, _ in holder.named_parameters():
                getters[f"state.{prefix}.{name}"] = partial(holder.get_parameter, name)
            for name, _ in holder.named_buffers():
                getters[f"state.{prefix}.{name}"] = partial(holder.get_buffer, name)
        else:
            getters[f"state.{prefix}"] = holder
    return getters


def names_of(module: nn.Module) -> dict[nn.Module, str]:
    return {child: name for name, child in module.named_modules()}


def outputs_of(result: object) -> list[tuple[str, torch.Tensor]]:
    leaves = torch.utils._pytree.tree_leaves(result)
    return [(f"output_{i}", leaf) for i, leaf in enumerate(leaf for leaf in leaves if isinstance(leaf, LazyTensor))]


def trace(
    step: Step, batch: object, states: Mapping[str, Getter] | None = None, model: nn.Module | None = None
) -> Trace:
    return trace_step(step, batch, states or {}, names_of(model) if model is not None else {}, outputs_of)


def trace_behind_linear(step: Callable[[torch.Tensor], object]) -> Trace:
    """Traces a step that gets the output of a linear layer."""
    model = nn.Linear(4, 3)
    move_module(model)
    return trace(lambda x: step(model(x)), X, states_of(model=model), model)


def interpret(graph: fx.Graph, arguments: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    values: dict[fx.Node, Any] = {}
    arguments = iter(arguments)
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = next(arguments)
            elif node.op == "get_attr":
                values[node] = node.meta["constant"]
            elif node.op == "output":
                return [values[result] for result in node.args[0]]
            else:
                args = fx.node.map_arg(node.args, values.get)
                kwargs = fx.node.map_arg(node.kwargs, values.get)
                assert node.target is operator.getitem or not node.target._schema.is_mutable
                values[node] = node.target(*args, **kwargs)
    raise AssertionError("a graph without outputs")


class Runner:
    """Runs a traced step again and again on its own copy of the state."""

    def __init__(self, trace: Trace, run: Run | None = None) -> None:
        self.trace = trace
        self.run: Run = run or (lambda arguments: interpret(trace.graph, arguments))
        self.state = {state.name: state.cell.read() for state in trace.states}

    def step(self, batch: object) -> Sequence[torch.Tensor]:
        inputs = [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        results = self.run([*(self.state[state.name] for state in self.trace.states), *inputs])
        changed = [state.name for state in self.trace.states if state.changed]
        self.state.update(zip(changed, (result.clone() for result in results), strict=False))
        return results[len(changed) :]


def run_module(module: ModuleOp | str) -> Kernel:
    """A function of all arguments of a CIRH module."""
    return Kernel.build(module)
