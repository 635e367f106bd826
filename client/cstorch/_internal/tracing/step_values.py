"""Values of a step in the body of the script's loop: shape and type are known at once, numbers when the step has run.

A step runs when the script has left the body of its loop. Computations in the body on results of the step, on states
and on the batch are stored as expressions, which are evaluated on the CPU when the outputs of the step arrive.
"""

import operator as python_operator
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch._ops import OpOverload

from cstorch._internal.tracing import messages
from cstorch._internal.tracing.cell import Cell
from cstorch._internal.tracing.operators import LIKE, as_meta, is_whole, moves_to_host, operator
from cstorch._internal.tracing.provenance import user_line
from cstorch._internal.tracing.tensor import Base, Handle, LazyTensor, Source, StepValue, new_tensor
from cstorch.errors import StateError, TraceError

# A larger state may not be used in the body of the loop, since it would be sent to the client in every step.
LARGEST_STATE_BYTES = 1 << 20

Phase = Literal["before", "after", "closures"]


@dataclass(slots=True, kw_only=True)
class StepAtHand:
    """The current step of an execution in the script. Used by the script's thread.

    number: From 1; 0 before the first step.
    phase: Before or after the call of the traced function, or while closures run.
    is_last: Whether no other step follows the closures that run.
    traces: The numbers of the recording that the step repeats, and of other recordings of the same program.
    states: The cells that the step reads or changes, by their ids.
    """

    number: int = 0
    phase: Phase = "before"
    is_last: bool = False
    traces: set[int] = field(default_factory=set)
    states: dict[int, Cell] = field(default_factory=dict)
    _shown: list[weakref.ref[LazyTensor]] = field(default_factory=list)

    def begin(self) -> None:
        """Begins the next step."""
        self.number += 1
        self.phase = "before"
        self._shown = []

    def is_state(self, handle: Handle) -> bool:
        """Whether a tensor is a state of the step, whose value is on the cluster."""
        return handle.cell is not None and id(handle.cell) in self.states

    def show(self, value: StepValue, meta: torch.Tensor) -> LazyTensor:
        """Returns a tensor for the script that has this value."""
        tensor = LazyTensor(Handle(meta, deferred=value, base=Base()))
        self.keep(tensor)
        return tensor

    def keep(self, tensor: LazyTensor) -> None:
        """Registers a tensor whose value `evaluate` computes when the step has run."""
        self._shown.append(weakref.ref(tensor))

    def evaluate(self, is_given: Callable[[Source], bool], given: Callable[[Source], torch.Tensor]) -> None:
        """Computes the values of all registered tensors that are alive, as far as the step's outputs suffice."""
        for reference in self._shown:
            tensor = reference()
            value = tensor._handle.deferred if tensor is not None else None
            if value is not None and all(is_given(part.source) for part in value.sources() if part.source is not None):
                value.evaluate(given)
        self._shown = []

    def value_of(self, tensor: LazyTensor) -> StepValue:
        """Returns the present value of a tensor, as an expression of the step.

        Raises:
            TraceError: The value is not available at this point of the loop.
        """
        handle = tensor._handle
        settle(handle)
        if handle.deferred is not None:
            if handle.deferred.step != self.number:
                raise missing_value_error(handle.deferred)
            return handle.deferred
        if handle.cell is None or self.is_state(handle):
            return self._value_of_step(tensor)
        return StepValue(step=self.number, value=_bytes_of(handle).clone())

    def _value_of_step(self, tensor: LazyTensor) -> StepValue:
        """Returns the value of a tensor of the trace, or of a state."""
        handle = tensor._handle
        if handle.cell is None and handle.trace not in self.traces:
            raise TraceError(
                f"at {user_line()} {tensor!r} is used, which was computed in the traced step of another execution: its "
                "value is available inside a @cstorch.step_closure of that execution only"
            )
        if self.phase == "before":
            raise TraceError(
                f"at {user_line()} {tensor!r} is used before the @cstorch.trace function is called in step "
                f"{self.number}: its value is that of a step before, which the cluster has left behind. Use it behind "
                "the call of the traced function, where it has the value of this step"
            )
        if self.phase == "closures":
            raise TraceError(
                f"at {user_line()} a closure uses {tensor!r}, whose value it was not given. Give it to the closure as "
                "an argument: `note(loss, tensor)` instead of reading it in the body of `note`"
            )
        cell = handle.cell
        if cell is None:
            return StepValue(step=self.number, source=tensor)
        if cell.nbytes > LARGEST_STATE_BYTES:
            raise TraceError(
                f"at {user_line()} something is computed of {tensor!r} outside of the traced function: its "
                f"{cell.nbytes} bytes would be sent to the script in every step. Compute it in the @cstorch.trace "
                "function and return the result"
            )
        whole = StepValue(step=self.number, source=new_tensor(cell))
        meta = handle.meta
        if meta.dtype == cell.dtype and is_whole(meta, cell):
            return whole
        layout = (tuple(meta.shape), tuple(meta.stride()), int(meta.storage_offset()))
        return StepValue(step=self.number, call=(torch.ops.aten.as_strided.default, (whole, *layout), {}))


