"""Values that a step makes of constants and of what it does not change: they are known while it is traced.

The recording says how they are made, so that nothing is computed before a script reads one. Then the calls that made
it run on the CPU, in the order in which they were recorded, writes and views included.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from cstorch._internal.tracing.cell import Cell
from cstorch._internal.tracing.operators import Operator, operator
from cstorch._internal.tracing.recording.trace import Argument, Call, Made, Ref, refs
from cstorch.errors import TraceError

COMPUTED_BYTES: Final = 256 * 1024 * 1024
"""All that is computed for one read; what needs more is not known."""

_CPU = torch.device("cpu")
_states: "weakref.WeakKeyDictionary[Cell, tuple[int, torch.Tensor]]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Known:
    """A call on nothing but known values. `made` and `written` are the storages that it makes and writes to."""

    call: Call
    read: frozenset[int]
    made: frozenset[int]
    written: frozenset[int]
    nbytes: int


class KnownValues:
    """Which values of a recording are known.

    A storage (a tensor with all its views) is known until something unknown is written to it. States are known as they
    are before the step: reading one, or what is made of one, is right only if the step leaves it as it is, which is
    checked at the end of the recording (`states_read`).

    Attributes:
        states_read: by the cell, the error for having read it or something made of it, should the step change it.
    """

    def __init__(self) -> None:
        self.states_read: dict[Cell, TraceError] = {}
        self._storages: dict[int, int] = {}  # of each value that is or was known: the value that made its storage
        self._known: set[int] = set()
        self._sources: dict[int, Cell | torch.Tensor] = {}
        self._calls: list[_Known] = []

    def add_source(self, argument: Argument) -> None:
        """A value that the recording starts from, and that is no input."""
        source = argument.cell if argument.cell is not None else argument.constant
        assert source is not None
        self._sources[argument.value] = source
        self._add(argument.value, argument.value)

    def note(self, call: Call, results: Sequence[torch.Tensor]) -> None:
        """A call was recorded. results: what it made, without values, one for each value that is new."""
        op = operator(call.func)
        operands = [ref.value for ref in refs((call.args, call.kwargs))]
        written = [self._storages.get(value) for value in _written(op, call)]
        if op.random or not all(self._storages.get(value) in self._known for value in operands):
            self._known.difference_update(storage for storage in written if storage is not None)
            return
        base = self._storages[operands[0]] if op.views and operands else None
        made = []
        for value in call.results:
            if value is not None:
                self._add(value, value if base is None else base)
                made.append(self._storages[value])
        self._calls.append(
            _Known(
                call=call,
                read=frozenset(self._storages[value] for value in operands),
                made=frozenset(made),
                written=frozenset(storage for storage in written if storage is not None),
                nbytes=0 if op.views else sum(result.nbytes for result in results),
            )
        )

    def _add(self, value: int, storage: int) -> None:
        self._storages[value] = storage
        self._known.add(storage)

    def compute(self, value: int, refusal: TraceError | None) -> torch.Tensor | None:
        """What a value is now, as a CPU tensor; None if that is not known.

        refusal: the error for the read, should it be of a state that the step changes; without one no state is known.
        """
        storage = self._storages.get(value)
        if storage not in self._known:
            return None
        needed, calls = {storage}, []
        for known in reversed(self._calls):
            if not needed.isdisjoint(known.made | known.written):
                needed |= known.read
                calls.append(known.call)
        sources = {number: self._sources[number] for number in needed if number in self._sources}
        if refusal is None and any(isinstance(source, Cell) for source in sources.values()):
            return None
        made = sum(known.nbytes for known in self._calls if not needed.isdisjoint(known.made))
        if made + sum(source.nbytes for source in sources.values()) > COMPUTED_BYTES:
            return None
        values: dict[int, torch.Tensor] = {}
        for number, source in sources.items():
            if isinstance(source, Cell) and refusal is not None:
                self.states_read.setdefault(source, refusal)
            values[number] = _state(source) if isinstance(source, Cell) else source.clone()
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            for call in reversed(calls):
                _run(call, values)
        return values[value]


def _state(cell: Cell) -> torch.Tensor:
    """The value of a state, kept for the next recording: while the cluster runs the step, no state can be read."""
    version, value = _states.get(cell, (-1, None))
    if value is None or version != cell.version:
        value = cell.read()
        _states[cell] = cell.version, value
    return value.clone()


def _run(call: Call, values: dict[int, torch.Tensor]) -> None:
    out = call.func(*_on_cpu(call.args, values), **_on_cpu(call.kwargs, values))
    for value, item in zip(call.results, out if isinstance(out, (list, tuple)) else (out,), strict=False):
        if value is not None:
            values[value] = item


def _on_cpu(argument: Any, values: Mapping[int, torch.Tensor]) -> Any:
    match argument:
        case Ref():
            return values[argument.value]
        case torch.device():
            return _CPU
        case dict():
            return {name: _on_cpu(item, values) for name, item in argument.items()}
        case list() | tuple():
            return type(argument)([_on_cpu(item, values) for item in argument])
    return argument


def _written(op: Operator, call: Call) -> Iterable[int]:
    for position, name in zip(op.written, op.written_names, strict=True):
        for ref in refs(call.args[position] if position < len(call.args) else call.kwargs.get(name)):
            yield ref.value


# ----------------------------------------------------------------------------------------------------------------------
# Tensors that a traced step made of constants alone, and that the script keeps: a mask, a table of positions
#
# Plain PyTorch makes them in the first call and uses them in all others. So a later trace that meets such a tensor of
# an
# earlier one makes it again, by the same operations.


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a kept tensor is made: the calls that made it, in order, and what these start from.

    `arguments` are constants, and states that no step has changed, `versions` those of their cells at that time.
    """

    calls: tuple[Call, ...]
    arguments: tuple[Argument, ...]
    versions: tuple[int, ...]


