"""Values that a step makes of constants and of states that it does not change: they are known while it is traced.

Nothing is computed until a script reads such a value. Then the recorded calls that made it run on the CPU, in their
order, with their writes and views.
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

# A value whose computation needs more memory counts as unknown.
COMPUTED_BYTES: Final = 256 * 1024 * 1024

_CPU = torch.device("cpu")
_states: "weakref.WeakKeyDictionary[Cell, tuple[int, torch.Tensor]]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Known:
    """A call on known values only. `read`, `made` and `written` are the storages that it reads, makes and writes to."""

    call: Call
    read: frozenset[int]
    made: frozenset[int]
    written: frozenset[int]
    nbytes: int


class KnownValues:
    """The known values of a recording. Used by the thread that traces.

    A storage (a tensor with all its views) is known until an unknown value is written to it. A state has its value from
    before the step. A read of it, or of a value made from it, is right only if the step does not change the state; the
    end of the recording checks that.

    states_read: For the cell of each state that was read, the error if the step changes it.
    """

    def __init__(self) -> None:
        self.states_read: dict[Cell, TraceError] = {}
        self._storages: dict[int, int] = {}  # of each value that is or was known: the value that made its storage
        self._known: set[int] = set()
        self._sources: dict[int, Cell | torch.Tensor] = {}
        self._calls: list[_Known] = []

    def add_source(self, argument: Argument) -> None:
        """Adds a value that the recording starts from, and that is no input."""
        source = argument.cell if argument.cell is not None else argument.constant
        assert source is not None
        self._sources[argument.value] = source
        self._add(argument.value, argument.value)

    def add_call(self, call: Call, results: Sequence[torch.Tensor]) -> None:
        """Adds a recorded call; `results` are meta tensors, one for each new value."""
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
        """Returns the present bytes of a value as a CPU tensor; None if they are not known.

        Args:
            value: The number of the value.
            refusal: The error if the value depends on a state that the step changes; with None no state is read.
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
    """Returns the value of a state, cached for later recordings: no state can be read while the cluster runs."""
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


# --- Recipes ----------------------------------------------------------------------------------------------------------
#
# A model may keep a tensor that its first call made of constants, such as a mask or a table of positions. A later trace
# that uses it makes it again, by the same operations.


@dataclass(frozen=True, slots=True)
class Recipe:
    """The calls that made a kept tensor, in order, and the values that they start from.

    arguments: Constants, and states that no step has changed.
    versions: The versions of their cells at that time.
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
    """The storages of a recording: their values, the calls that write to them, and whether they are constant."""

    def __init__(self, calls: Sequence[Call], arguments: Sequence[Argument]) -> None:
        self._calls = calls
        self._arguments = {argument.value: argument for argument in arguments}
        self._storage = {argument.value: argument.value for argument in arguments}  # named after their first value
        self._written_by: dict[int, list[int]] = {}  # by storage: indices of calls
        self._varies = {
            argument.value
            for argument in arguments
            if argument.kind == "input" or (argument.cell is not None and argument.cell.changes_in_steps)
        }
        for index, call in enumerate(calls):
            self._follow(index, call)

    def _follow(self, index: int, call: Call) -> None:
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
            self._written_by.setdefault(storage, []).append(index)
        if call.draw is not None or any(storage in self._varies for storage in sources):
            self._varies.update(made, written)

    def recipe(self, value: int) -> Recipe | None:
        """Returns the recipe of a value; None if it depends on more than constants."""
        indices: set[int] = set()
        storages, waiting = set(), [self._storage[value]]
        while waiting:
            storage = waiting.pop()
            if storage in storages:
                continue
            if storage in self._varies:
                return None
            storages.add(storage)
            for index in self._written_by.get(storage, ()):
                indices.add(index)
                waiting.extend(self._storage[ref.value] for ref in _operands(self._calls[index]))
        arguments = tuple(self._arguments[storage] for storage in sorted(storages) if storage in self._arguments)
        versions = tuple(argument.cell.version if argument.cell is not None else 0 for argument in arguments)
        return Recipe(tuple(self._calls[index] for index in sorted(indices)), arguments, versions)


def _operands(call: Call) -> Iterator[Ref]:
    """Yields the arguments whose values the result of a call depends on."""
    args = call.args if call.like is None else call.args[1:]
    yield from refs((args, list(call.kwargs.values())))
