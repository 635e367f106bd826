"""Compares two traces of one step: whether they are the same program, and where they begin to differ."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from cstorch._internal.tracing.operators import SHAPE_ONLY, operator
from cstorch._internal.tracing.recording.trace import Argument, Call, Ref, Trace
from waferbox.cirh.dialect.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first operation in which two traces of a step differ.

    source: The source of the operation.
    what: The difference, as the rest of a sentence after "call 2 of the step".
    """

    source: Source
    what: str


def compare(first: Trace, later: Trace) -> Difference | None:
    """Returns the first difference of two traces of a step; None if they are the same program.

    Both must be of one process. Constants are compared by value, states by identity. The order of operations, unused
    operations and the names of outputs do not count.
    """
    numbers = _Numbers()
    if _results(first, numbers) == _results(later, numbers):
        return None
    calls, later_calls = _numbered(first, numbers), _numbered(later, numbers)
    for call, _ in _missing(later_calls, calls, _used(later)):
        partner = next((old for old, _ in _missing(calls, later_calls, _used(first)) if old.func is call.func), None)
        return Difference(source=call.source, what=_description(call, partner, first, later))
    for call, _ in _missing(calls, later_calls, _used(first)):
        return Difference(source=call.source, what=f"would not call `{call.source.op}`, which the first does")
    return Difference(source=Source(), what="takes or returns other tensors than the first")


class _Numbers:
    """The numbers of values, equal for equal values: that of a result follows from its operation and operands."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def __call__(self, *key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _results(trace: Trace, number: _Numbers) -> tuple[dict[Any, int], list[int]]:
    """Returns the numbers of the new value of each changed state, and of the outputs."""
    digests = {argument.name: argument.digest for argument in trace.arguments}
    cells = _cells(trace)
    known: dict[fx.Node, int] = {}
    placeholders = iter([*(("state", cells[id(state.cell)]) for state in trace.states), *enumerate(trace.inputs)])
    results: Sequence[Any] = ()
    for node in trace.graph.nodes:
        match node.op:
            case "placeholder":
                known[node] = number(*next(placeholders))
            case "get_attr":
                known[node] = number("constant", digests[node.target], tuple(node.meta["val"].shape))
            case "output":
                results = [known[result] for result in node.args[0]]
            case _:
                of_node: Callable[[Any], Any] = known.__getitem__
                if node.target in SHAPE_ONLY:
                    of_node = _shape
                args, kwargs = _key(node.args, fx.Node, of_node), _key(node.kwargs, fx.Node, of_node)
                known[node] = number(node.target, args, kwargs, node.meta.get("draw"))
    changed = [cells[id(state.cell)] for state in trace.states if state.changed]
    return dict(zip(changed, results, strict=False)), list(results[len(changed) :])


def _shape(node: fx.Node) -> Any:
    return tuple(node.meta["val"].shape), node.meta["val"].dtype


def _cells(trace: Trace) -> dict[int, Any]:
    """Returns the identity of each state across traces, by the id of its cell."""
    return {id(argument.cell): argument.digest or id(argument.cell) for argument in trace.arguments}


def _key(value: Any, kind: type, of_kind: Callable[[Any], Any]) -> Any:
    """Returns an argument in a form that can be compared, with `of_kind(item)` for each item of type `kind`."""
    if isinstance(value, kind):
        return "value", of_kind(value)
    if isinstance(value, (list, tuple)):
        return tuple(_key(item, kind, of_kind) for item in value)
    if isinstance(value, dict):
        return tuple((name, _key(item, kind, of_kind)) for name, item in sorted(value.items()))
    return type(value), repr(value) if isinstance(
        value, float
    ) else value  # by repr, NaN equals NaN, and 0.0 differs from -0.0


def _numbered(trace: Trace, number: _Numbers) -> list[tuple[Call, int]]:
    """Returns the calls of a recording, used or not, with their numbers."""
    # Not the nodes of the graph, which lacks unused calls: Python may have taken another branch in one of them.
    cells = _cells(trace)
    known = {
        argument.value: number(argument.kind, cells[id(argument.cell)] if argument.cell else argument.digest, index)
        for index, argument in _with_input_indices(trace.arguments)
    }
    numbered = []
    for call in trace.calls:
        args = () if call.func in SHAPE_ONLY else call.args
        key = _key((args, call.kwargs), Ref, lambda ref: known[ref.value])
        own = number(call.func, key, call.draw)
        numbered.append((call, own))
        for index, value in enumerate(call.results):
            if value is not None:
                known[value] = number(own, index)
        written = operator(call.func).written
        for ref in (call.args[index] for index in written if index < len(call.args)):
            if isinstance(ref, Ref):
                known[ref.value] = number(own, "written")
    return numbered


def _with_input_indices(arguments: Iterable[Argument]) -> Iterable[tuple[int, Argument]]:
    """Yields the arguments with their indices among the inputs; 0 for others."""
    index = 0
    for argument in arguments:
        yield index if argument.kind == "input" else 0, argument
        index += argument.kind == "input"


def _missing(
    calls: Sequence[tuple[Call, int]], others: Sequence[tuple[Call, int]], used: set[int]
) -> Iterable[tuple[Call, int]]:
    """Returns the used calls that the others lack."""
    known = {number for _, number in others}
    return ((call, number) for call, number in calls if number not in known and id(call.source) in used)


def _used(trace: Trace) -> set[int]:
    """Returns the ids of the sources of used calls; each call has its own source object."""
    return {id(node.meta["source"]) for node in trace.graph.nodes if "source" in node.meta}


def _description(call: Call, partner: Call | None, first: Trace, later: Trace) -> str:
    name = f"`{call.source.op}`"
    if partner is None:
        return f"would call {name}, which the first does not"
    constants, later_constants = _constants(first), _constants(later)
    pairs = zip(
        _leaves((partner.args, partner.kwargs), constants),
        _leaves((call.args, call.kwargs), later_constants),
        strict=False,
    )
    for old, new in pairs:
        if isinstance(old, (bool, int, float)) and isinstance(new, (bool, int, float)) and repr(old) != repr(new):
            return f"would give {name} the number {new!r}, and the first gives {old!r}"
        if isinstance(old, Argument) and isinstance(new, Argument) and old.digest != new.digest:
            return f"would give {name} a constant tensor of other values than the first"
    return f"would give {name} other operands than the first"


def _constants(trace: Trace) -> Mapping[int, Argument]:
    return {argument.value: argument for argument in trace.arguments if argument.digest}


def _leaves(nest: Any, constants: Mapping[int, Argument]) -> list[Any]:
    if isinstance(nest, (list, tuple)):
        return [leaf for item in nest for leaf in _leaves(item, constants)]
    if isinstance(nest, dict):
        return [leaf for item in nest.values() for leaf in _leaves(item, constants)]
    if isinstance(nest, Ref) and nest.value in constants:
        argument = constants[nest.value]
        return [
            argument.constant.item() if argument.constant is not None and argument.constant.numel() == 1 else argument
        ]
    return [nest]