class _CurrentStep(threading.local):
    step: StepAtHand | None = None


_current_step = _CurrentStep()


def step_at_hand() -> StepAtHand | None:
    """Returns the current step of the execution whose loop this thread runs."""
    return _current_step.step


def is_in_body() -> bool:
    """Whether this thread runs the body of a loop, from a batch to the closures of its step."""
    return _current_step.step is not None and _current_step.step.number > 0 and _current_step.step.phase != "closures"


def enter_loop(step: StepAtHand | None) -> None:
    """Sets the step of the loop that this thread enters; None when it leaves the loop."""
    _current_step.step = step


def settle(handle: Handle) -> None:
    """Stores a value that has become known in a cell, so that the tensor is like any other."""
    deferred = handle.deferred
    if deferred is not None and deferred.value is not None:
        handle.cell = Cell(tuple(handle.meta.shape), handle.meta.dtype)
        handle.cell.write(deferred.value)
        handle.meta = torch.empty(handle.cell.shape, dtype=handle.cell.dtype, device="meta")
        handle.deferred = None


def is_of_step(tensor: Any) -> bool:
    """Whether the value of a tensor is one of a step, and not known yet."""
    if not isinstance(tensor, LazyTensor):
        return False
    settle(tensor._handle)
    return tensor._handle.cell is None


def check_known(tensor: torch.Tensor) -> None:
    """Checks that a value can be read or replaced, for code that does so without an operation of torch.

    Raises:
        StateError: The tensor is a state, which is not known in the body of the loop.
        TraceError: The tensor is a value of a step, and not known at this point of the loop.
    """
    if not isinstance(tensor, LazyTensor):
        return
    settle(tensor._handle)
    step = step_at_hand()
    if step is not None and step.phase != "closures" and step.is_state(tensor._handle):
        raise unknown_state(step)
    if tensor._handle.deferred is not None:
        raise unknown_value(tensor._handle.deferred)


_READ_VALUE = """\
A step runs when the script has left the body of its loop. To read a value of it, pass it to a step closure:

    @cstorch.step_closure
    def note(loss, labels):
        losses.append(loss.item())

    for inputs, labels in executor:
        note(training_step(inputs, labels), labels)

A closure has the values of tensors that are its arguments, also in dicts, lists and tuples; those in other objects, \
such as a dataclass, are not found. What the batch holds can also be read in the input_fn."""

_READ_STATE = """\
A step runs when the script has left the body of its loop, so its state is not known before. Read or save it in a \
checkpoint closure, on a checkpoint step, or after the loop:

    @cstorch.checkpoint_closure
    def save():
        cstorch.save({"model": model.state_dict()}, "step.mdl")

    for batch in executor:  # a DataExecutor with checkpoint_steps=...
        training_step(batch)
        save()

For the best weights, save only where the loss of this step, which a step closure has noted before, is the smallest. \
To stop early, call `executor.stop()` in a step closure."""


