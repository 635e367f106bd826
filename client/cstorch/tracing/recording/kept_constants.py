"""Tensors that a traced step made of constants alone, and that the script keeps: a mask, a table of positions.

Plain PyTorch makes them in the first call and uses them in all others. So a later trace that meets such a tensor of an
earlier one makes it again, by the same operations.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cstorch.tracing.operators import operator
from cstorch.tracing.recording.parts import Argument, Call, Made, Ref, refs


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
