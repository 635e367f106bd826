"""Running a module on CPU tensors: a loop over prepared torch calls."""

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from waferbox.cirh.calls.shape import broadcast_view
from waferbox.cirh.dialect.attributes import DenseAttr, SplatAttr
from waferbox.cirh.dialect.operations import Const, body_ops, func_of, return_of
from waferbox.cirh.dialect.spec import Call
from waferbox.cirh.dialect.types import TensorInfo, info, shape
from waferbox.cirh.execution.memory_reuse import memory_reuse, reuses_memory, terms_of_sum
from waferbox.cirh.modules.sources import can_fail
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.table.lookup import build, runtime_operands, spec
from waferbox.cirh.text.parser import parse_module


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation: its call, with the slots of operands and results, and the slots that no later step reads.

    `listed`: the call returns a list of results, even of one. `over`: the operand, by number, over which it writes its
    first result. `adds`: it adds a tensor or a product to its first operand, which has the result's type. `operation`:
    that of the module, of which it is the call; None: it is part of another.
    """

    call: Call
    operands: tuple[int, ...]
    results: tuple[int, ...]
    dead: tuple[int, ...]
    listed: bool = False
    over: int | None = None
    adds: bool = False
    operation: Operation | None = None


# A function, a getter of its operands from the values, the slot of its result (or slots of several), slots to empty.
_Prepared = tuple[Callable[..., Any], Callable[[list[Any]], Any], int | tuple[int, ...], tuple[int, ...]]


def getter(slots: tuple[int, ...]) -> Callable[[list[Any]], Any]:
    """A function that returns the values in these slots of a list, as a sequence."""
    if len(slots) > 1:
        return operator.itemgetter(*slots)
    # A slice gives a list of one, or of none.
    start = slots[0] if slots else 0
    return operator.itemgetter(slice(start, start + len(slots)))


def _reads_scalar_exponent(op: Operation) -> bool:
    return op.name == "cirh.Pow" and isinstance(op.operands[1].owner, Const)


class _Compiler:
    """Gives each value of a module a slot and each operation a step."""

    def __init__(self, module: ModuleOp, overwritable: Collection[int]) -> None:
        self._slots: dict[SSAValue, int] = {}
        self.values: list[Any] = []
        self.steps: list[_Step] = []
        self._scalars: dict[SSAValue, int] = {}
        arguments = list(func_of(module).block.args)
        self._returned = list(return_of(module).operands)
        for argument in arguments:
            self._slots[argument] = self._slot(None)
        needed = self._needed(module)
        self._reuse = memory_reuse(module, needed, self._returned, overwritable)
        self.reuses_memory = reuses_memory(module)
        self._early_joins = {part.join for part in self._reuse.early.values()}
        for op in needed:
            self._add(op)
            for result in op.results:
                if result in self._reuse.early:
                    part = self._reuse.early[result]
                    self._place(part.join, result, part.axis, part.start)
        self.results = tuple(self._whole(value) for value in self._returned)
        # The caller may keep arguments, but the kernel does not.
        self.steps = self._with_last_uses(0 if self.reuses_memory else len(arguments))

    def _needed(self, module: ModuleOp) -> list[Operation]:
        """The operations on which results depend."""
        alive = set(self._returned)
        needed = []
        for op in reversed(body_ops(module)):
            if not isinstance(op, Const) and not alive.isdisjoint(op.results):
                needed.append(op)
                alive.update(runtime_operands(op))
        return needed[::-1]

    def _slot(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _whole(self, value: SSAValue) -> int:
        """The slot of a value in its full shape. Steps for constants and broadcasts are added on the first read."""
        slot = self._slots.get(value)
        if slot is None:
            owner = value.owner
            assert isinstance(owner, Operation)
            if isinstance(owner, Const):
                slot = self._slot(owner.value.tensor())
            else:
                operand = self._whole(owner.operands[0])
                slot = self._slot(None)
                self.steps.append(_Step(build(owner), (operand,), (slot,), ()))
            self._slots[value] = slot
        return slot

    def _scalar(self, value: SSAValue) -> int | None:
        """The slot of a smaller value that a pointwise operation broadcasts to this one; None if there is none."""
        known = self._scalars.get(value)
        owner = value.owner
        if known is not None or not isinstance(owner, Operation):
            return known
        if isinstance(owner, Const):
            constant = owner.value
            if isinstance(constant, SplatAttr) and shape(value):
                known = self._slot(constant.scalar())
        elif owner.name == "cirh.BroadcastInDim":
            known = self._unexpanded(owner)
        if known is not None:
            self._scalars[value] = known
        return known

    def _unexpanded(self, op: Operation) -> int | None:
        operand, result = info(op.operands[0]), info(op.results[0])
        dimensions = op.attributes["broadcast_dimensions"]
        assert isinstance(dimensions, (SplatAttr, DenseAttr))
        view = broadcast_view(operand, result, tuple(dimensions.tensor().tolist()))
        slot = self._whole(op.operands[0])
        if view[len(view) - len(operand.shape) :] == operand.shape:
            return slot
        reshaped = self._slot(None)
        self.steps.append(_Step(Call(lambda x: x.reshape(view)), (slot,), (reshaped,), ()))
        return reshaped

    def _add(self, op: Operation) -> None:
        if op.name == "cirh.BroadcastInDim":
            return  # when it is read
        if op in self._early_joins:
            self._place_rest(op)
            return
        call = build(op)
        operands = runtime_operands(op)
        if spec(op.name).pointwise and shape(op.results[0]):
            slots, call = self._pointwise_operands(op, operands, call)
        else:
            slots = tuple(self._whole(operand) for operand in operands)
        over = None
        if op in self._reuse.written_over and call.out is not None:
            over = slots.index(self._whole(self._reuse.written_over[op]))
        results = tuple(self._slot(None) for _ in op.results)
        self._slots.update(zip(op.results, results, strict=True))
        terms = terms_of_sum(op)
        adds = bool(terms) and all(
            self._slots.get(operand) == slot and operand.type == op.results[0].type
            for operand, slot in zip(terms, slots, strict=False)
        )
        listed = spec(op.name).results != 1
        self.steps.append(_Step(call, slots, results, (), listed=listed, over=over, adds=adds, operation=op))

    def _place_rest(self, join: Operation) -> None:
        """Adds the steps that copy those parts of a joined value to it that were not copied when they were made."""
        axis = next(part.axis for part in self._reuse.early.values() if part.join is join)
        start = 0
        for part in join.operands:
            if part not in self._reuse.early:
                self._place(join, part, axis, start)
            start += shape(part)[axis]

    def _place(self, join: Operation, part: SSAValue, axis: int, start: int) -> None:
        """Adds the step that copies a part of a joined value to its place. The first such step makes the value."""
        (joined,) = join.results
        place = _Place(info(joined), axis, start, shape(part)[axis])
        slot = self._whole(part)
        if joined in self._slots:
            target = self._slots[joined]
            self.steps.append(_Step(Call(place.fill), (target, slot), (target,), ()))
        else:
            target = self._slots[joined] = self._slot(None)
            argument = self._reuse.joined_over.get(join)
            given = (slot,) if argument is None else (slot, self._slots[argument])
            self.steps.append(_Step(Call(place.begin, place.begin), given, (target,), ()))

    def _pointwise_operands(self, op: Operation, operands: list[SSAValue], call: Call) -> tuple[tuple[int, ...], Call]:
        """The smallest operands of which one still has the whole shape."""
        if _reads_scalar_exponent(op):
            constant = op.operands[1].owner
            assert isinstance(constant, Const)
            if isinstance(constant.value, SplatAttr):
                # torch has fast paths for a square and the like, for exponents that are numbers.
                exponent = constant.value.value
                bound = Call(partial(_power, exponent=exponent), partial(_power_out, exponent=exponent))
                return (self._whole(operands[0]),), bound
        small = [self._scalar(operand) for operand in operands]
        # One operand of each element type stays whole, since scalars count less in the result's type.
        for kind in {info(operand).dtype for operand in operands}:
            same = [i for i, operand in enumerate(operands) if info(operand).dtype is kind]
            if all(small[i] is not None for i in same):
                small[same[0]] = None
        slots = tuple(self._whole(o) if s is None else s for o, s in zip(operands, small, strict=True))
        return slots, call

    def _with_last_uses(self, first: int) -> list[_Step]:
        """The steps with the slots that each is the last to read, from `first`."""
        keep = set(self.results)
        steps: list[_Step] = []
        seen: set[int] = set()
        for step in reversed(self.steps):
            made_or_read = [*step.operands, *step.results]
            dead = {
                slot
                for slot in made_or_read
                if slot not in seen and slot not in keep and slot >= first and self.values[slot] is None
            }
            seen.update(made_or_read)
            steps.append(replace(step, dead=tuple(sorted(dead))))
        return steps[::-1]


def _write_over(function: Callable[..., Any], over: int, *operands: Any) -> Any:
    return function(*operands, out=operands[over])


def _write_first_over(
    function: Callable[..., Any], over: int, others: Sequence[torch.Tensor | None], *operands: Any
) -> Any:
    return function(*operands, out=(operands[over], *others))


def _function(step: _Step, places: Mapping[int, torch.Tensor]) -> Callable[..., Any]:
    """The function of a step that writes some results to given tensors. places: these, by number of the result."""
    write, over = step.call.out, step.over
    if write is None or (not places and over is None):
        return step.call.function
    if not step.listed:
        return partial(write, out=places[0]) if over is None or places else partial(_write_over, write, over)
    first, *others = (places.get(number) for number in range(len(step.results)))
    if over is None or first is not None:
        return partial(write, out=(first, *others))
    return partial(_write_first_over, write, over, others)


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a part in a joined value: its begin and size in one dimension."""

    joined: TensorInfo
    axis: int
    start: int
    size: int

    def begin(
        self, part: torch.Tensor, over: torch.Tensor | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Makes the joined value, of which other parts follow: in `out`, over another tensor, or in new memory."""
        target = over if out is None else out
        return self.fill(torch.empty(self.joined.shape, dtype=self.joined.dtype) if target is None else target, part)

    def fill(self, joined: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        joined.narrow(self.axis, self.start, self.size).copy_(part)
        return joined


def _power(x: torch.Tensor, exponent: float) -> torch.Tensor:
    return torch.pow(x, exponent)


def _power_out(x: torch.Tensor, exponent: float, *, out: torch.Tensor) -> torch.Tensor:
    return torch.pow(x, exponent, out=out)


class _Destinations:
    """The tensors that a call writes its results to, with their spans of memory, and the programs that write them."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.tensors = tuple(tensors)
        self.spans = [(i, *span(tensor)) for i, tensor in enumerate(tensors) if tensor is not None]
        self.programs: dict[tuple[int, ...], list[_Prepared]] = {}


class OperationFailed(RuntimeError):
    """Raised for an operation of a kernel that fails for the values of its operands.

    Attributes:
        operation: the name of the operation.
        number: its number among those of this name in the kernel, from 0.
        count: how many of this name the kernel has.
        operands: its operands, with the ranges of their values.
    """

    def __init__(self, error: Exception, operation: str, number: int, count: int, operands: str) -> None:
        super().__init__(str(error))
        self.operation = operation
        self.number = number
        self.count = count
        self.operands = operands


def _range_text(tensor: torch.Tensor) -> str:
    """A tensor with the range of its values."""
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if not tensor.numel() or tensor.is_complex():
        return text
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        return f"{text} with values that are not finite"
    return f"{text} from {tensor.min().item():g} to {tensor.max().item():g}"


# Many layers may share a kernel, each with buffers of its own.
_MAX_DESTINATIONS = 256


class Kernel:
    """A module that can be called on CPU tensors. Used by one thread at a time."""

    def __init__(self, module: ModuleOp, overwritable: Collection[int] = ()) -> None:
        """Prepares the calls.

        Args:
            module: the module.
            overwritable: the inputs, by number, that a module that reuses memory may write over: their memory belongs
                to nothing else, and nothing reads them afterwards.
        """
        self._module = module
        self._variants: dict[tuple[int, ...], Kernel] = {}
        compiler = _Compiler(module, overwritable)
        self.inputs: tuple[TensorInfo, ...] = tuple(info(argument) for argument in func_of(module).block.args)
        self.outputs: tuple[TensorInfo, ...] = tuple(info(value) for value in return_of(module).operands)
        self._steps = compiler.steps
        self._reuses_memory = compiler.reuses_memory
        self._tail = compiler.values[len(self.inputs) :]
        self._results = compiler.results
        # By slot: the step that makes it, and can write to a given tensor, and the number of the step's result.
        self._producers = {
            slot: (index, number)
            for index, step in enumerate(self._steps)
            if step.call.out is not None and (len(step.results) == 1 or step.listed)
            for number, slot in enumerate(step.results)
        }
        self._makers = self._find_makers()
        self._reads = Counter(slot for step in self._steps for slot in step.operands)
        self._no_destinations = _Destinations([None] * len(self.outputs))
        self._destinations: dict[tuple[int, ...], _Destinations] = {}

    @classmethod
    def build(cls, module: ModuleOp | str) -> "Kernel":
        """The kernel of a module or its text, which is verified first. Raises CirhError for an invalid one."""
        if isinstance(module, str):
            module = parse_module(module)
        verify(module)
        return cls(module)

    def writing_over(self, inputs: Sequence[int]) -> "Kernel":
        """The kernel that may write over these inputs, as `overwritable` says."""
        key = tuple(inputs)
        if key not in self._variants:
            self._variants[key] = Kernel(self._module, key)
        return self._variants[key]

    @property
    def direct_results(self) -> frozenset[int]:
        """Results that are written to their given tensors directly; others are made elsewhere and copied there."""
        return frozenset(self._makers)

    def release_destinations(self) -> None:
        """Drops the references to tensors that results were written to."""
        self._destinations.clear()
        for variant in self._variants.values():
            variant.release_destinations()

    def _find_makers(self) -> dict[int, tuple[int, int]]:
        """The results whose last step can write to a given tensor: that step, and the number of its result."""
        makers: dict[int, tuple[int, int]] = {}
        for index, slot in enumerate(self._results):
            if slot in self._producers and self._producers[slot] not in makers.values():
                makers[index] = self._producers[slot]
        return makers

    def _sum_makers(self, maker: tuple[int, int]) -> list[tuple[int, int]]:
        """The steps, up to this one, that make a sum term by term: all can write to the tensor of the sum."""
        makers = [maker]
        while self._steps[makers[-1][0]].adds:
            slot = self._steps[makers[-1][0]].operands[0]
            if slot not in self._producers or self._reads[slot] > 1 or slot in self._results:
                break
            makers.append(self._producers[slot])
        return makers

    def _program(self, destinations: _Destinations, direct: tuple[int, ...]) -> list[_Prepared]:
        """The program in which the steps of the results `direct` write to their given tensors."""
        program = destinations.programs.get(direct)
        if program is None:
            places: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
            for index in direct:
                tensor = destinations.tensors[index]
                assert tensor is not None
                for step, number in self._sum_makers(self._makers[index]):
                    places[step][number] = tensor
            program = destinations.programs[direct] = []
            for position, each in enumerate(self._steps):
                target = each.results if each.listed else each.results[0]
                program.append((_function(each, places[position]), getter(each.operands), target, each.dead))
        return program

    def __call__(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor | None] | None = None
    ) -> list[torch.Tensor]:
        """Runs the module.

        Args:
            inputs: tensors of the arguments' shapes and dtypes. A kernel that reuses memory empties a list of them, so
                that tensors to which the caller has no other reference are freed after their last reader.
            out: for each result the tensor to write it to, which may share memory with inputs, or None.

        Returns:
            The results; `out[i]` where that is given. Other results may be views of inputs or of constants, so they
            must not be written, and are valid until the inputs change.
        """
        self._check(inputs, self.inputs, "input")
        values: list[Any] = [*inputs, *self._tail]
        destinations = self._no_destinations if out is None else self._destinations_of(out)
        direct = () if out is None else self._direct(inputs, destinations)
        if self._reuses_memory and isinstance(inputs, list):
            inputs.clear()
        self._run(self._program(destinations, direct), values)
        if out is None:
            return [values[slot] for slot in self._results]
        return self._copy_rest(values, destinations.tensors, direct)

    def _destinations_of(self, out: Sequence[torch.Tensor | None]) -> _Destinations:
        key = tuple(map(id, out))
        destinations = self._destinations.get(key)
        if destinations is None:
            self._check(out, self.outputs, "out tensor")
            if len(self._destinations) == _MAX_DESTINATIONS:
                self._destinations.clear()
            # The entry keeps the tensors alive, so that no other tensor gets their identities.
            destinations = self._destinations[key] = _Destinations(out)
        return destinations

    def _run(self, program: list[_Prepared], values: list[Any]) -> None:
        operands = None
        try:
            with torch.no_grad():
                for function, operands, target, dead in program:
                    if type(target) is int:
                        values[target] = function(*operands(values))
                    else:
                        assert isinstance(target, tuple)
                        for slot, value in zip(target, function(*operands(values)), strict=True):
                            values[slot] = value
                    for slot in dead:
                        values[slot] = None
        except Exception as error:
            # Each step has a getter of its own.
            failed = next(step for step, each in zip(self._steps, program, strict=True) if each[1] is operands)
            if failed.operation is None or not can_fail(failed.operation):
                raise
            raise self._failure(error, failed.operation, [values[slot] for slot in failed.operands]) from error

    def _failure(self, error: Exception, operation: Operation, operands: Sequence[torch.Tensor]) -> OperationFailed:
        named = [op for op in body_ops(self._module) if op.name == operation.name]
        text = ", ".join(_range_text(operand) for operand in operands)
        return OperationFailed(error, operation.name, named.index(operation), len(named), text)

    def _check(self, tensors: Sequence[torch.Tensor | None], types: tuple[TensorInfo, ...], what: str) -> None:
        if len(tensors) != len(types):
            raise ValueError(f"{len(tensors)} {what}s for a kernel of {len(types)}")
        for index, (tensor, type) in enumerate(zip(tensors, types, strict=True)):
            if tensor is not None and (tensor.dtype is not type.dtype or tensor.shape != type.shape):
                raise ValueError(
                    f"{what} {index} is {tensor.dtype}{list(tensor.shape)}, not {type.dtype}{list(type.shape)}"
                )

    def _direct(self, inputs: Sequence[torch.Tensor], destinations: _Destinations) -> tuple[int, ...]:
        """The results that can be written while the kernel runs, as their tensors share no memory with an input."""
        read = [span(tensor) for tensor in inputs]
        makers = self._makers
        return tuple(
            [
                index
                for index, start, end in destinations.spans
                if index in makers and not [1 for first, last in read if first < end and start < last]
            ]
        )

    def _copy_rest(
        self, values: list[Any], out: Sequence[torch.Tensor | None], direct: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """Copies the other results to their tensors."""
        results = [values[slot] for slot in self._results]
        left = [i for i, tensor in enumerate(out) if tensor is not None and i not in direct]
        spans = [span(tensor) for i in left if (tensor := out[i]) is not None]
        for index in left:
            # A result that is a view of an input is copied before the input is written.
            start, end = span(results[index])
            if any(first < end and start < last for first, last in spans):
                results[index] = results[index].clone()
        with torch.no_grad():
            for index in left:
                target = out[index]
                assert target is not None
                target.copy_(results[index])
        return [result if tensor is None else tensor for tensor, result in zip(out, results, strict=True)]


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of addresses that a tensor lies within."""
    if tensor.is_contiguous():
        start = tensor.data_ptr()
        return start, start + tensor.nbytes
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def clone_views(
    results: list[torch.Tensor], destinations: Sequence[torch.Tensor | None], shown: Sequence[torch.Tensor]
) -> None:
    """Copies the results without a given tensor that share memory with one of `shown`, which others will write."""
    spans = [span(tensor) for tensor in shown]
    for index, (result, destination) in enumerate(zip(results, destinations, strict=True)):
        if destination is None:
            begin, end = span(result)
            if any(first < end and begin < last for first, last in spans):
                results[index] = result.clone()
