"""Programs that make the initial value of a state, in a state keeper, or in the client if the value is read there.

A program is a few calls of torch's own operators on flat buffers, so that its result is bitwise equal to that of the
same calls elsewhere on this kind of processor. It may come from the wire: its operators are those of a list, and a dry
run on meta tensors checks every view, shape and size before any memory is allocated.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from waferbox.cirh import CirhError
from waferbox.cirh.dialect import elements
from waferbox.cirh.execution.truncated_normal import TRUNCATED_NORMAL
from wsc.v1 import initialisation_pb2

MAXIMUM_CALLS = 64

_aten = torch.ops.aten
_META = torch.device("meta")
_CPU = torch.device("cpu")

_IN_PLACE_NAMES = """
    normal_.default uniform_.default zero_.default fill_.Scalar fill_.Tensor copy_.default masked_fill_.Scalar
    clamp_.default clamp_min_.default clamp_max_.default tril_.default triu_.default
    mul_.Tensor mul_.Scalar add_.Tensor add_.Scalar sub_.Tensor sub_.Scalar div_.Tensor div_.Scalar
    neg_.default abs_.default erfinv_.default exp_.default log_.default sqrt_.default sin_.default cos_.default
"""
_RESULT_NAMES = """
    arange.default arange.start arange.start_step linspace.default eye.default eye.m
    clone.default _to_copy.default cat.default stack.default tril.default triu.default clamp.default
    mul.Tensor mul.Scalar add.Tensor add.Scalar sub.Tensor sub.Scalar div.Tensor div.Scalar
    neg.default abs.default erfinv.default exp.default log.default sqrt.default rsqrt.default reciprocal.default
    sin.default cos.default
