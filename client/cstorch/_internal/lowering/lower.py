"""Lowers a traced step to a CIRH module: `lower`."""

import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from cstorch._internal.lowering.context import Lowering, Result
from cstorch._internal.lowering.decompose import decomposition_of, parts_of, results_of
from cstorch._internal.lowering.table import rule_for
from cstorch._internal.lowering.verbatim import verbatim
from cstorch._internal.tracing import COUNTER, Trace
from cstorch._internal.tracing.context import context, refuse
from cstorch._internal.tracing.messages import OTHER_DRAWS
from cstorch.errors import CompileError
from waferbox.cirh import CirhError
from waferbox.cirh.dialect import elements, types
from waferbox.cirh.dialect.source import Source
from waferbox.cirh.dialect.spec import OpSpec
from waferbox.cirh.table.lookup import spec


def lower(trace: Trace) -> ModuleOp:
    """Returns the step as one CIRH module.

    Its arguments are the states and then the inputs of the trace; its results are the new values of the changed states,
    each an alias of its argument, and then the outputs.

    Raises:
        CompileError: An operation has no lowering; the message has the user's line and a way out.
    """
    lowering = Lowering()
    placeholders = iter(node for node in trace.graph.nodes if node.op == "placeholder")
    for state in trace.states:
        kind = types.tensor_type(state.cell.shape, state.cell.dtype)
        argument = lowering.values[next(placeholders)] = lowering.builder.argument(kind, state=state.name)
        if state.name == COUNTER:
            lowering.counter = argument
    for item in trace.inputs:
        kind = types.tensor_type(item.shape, item.dtype)
        lowering.values[next(placeholders)] = lowering.builder.argument(kind, input=item.name)
    results = _lower_graph(lowering, trace.graph)
    _check_outputs(trace, trace.graph.output_node().args[0][-len(trace.outputs) :] if trace.outputs else ())  # type: ignore[index, arg-type]
    changed = [index for index, state in enumerate(trace.states) if state.changed]
    names = [*(None for _ in changed), *(output.name for output in trace.outputs)]
    aliases = {argument: result for result, argument in enumerate(changed)}
    return lowering.builder.finish(list(zip(results, names, strict=True)), aliases)


def _lower_graph(lowering: Lowering, graph: fx.Graph) -> list[SSAValue]:
    """Lowers a graph whose placeholders have values; returns the values of its results."""
    results: list[SSAValue] = []
    for node in graph.nodes:
        if node.op == "get_attr":
            lowering.values[node] = lowering.builder.dense(node.meta["constant"])
        elif node.op == "call_function":
            lowering.values[node] = _lower(lowering, node)
        elif node.op == "output":
            results = [lowering.value(result) for result in node.args[0]]
    return results


def _lower(lowering: Lowering, node: fx.Node) -> Result:
    func = node.target
    if func is operator.getitem:
        values, index = lowering.values[node.args[0]], node.args[1]  # type: ignore[index]
        assert isinstance(values, tuple)
        assert isinstance(index, int)
        return values[index]
    assert isinstance(func, OpOverload)
    if context.on_refusal is not None and any(map(_is_complex, (node, *node.all_input_nodes))):
        return _stand_in(lowering, node)  # the trace has reported it
    lowering.source = node.meta.get("source", Source())
    try:
        rule = rule_for(func)
        if rule is not None:
            result = rule(lowering, node)
        else:
            row = _row(func)
            result = verbatim(lowering, node, row) if row is not None else _lower_parts(lowering, node, func)
    except CirhError as error:
        raise CompileError(str(error)) from error
    except CompileError as error:
        if lowering.taken_apart or context.on_refusal is None:
            raise
        refuse(error, node.meta.get("source", Source()).place)
        return _stand_in(lowering, node)
    _check(node, result)
    return result


def _stand_in(lowering: Lowering, node: fx.Node) -> Result:
    """Returns zeros for the results of an operation that cannot be lowered, which is only reported."""
    expected = node.meta["val"]
    zeros = tuple(lowering.splat(0, tensor.shape, tensor.dtype.to_real()) for tensor in _tensors(node))
    return zeros[0] if isinstance(expected, torch.Tensor) else zeros


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """Returns the results of a node, on the meta device."""
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def _is_complex(node: fx.Node) -> bool:
    return any(tensor.is_complex() for tensor in _tensors(node))


def _lower_parts(lowering: Lowering, node: fx.Node, func: OpOverload) -> Result:
    """Lowers an operation by its parts. Raises CompileError if it has none, or a part cannot be lowered."""
    decomposition, source = decomposition_of(func), lowering.source
    graph = None
    if decomposition is not None and func not in lowering.taken_apart:
        graph = parts_of(node, decomposition, source)
    if graph is None:
        raise _no_lowering(lowering, func)
    placeholders = [inner for inner in graph.nodes if inner.op == "placeholder"]
    lowering.values.update(zip(placeholders, map(lowering.value, node.all_input_nodes), strict=True))
    lowering.taken_apart.append(func)
    try:
        made = _lower_graph(lowering, graph)
    except CompileError as error:
        lowering.source = source
        raise _no_lowering(lowering, func) from error
    finally:
        lowering.taken_apart.pop()
    if isinstance(node.meta["val"], torch.Tensor):
        return made[0]
    # A result that a mask of the operation switched off is not used: any other result may stand for it.
    values = iter(made)
    return tuple(made[0] if tensor is None else next(values) for tensor in results_of(node))


def _row(func: OpOverload) -> OpSpec | None:
    """Returns the row of CIRH's table with the name of the operation; None if there is none."""
    name = str(func).removesuffix(".default")
    try:
        return spec(name)
    except CirhError:
        return None


def _no_lowering(lowering: Lowering, func: OpOverload) -> CompileError:
    name = f"`{func._schema.name}`"
    if "linear_cross_entropy" in name:
        way_out = "Write it as torch.nn.functional.linear and cross_entropy, which the compiler takes as they are."
        return lowering.unsupported(name, way_out)
    if name == "`aten::_grouped_mm`":
        way_out = (
            "To send tokens to experts, multiply with the chosen experts' weights as a batch, as most mixtures of "
            "transformers 5 do here."
        )
        return lowering.unsupported(name, way_out)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return lowering.unsupported(name, OTHER_DRAWS)
    return lowering.unsupported(
        f"{name} ({func})",
        "Write it with other torch operations, or compute it in the input_fn (from the batch) or in a step closure "
        "(from the step's outputs).",
    )


def _check_outputs(trace: Trace, outputs: Sequence[fx.Node]) -> None:
    """Raises CompileError for an output whose type cannot be sent."""
    for output, node in zip(trace.outputs, outputs, strict=True):
        try:
            elements.element_to_proto(node.meta["val"].dtype)
        except CirhError as error:
            raise CompileError(f"{node.meta.get('source', Source())}: {output.name} is an output; {error}") from error


def _check(node: fx.Node, result: Result) -> None:
    """Asserts that the emitted values have the shapes and types of torch's results."""
    expected = node.meta["val"]
    pairs = zip(expected, result, strict=False) if isinstance(result, tuple) else ((expected, result),)
    for tensor, value in pairs:
        if isinstance(tensor, torch.Tensor) and types.info(value) != (tuple(tensor.shape), tensor.dtype):
            raise AssertionError(f"{node.meta.get('source')}: {node.target} was lowered to {value.type}, not {tensor}")
