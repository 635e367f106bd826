"""Recorder: the recording of one step, as the list of its ATen calls.

Views and in-place operations are recorded as they are; `functional` makes pure functions of them afterwards.
"""

import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from cstorch._internal.tracing import messages
from cstorch._internal.tracing.cell import Cell
from cstorch._internal.tracing.context import context, refuse
from cstorch._internal.tracing.operators import (
    SHAPE_ONLY,
    TAKES_CPU_TENSORS,
    arguments_by_name,
    as_meta,
    aten,
    draws_numbers,
    is_whole,
    operator,
)
from cstorch._internal.tracing.provenance import Scopes, user_line
from cstorch._internal.tracing.random_counter import COUNTER, random_counter
from cstorch._internal.tracing.recording.known_values import KnownValues, Recipe
from cstorch._internal.tracing.recording.operation_checks import HostRandom, check_alias
from cstorch._internal.tracing.recording.state_changes import StateChanges
from cstorch._internal.tracing.recording.trace import Argument, Call, Made, Ref, UnannouncedTensor, refs
from cstorch._internal.tracing.shape_inference import run_on_meta, run_on_zeros
from cstorch._internal.tracing.step_values import settle
from cstorch._internal.tracing.tensor import META, Base, Handle, LazyTensor, cell_of, follow_meta
from cstorch.errors import TraceError
from waferbox.cirh.dialect.source import Source

# A larger CPU tensor in the step becomes a state that never changes, and is not part of the module.
CONSTANT_ELEMENTS = 1024
# The operands of an operation that is run for the shape of its result are at most this large.
_STAND_IN_BYTES = 1 << 28

_numbers = itertools.count(1)

_Argument = TypeVar("_Argument")