def keep_recipes(made: Iterable[Made], calls: Sequence[Call], arguments: Sequence[Argument]) -> None:
    """Gives each tensor that is still alive its recipe, if it was made of constants alone."""
    alive = [tensor for item in made if (tensor := item.tensor()) is not None and tensor._handle.cell is None]
    if not alive:
        return
    known = _Storages(calls, arguments)
    for tensor in alive:
        tensor._handle.recipe = known.recipe(tensor._handle.value)


class _Storages:
    """Which values of a recording share memory, what was written there, and whether it depends on constants alone."""

    def __init__(self, calls: Sequence[Call], arguments: Sequence[Argument]) -> None:
        self._calls = calls
        self._arguments = {argument.value: argument for argument in arguments}
        self._storage = {argument.value: argument.value for argument in arguments}  # named after their first value
        self._written_by: dict[int, list[int]] = {}  # by storage: places of calls
        self._varies = {
            argument.value
            for argument in arguments
            if argument.kind == "input" or (argument.cell is not None and argument.cell.changes_in_steps)
        }
        for place, call in enumerate(calls):
            self._follow(place, call)

    def _follow(self, place: int, call: Call) -> None:
        op = operator(call.func)
        written = [self._storage[ref.value] for ref in refs([call.args[i] for i in op.written if i < len(call.args)])]
        sources = [self._storage[ref.value] for ref in _operands(call)]
        shares = op.views and sources
        made = []
        for value in call.results:
            if value is not None:
                self._storage[value] = sources[0] if shares else value
                made.append(self._storage[value])
        for storage in (*made, *written):
            self._written_by.setdefault(storage, []).append(place)
        if call.draw is not None or any(storage in self._varies for storage in sources):
            self._varies.update(made, written)

    def recipe(self, value: int) -> Recipe | None:
        """How the value is made; None if it depends on more than constants."""
        places: set[int] = set()
        storages, waiting = set(), [self._storage[value]]
        while waiting:
            storage = waiting.pop()
            if storage in storages:
                continue
            if storage in self._varies:
                return None
            storages.add(storage)
            for place in self._written_by.get(storage, ()):
                places.add(place)
                waiting.extend(self._storage[ref.value] for ref in _operands(self._calls[place]))
        arguments = tuple(self._arguments[storage] for storage in sorted(storages) if storage in self._arguments)
        versions = tuple(argument.cell.version if argument.cell is not None else 0 for argument in arguments)
        return Recipe(tuple(self._calls[place] for place in sorted(places)), arguments, versions)


def _operands(call: Call) -> Iterator[Ref]:
    """What the result of a call depends on, by value."""
    args = call.args if call.like is None else call.args[1:]
    yield from refs((args, list(call.kwargs.values())))