def unknown_value_yet(step: StepAtHand) -> TraceError:
    """Returns the error for a read of a value of the current step in the body of the loop."""
    return TraceError(f"at {user_line()} a value of step {step.number} is read in the loop. {_READ_VALUE}")


def unknown_state(step: StepAtHand) -> StateError:
    """Returns the error for a read of a state in the body of the loop."""
    return StateError(f"at {user_line()} state is read in the loop, in step {step.number}. {_READ_STATE}")


def unknown_value(value: StepValue) -> TraceError:
    """Returns the error for a read of a value where it is not known."""
    step = step_at_hand()
    return unknown_value_yet(step) if step is not None and step.number == value.step else missing_value_error(value)


def missing_value_error(value: StepValue) -> TraceError:
    """Returns the error for a value of an earlier step that is not known."""
    if any(isinstance(part.source, int) for part in value.sources()):
        why = (
            "it is computed of a tensor of the batch, and such a tensor is sent only where the traced function returns "
            "it too (`return loss, labels`), or a closure gets what is computed of it"
        )
    else:
        why = (
            "the step is no activation step (activation_steps of the DataExecutor), or had no input, or the value is "
            "none that the traced function returned or that a closure was given in the first step. Return it from the "
            "@cstorch.trace function"
        )
    return TraceError(
        f"at {user_line()} a value of step {value.step} is used, which was not sent to the script: {why}; what is "
        "carried from step to step is best computed in the traced function, in a buffer or with cstorch.metrics"
    )


def in_place_refused() -> TraceError:
    """Returns the error for a change of a tensor that the cluster changes itself."""
    return TraceError(
        f"at {user_line()} a tensor of the step is changed in the body of the loop, where the cluster would not see "
        "it. Change state in the @cstorch.trace function, or between executions; for a tensor of your own write "
        "`total = total + loss` instead of `total += loss`"
    )


def changed_in_closure(tensor: LazyTensor) -> StateError:
    """Returns the error for a change of a state in a closure."""
    return StateError(
        f"at {user_line()} the state {tensor!r} is changed in a closure, while the execution goes on: the change would "
        "be lost. Change state in the @cstorch.trace function, or between executions"
    )


def _bytes_of(handle: Handle) -> torch.Tensor:
    assert handle.cell is not None
    data = handle.cell.data()
    if handle.meta.dtype != handle.cell.dtype:
        data = data.view(-1).view(handle.meta.dtype)
    return data.as_strided(handle.meta.shape, handle.meta.stride(), handle.meta.storage_offset())


def host_argument(argument: Any, step: StepAtHand) -> Any:
    """Returns an argument of a call in the form in which the expression stores it."""
    if isinstance(argument, LazyTensor):
        return step.value_of(argument)
    if isinstance(argument, torch.Tensor):
        return argument.detach().clone()
    if isinstance(argument, (list, tuple)):
        return [host_argument(item, step) for item in argument]
    return argument


def shapes_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of a call on meta tensors."""
    return function(*map(as_meta, args), **{name: as_meta(argument) for name, argument in kwargs.items()})


# --- Operations in the body of a loop ---------------------------------------------------------------------------------


def without_values(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of a call, with zeros for an unknown tensor whose value the operation does not read."""
    if func in LIKE and isinstance(args[0], LazyTensor) and _is_unknown(args[0], step_at_hand()):
        return (new_tensor(Cell(tuple(args[0].shape), args[0].dtype)), *args[1:])
    return args


def deferred_result(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of a call with values of a step, as an expression; NotImplemented without such values.

    Raises:
        TraceError: The call needs the values now, or changes a tensor that the cluster changes.
    """
    step = step_at_hand()
    found = [tensor for tensor in _tensors([*args, *kwargs.values()]) if _is_unknown(tensor, step)]
    op = operator(func)
    if op.written and step is not None and step.phase == "closures" and not step.is_last:
        changed = args[op.written[0]] if op.written[0] < len(args) else None
        if isinstance(changed, LazyTensor) and step.is_state(changed._handle):
            raise changed_in_closure(changed)
    if not found or func in LIKE:
        return NotImplemented
    if (op.views or op.reshapes) and found[0]._handle.cell is not None:
        return NotImplemented  # a view of a state reads nothing
    deferred = found[0]._handle.deferred
    if step is None:
        raise messages.stale(found[0]) if deferred is None else unknown_value(deferred)
    if torch._C._current_autograd_node() is not None:
        raise outside_backward()
    if op.reads_values or moves_to_host(func, args, kwargs):
        if found[0]._handle.cell is not None:
            raise unknown_state(step)
        raise unknown_value_yet(step) if deferred is None else unknown_value(deferred)
    if op.random:
        raise TraceError(
            f"at {user_line()} `{op.name}` draws random numbers for a value of the step, in the body of the loop: draw "
            "them in the @cstorch.trace function, or in a step closure"
        )
    if op.written or op.reshapes:
        return _in_place(func, args, kwargs, step)
    try:
        out = shapes_of(func, args, kwargs)
    except NotImplementedError:  # the shape depends on values
        raise unknown_value_yet(step) from None
    value = _call(func, args, kwargs, step)
    if op.views:
        _mark_viewed(args[0])
    if isinstance(out, (list, tuple)):
        parts = [StepValue(step=step.number, call=(python_operator.getitem, (value, i), {})) for i in range(len(out))]
        return type(out)([step.show(part, meta) for part, meta in zip(parts, out, strict=True)])
    return step.show(value, out)


def _call(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], step: StepAtHand) -> StepValue:
    taken = tuple(host_argument(argument, step) for argument in args)
    named = {name: host_argument(argument, step) for name, argument in kwargs.items()}
    return StepValue(step=step.number, call=(func, taken, named))


def _in_place(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], step: StepAtHand) -> Any:
    """Gives a tensor of the body, such as a sum, the new value of an in-place call; no other tensor may share it."""
    target = args[0]
    base = target._handle.base if isinstance(target, LazyTensor) else None
    own = isinstance(target, LazyTensor) and target._handle.trace == 0 and not step.is_state(target._handle)
    if not own or base is None or base.is_viewed or operator(func).written != (0,) or operator(func).reshapes:
        raise in_place_refused()
    shapes_of(func, args, kwargs)
    before = step.value_of(target)
    copied = StepValue(step=step.number, call=(torch.clone, (before,), {}))
    value = _call(func, (target, *args[1:]), kwargs, step)
    assert value.call is not None
    value.call = (func, (copied, *value.call[1][1:]), value.call[2])
    target._handle.cell, target._handle.deferred = None, value
    step.keep(target)
    return target


def _tensors(arguments: list[Any]) -> Iterator[LazyTensor]:
    for argument in arguments:
        for item in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(item, LazyTensor):
                yield item


def _is_unknown(tensor: LazyTensor, step: StepAtHand | None) -> bool:
    """Whether the value of a tensor is one of a step, and not known at this point."""
    handle = tensor._handle
    settle(handle)
    if handle.cell is None:
        return True
    return step is not None and step.phase != "closures" and step.is_state(handle)


def _mark_viewed(tensor: Any) -> None:
    if isinstance(tensor, LazyTensor) and tensor._handle.base is not None:
        tensor._handle.base.is_viewed = True


def outside_backward() -> TraceError:
    """Returns the error for a backward pass in the body of the loop."""
    return TraceError(
        f"at {user_line()} backward() is called outside of the traced function: a step is traced whole, with its "
        "backward pass and the step of the optimizer. Call loss.backward() and optimizer.step() in the @cstorch.trace "
        "function"
    )