class Recorder:
    """The recorder of one step; see StepRecorder. Used by the thread that traces.

    Raises TraceError for calls that cannot be traced.

    states: The getter of each announced state, by name.
    changes: What is told of writes to states before they are recorded.
    """

    def __init__(self, scopes: Scopes, states: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        self.number = next(_numbers)
        self.calls: list[Call] = []
        self.arguments: list[Argument] = []
        self.unannounced: list[UnannouncedTensor] = []
        self.made: list[Made] = []
        self.read_gradients: set[int] = set()
        self.stepped: set[int] = set()
        self.known_values = KnownValues()
        self.scopes = scopes
        self.states = states
        self.changes: list[StateChanges] = []
        self.repeats: list[Callable[[], None]] = []
        self.draws = 0  # the index of the next random operation; a recomputation resets it
        self.counter: LazyTensor | None = None  # the random counter, if the step draws numbers
        self._values = 0
        self._states: dict[int, Argument] = {}
        self._cells: dict[int, Cell] = {}  # of states, by the values that are they or views of them
        self._named: dict[str, Argument] = {}
        self._views: dict[int, tuple[Handle, int]] = {}
        self._constants: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}  # by id and version
        self._host_random = HostRandom()
        self._remade: dict[tuple[int, int], int] = {}  # constants of earlier traces, by trace and value
        self.assumed_constant: dict[int, TraceError] = {}  # by id of a cell: the error if the step changes it
        self._unnamed = 0
        self._large_constants = 0

    # --- Values of the recording --------------------------------------------------------------------------------------

    def add_state(self, name: str, cell: Cell, digest: bytes = b"") -> Argument:
        """Adds a state; a cell with two names keeps the first."""
        known = self._states.get(id(cell))
        if known is None:
            meta = torch.empty(cell.shape, dtype=cell.dtype, device=META)
            known = Argument(kind="state", name=name, value=self._new_value(), meta=meta, cell=cell, digest=digest)
            self._states[id(cell)] = known
            self._cells[known.value] = cell
            self.arguments.append(known)
            self.known_values.add_source(known)
        self._named[name] = known
        return known

    def argument(self, name: str) -> Argument:
        """Returns the state of a name."""
        return self._named[name]

    def add_input(self, name: str, tensor: torch.Tensor) -> LazyTensor:
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device=META)
        argument = Argument(kind="input", name=name, value=self._new_value(), meta=meta)
        self.arguments.append(argument)
        return LazyTensor(Handle(meta, None, self.number, argument.value, Base()))

    def is_state(self, cell: object) -> bool:
        return id(cell) in self._states

    def value_of(self, tensor: LazyTensor) -> int:
        """Returns the number of a tensor's value in this recording; adds an unannounced tensor as a state."""
        handle = tensor._handle
        if handle.trace == self.number:
            return handle.value
        settle(handle)
        cell = handle.cell
        if cell is None:
            return self._remake(tensor)
        state = self._states.get(id(cell))
        if state is None:
            state = self.add_state(f"state.tensors.{self._unnamed}", cell)
            self._unnamed += 1
            self.unannounced.append(UnannouncedTensor(weakref.ref(tensor), repr(tensor), user_line()))
        if handle.meta.dtype != cell.dtype:
            raise TraceError(
                f"{tensor!r} reinterprets the bytes of a tensor of type {cell.dtype}: this is not supported"
            )
        if is_whole(handle.meta, cell):
            return state.value
        known = self._views.get(id(handle))
        if known is None:
            # A view that was made before the step, as a part of its cell.
            meta = handle.meta
            layout = (list(meta.shape), list(meta.stride()), int(meta.storage_offset()))
            source = self.scopes.source("aten::as_strided")
            value = self._new_value()
            self._add_call(Call(aten.as_strided.default, (Ref(state.value), *layout), {}, (value,), source), [meta])
            known = self._views[id(handle)] = (handle, value)
        return known[1]

    def _remake(self, tensor: LazyTensor) -> int:
        """Repeats the calls that made a tensor in an earlier trace, which must depend on constants alone."""
        handle = tensor._handle
        known = self._remade.get((handle.trace, handle.value))
        if known is not None:
            return known
        recipe = handle.recipe
        if not isinstance(recipe, Recipe):
            raise messages.stale(tensor)
        values: dict[int, int] = {}
        for argument, version in zip(recipe.arguments, recipe.versions, strict=True):
            cell = argument.cell
            if cell is None:
                assert argument.constant is not None
                values[argument.value] = self._constant(argument.constant)
                continue
            if cell.changes_in_steps or cell.version != version:
                raise messages.stale(tensor)
            self.assumed_constant[id(cell)] = messages.stale(tensor)
            if id(cell) not in self._states:
                self.add_state(f"state.tensors.{self._unnamed}", cell, argument.digest)
                self._unnamed += 1
            values[argument.value] = self._states[id(cell)].value
        for call in recipe.calls:
            args = call.args
            if call.like is not None:
                like = self._new_value()
                kwargs = {"dtype": call.like.dtype, "device": META}
                empty = Call(aten.empty.memory_format, (list(call.like.shape),), kwargs, (like,), call.source)
                self._add_call(empty, [call.like])
                args = (Ref(like), *args[1:])
                values[like] = like
            results = [None if value is None else values.setdefault(value, self._new_value()) for value in call.results]
            renumbered = _renumbered((args, call.kwargs), values)
            again = replace(call, args=renumbered[0], kwargs=renumbered[1], results=tuple(results))
            self._add_call(again, [handle.meta])  # only the size matters: it bounds the cost of a read
        self._remade[handle.trace, handle.value] = values[handle.value]
        return values[handle.value]

    # --- Calls --------------------------------------------------------------------------------------------------------

    def record(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Records one call on device tensors and returns its result."""
        op = operator(func)
        source = self.scopes.source(op.name)
        if self.scopes.in_forward:
            check_alias(func, args)
        draw = self._next_draw(func, args, kwargs) if op.random else None
        tensors: list[LazyTensor] = []
        recorded = tuple(self._recorded(func, argument, tensors, source) for argument in args)
        recorded_kwargs = {name: self._recorded(func, argument, tensors, source) for name, argument in kwargs.items()}
        metas = tuple(as_meta(argument) for argument in args)
        meta_kwargs = {name: as_meta(argument) for name, argument in kwargs.items()}
        if "device" in kwargs:
            recorded_kwargs["device"] = meta_kwargs["device"] = META
        try:
            out = run_on_meta(func, metas, meta_kwargs)
        except NotImplementedError as error:
            out = _stand_in(func, metas, meta_kwargs, messages.unsupported(func, "it has no rule for shapes."), error)
        except RuntimeError as error:
            if "meta tensor" not in str(error).lower():
                raise
            refusal = messages.unsupported(func, "its result depends on values, which are not known yet.")
            out = _stand_in(func, metas, meta_kwargs, refusal, error)
        for tensor in _written(op.written, op.written_names, args, kwargs, LazyTensor):
            if tensor._handle.cell is None and tensor._handle.trace != self.number:
                raise messages.stale(tensor)
            if tensor._handle.base is not None:
                tensor._handle.base.written = True
            if self.changes and (cell := self._cells.get(self.value_of(tensor))) is not None:
                for changes in self.changes:
                    changes.note_write(cell)
        if op.reshapes:
            follow_meta(tensors[0])
        base = tensors[0]._handle.base if op.views and tensors else None
        results: list[int | None] = []
        wrapped = [self._wrap(meta, tensors, base, results, source) for meta in _results(out)]
        like = metas[0] if func in SHAPE_ONLY else None
        made = [meta for meta, result in zip(_results(out), results, strict=True) if result is not None]
        self._add_call(Call(func, recorded, recorded_kwargs, tuple(results), source, draw, like), made)
        if isinstance(out, (list, tuple)):
            return type(out)(wrapped) if type(out) in (list, tuple) else tuple(wrapped)
        return wrapped[0] if wrapped else out

    def _add_call(self, call: Call, made: Sequence[torch.Tensor]) -> None:
        self.calls.append(call)
        self.known_values.add_call(call, made)
        if operator(call.func).views:
            viewed = next((self._cells[ref.value] for ref in refs(call.args[:1]) if ref.value in self._cells), None)
            if viewed is not None:
                self._cells.update((value, viewed) for value in call.results if value is not None)

    def state_changes(self) -> StateChanges:
        """Returns what the step changes of the states from now on. See StepRecorder."""
        return StateChanges(self.states, self.record, self.changes)

    def check_errors_of(self, info: LazyTensor) -> None:
        """Makes the operation that computed `info` check it, in place of torch's check, which needs the value."""
        value = self.value_of(info)
        for place, call in enumerate(self.calls):
            if value in call.results:
                self.calls[place] = replace(call, kwargs={**call.kwargs, "check_errors": True})

    def known_value(self, tensor: Any, refusal: TraceError | None) -> torch.Tensor | None:
        """Returns the value of a device tensor as a CPU tensor; None if it is not known. See StepRecorder."""
        return self.known_values.compute(self.value_of(tensor), refusal)

    def _next_draw(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """Returns the index of a random operation; None if its arguments switch the draw off."""
        if arguments_by_name(func, args, kwargs).get("generator") is not None:
            refuse(messages.own_generator(func))
        if not draws_numbers(func, args, kwargs):
            return None
        if self.counter is None:
            self.counter = random_counter.tensor()
            self.add_state(COUNTER, cell_of(self.counter))
        self.draws += 1
        return self.draws - 1

    def place(self) -> int:
        """Returns the number of calls that are recorded."""
        return len(self.calls)

    def first_write_since(self, place: int) -> str | None:
        """Returns the line of the first call since a place that writes to a tensor from before it; None: no call."""
        own: set[int] = set()  # values in storages that were made since
        for call in self.calls[place:]:
            op = operator(call.func)
            written = _written(op.written, op.written_names, call.args, call.kwargs, Ref)
            if any(ref.value not in own for ref in written):
                return call.source.place
            if not op.views or all(ref.value in own for ref in refs(call.args[:1])):
                own.update(value for value in call.results if value is not None)
        return None

    def record_host_call(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Records a call that had no device tensor, and has run."""
        self._host_random.add_call(func, args, kwargs, result)

    def _new_value(self) -> int:
        self._values += 1
        return self._values - 1

    def _wrap(
        self, meta: Any, tensors: list[LazyTensor], base: Base | None, results: list[int | None], source: Source
    ) -> Any:
        if not isinstance(meta, torch.Tensor):
            results.append(None)
            return meta
        if meta.layout is not torch.strided:
            raise messages.other_layout(source.op, meta.layout)
        if meta.is_complex():
            refuse(messages.complex_numbers(source.op), source.place)
        for tensor in tensors:
            if tensor._handle.meta is meta:  # written in place: the meta kernel returned its argument
                results.append(None)
                return tensor
        value = self._new_value()
        results.append(value)
        tensor = LazyTensor(Handle(meta, None, self.number, value, base or Base()))
        self.made.append(Made(weakref.ref(tensor), source))
        return tensor

    def _recorded(self, func: OpOverload, argument: Any, tensors: list[LazyTensor], source: Source) -> Any:
        """Returns an argument in its recorded form, and adds the device tensors in it to `tensors`."""
        if isinstance(argument, LazyTensor):
            tensors.append(argument)
            return Ref(self.value_of(argument))
        if isinstance(argument, torch.Tensor):
            if argument.layout is not torch.strided:
                raise messages.other_layout(source.op, argument.layout)
            if argument.dim() and func not in TAKES_CPU_TENSORS:
                refuse(messages.mixed_devices(func, argument.device.type), source.place)
            return Ref(self._constant(argument))
        if isinstance(argument, (list, tuple)):
            return [self._recorded(func, item, tensors, source) for item in argument]
        if isinstance(argument, torch.device):
            return META
        if isinstance(argument, torch.Generator):
            return None
        return argument

    def _constant(self, tensor: torch.Tensor) -> int:
        """Returns the value of a CPU tensor in the step; every step will use its present bytes."""
        key = (
            id(tensor),
            0 if tensor.is_inference() else tensor._version,
        )  # a write of the step makes another constant
        known = self._constants.get(key)
        if known is None:
            if (drawn := self._host_random.line_of(tensor)) is not None:
                refuse(messages.drawn_on_host(drawn))
            if tensor.numel() > CONSTANT_ELEMENTS:
                cell = Cell(tuple(tensor.shape), tensor.dtype)
                cell.write(tensor)
                value = self.add_state(f"state.constants.{self._large_constants}", cell, _digest(tensor)).value
                self._large_constants += 1
            else:
                value = self._new_value()
                name = f"constant_{len(self._constants)}"
                constant = tensor.detach().clone()
                argument = Argument(
                    kind="constant",
                    name=name,
                    value=value,
                    meta=constant.to(META),
                    constant=constant,
                    digest=_digest(constant),
                )
                self.arguments.append(argument)
                self.known_values.add_source(argument)
            # The tensor is kept so that its id is not given to another one during this recording.
            known = self._constants[key] = (tensor, value)
        return known[1]


def _stand_in(
    func: OpOverload, metas: tuple[Any, ...], kwargs: Mapping[str, Any], refusal: TraceError, cause: Exception
) -> Any:
    """Returns a result of the right shape and type of an operation that cannot be traced, if that is only reported.

    Raises:
        TraceError: It is not, or no result can be made.
    """
    tensors = [leaf for leaf in pytree.tree_leaves((metas, kwargs)) if isinstance(leaf, torch.Tensor)]
    is_small = sum(tensor.nbytes for tensor in tensors) <= _STAND_IN_BYTES
    if context.on_refusal is None or operator(func).written or not is_small:
        raise refusal from cause
    try:
        out = run_on_zeros(func, metas, kwargs)
    except Exception:  # noqa: BLE001 - zeros may be no valid operands, as for an inverse
        raise refusal from cause
    refuse(refusal)
    return out


def _renumbered(nest: Any, values: Mapping[int, int]) -> Any:
    if isinstance(nest, Ref):
        return Ref(values[nest.value])
    if isinstance(nest, (list, tuple)):
        return type(nest)([_renumbered(item, values) for item in nest])
    if isinstance(nest, dict):
        return {name: _renumbered(item, values) for name, item in nest.items()}
    return nest


def _digest(tensor: torch.Tensor) -> bytes:
    """Returns a digest of the bytes of a CPU tensor, by which equal tensors are found without a copy of them."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
    return hashlib.blake2b(data.numpy().data, digest_size=16).digest()


def _results(out: Any) -> Iterator[Any]:
    if isinstance(out, (list, tuple)):
        yield from out
    elif out is not None:
        yield out


def _written(
    positions: tuple[int, ...],
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    kind: type[_Argument],
) -> Iterator[_Argument]:
    """Yields the arguments of a kind that a call writes to: its device tensors, or the values in its record."""
    for position, name in zip(positions, names, strict=True):
        argument = args[position] if position < len(args) else kwargs.get(name)
        for item in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(item, kind):
                yield item