"""


def _operators(names: str) -> dict[str, OpOverload]:
    found = {}
    for name in names.split():
        packet, overload = name.split(".")
        found[f"aten.{name}"] = getattr(getattr(_aten, packet), overload)
    return found


_IN_PLACE = {**_operators(_IN_PLACE_NAMES), str(TRUNCATED_NORMAL): TRUNCATED_NORMAL}
_BY_NAME = {**_IN_PLACE, **_operators(_RESULT_NAMES)}

RANDOM = frozenset({_aten.normal_.default, _aten.uniform_.default, TRUNCATED_NORMAL})
OPERATORS = frozenset(_BY_NAME.values())
"""Operators whose results do not depend on the number of threads."""

_TAKES_DEVICE = frozenset(
    operator for operator in OPERATORS if any(argument.name == "device" for argument in operator._schema.arguments)
)
_NAMED = frozenset({"alpha", "dtype", "rounding_mode", "min", "max"})


def scratch_limit(nbytes: int) -> int:
    """The most bytes that the buffers of a program may have, for a result of `nbytes`."""
    return 8 * nbytes + (64 << 20)


def run(program: initialisation_pb2.InitialProgram, out: torch.Tensor) -> None:
    """Writes the value that a program makes to `out`, a contiguous CPU tensor.

    Raises:
        CirhError: the program may not be run, or makes a tensor of another size or type.
    """
    if program.result >= len(program.buffers):
        raise CirhError("the program has no result")
    result = program.buffers[program.result]
    dtype = elements.element_from_proto(result.element_type)
    if result.elements != out.numel() or dtype != out.dtype:
        raise CirhError(f"the program makes {result.elements} elements of {dtype}, not {out.numel()} of {out.dtype}")
    try:
        # The dry run checks all views and sizes before the second run allocates memory.
        _Run(program, _META, None).all()
        _Run(program, _CPU, out.view(-1)).all()
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        raise CirhError(f"the initialisation cannot be run: {str(error).splitlines()[0]}") from error


class _Run:
    """One run of a program, on memory or dry."""

    def __init__(
        self, program: initialisation_pb2.InitialProgram, device: torch.device, out: torch.Tensor | None
    ) -> None:
        self._program = program
        self._device = device
        self._out = out
        self._buffers: dict[int, torch.Tensor] = {}
        if len(program.calls) > MAXIMUM_CALLS or len(program.buffers) > 2 * MAXIMUM_CALLS:
            raise CirhError(f"a program has at most {MAXIMUM_CALLS} calls and {2 * MAXIMUM_CALLS} buffers")
        sizes = [
            buffer.elements * elements.element_from_proto(buffer.element_type).itemsize for buffer in program.buffers
        ]
        if sum(sizes) > scratch_limit(sizes[program.result]):
            raise CirhError(f"the program's buffers have {sum(sizes)} bytes, which is too much for its result")
        self._last: dict[int, int] = {}  # buffer -> its last call
        for position, call in enumerate(program.calls):
            self._last.update(dict.fromkeys(_used(call), position))

    def all(self) -> None:
        """Runs all calls."""
        program = self._program
        if program.result not in self._last:
            self._buffer(program.result)
        for position, call in enumerate(program.calls):
            self._call(call)
            for number in {number for number in _used(call) if self._last[number] == position} - {program.result}:
                self._buffers.pop(number, None)

    def _call(self, call: initialisation_pb2.InitialCall) -> None:
        operator = _BY_NAME.get(call.operation)
        if operator is None:
            raise CirhError(f"{call.operation!r} is not an operator of initialisation")
        args = [self._argument(argument) for argument in call.arguments if not argument.name]
        kwargs = {argument.name: self._argument(argument) for argument in call.arguments if argument.name}
        if not kwargs.keys() <= _NAMED:
            raise CirhError(f"the arguments {sorted(kwargs)} of {call.operation} are not possible")
        if operator in _TAKES_DEVICE:
            kwargs["device"] = self._device
        if operator in RANDOM:
            kwargs["generator"] = _generator(call.generator)
            if self._device is _META and not call.HasField("result"):
                return  # it changes no shape, and torch would import hundreds of modules for its meta kernel
        made = operator(*args, **kwargs)
        if call.HasField("result") == (call.operation in _IN_PLACE):
            raise CirhError(f"{call.operation} writes its result elsewhere")
        if call.HasField("result"):
            buffer = self._buffer(call.result)
            if made.numel() != buffer.numel() or made.dtype != buffer.dtype:
                raise CirhError(f"{call.operation} makes {made.numel()} elements of {made.dtype}")
            buffer.view(made.shape).copy_(made)

    def _argument(self, argument: initialisation_pb2.InitialArgument) -> Any:
        match argument.WhichOneof("kind"):
            case "view":
                return self._view(argument.view)
            case "views":
                return [self._view(view) for view in argument.views.views]
            case "integers":
                return list(argument.integers.values)
            case "element_type":
                return elements.element_from_proto(argument.element_type)
            case None:
                return None
            case kind:
                return getattr(argument, kind)

    def _view(self, view: initialisation_pb2.BufferView) -> torch.Tensor:
        buffer = self._buffer(view.buffer)
        shape, stride = list(view.shape), list(view.stride)
        if len(shape) != len(stride) or len(shape) > elements.MAXIMUM_RANK or min([*shape, *stride, view.offset]) < 0:
            raise CirhError("a view of a buffer is not possible")
        last = view.offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if 0 not in shape and last >= buffer.numel():
            raise CirhError("a view goes beyond its buffer")
        return buffer.as_strided(shape, stride, view.offset)

    def _buffer(self, number: int) -> torch.Tensor:
        known = self._buffers.get(number)
        if known is None:
            if number >= len(self._program.buffers):
                raise CirhError("a view is of no buffer")
            known = self._buffers[number] = self._new(number, self._program.buffers[number])
        return known

    def _new(self, number: int, buffer: initialisation_pb2.InitialBuffer) -> torch.Tensor:
        dtype = elements.element_from_proto(buffer.element_type)
        if self._device is _META:
            if buffer.value and len(buffer.value) != buffer.elements * dtype.itemsize:
                raise CirhError("the value of a buffer has another size than the buffer")
            return torch.empty(buffer.elements, dtype=dtype, device=_META)
        if number == self._program.result:
            assert self._out is not None
            target = self._out.zero_()
        else:
            target = torch.zeros(buffer.elements, dtype=dtype, device=_CPU)
        if buffer.value:
            target.copy_(torch.frombuffer(bytearray(buffer.value), dtype=dtype))
        return target


def _used(call: initialisation_pb2.InitialCall) -> Iterator[int]:
    """The buffers that a call uses."""
    if call.HasField("result"):
        yield call.result
    for argument in call.arguments:
        if argument.HasField("view"):
            yield argument.view.buffer
        for view in argument.views.views:
            yield view.buffer


def _generator(state: bytes) -> torch.Generator:
    """A generator in the given state; torch refuses bytes that are no state."""
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator
