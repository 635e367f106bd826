"""Executions whose step is a function of the script, marked by cstorch.trace.

The function is traced in its first call; all steps run that trace, with the Python arguments of that call.
"""

import inspect
import itertools
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cstorch import backends
from cstorch._internal import state
from cstorch._internal.batch_objects import LOOKED_AT, ChangedObjects
from cstorch._internal.execution import Executor
from cstorch._internal.log import logged_if_slow
from cstorch._internal.session.cluster_session import Target
from cstorch._internal.session.execution.cluster_execution import ClusterExecution
from cstorch._internal.session.execution.program_check import CheckedPrograms, ProgramCheck, report
from cstorch._internal.session.execution.traced_step import TracedStep
from cstorch._internal.tracing import (
    LazyTensor,
    StepValue,
    Trace,
    enter_loop,
    is_tracing,
    settle,
    trace_step,
    user_line,
)
from cstorch._internal.tracing.provenance import line_of_function
from cstorch.errors import CstorchError, StateError, UsageError

logger = logging.getLogger("cstorch.execution")

_PLAIN = (bool, int, float, str, type(None))


class Arguments:
    """The arguments of the first call of the traced function."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._function = function
        self._first = args, kwargs
        self._leaves, self._structure = self._flatten(args, kwargs)
        self._has_warned = False

    def _flatten(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[pytree.KeyPath, Any]], pytree.TreeSpec]:
        given: Mapping[str, Any]
        try:
            given = inspect.signature(self._function).bind(*args, **kwargs).arguments
        except ValueError:  # a function without a signature
            given = {"args": args, **kwargs}
        leaves, structure = pytree.tree_flatten_with_path(dict(given))
        return leaves, structure

    def by_name(self) -> dict[str, Any]:
        """Returns the first arguments, by the names of the parameters."""
        return {path[0].key + pytree.keystr(path[1:]): value for path, value in self._leaves}  # type: ignore[attr-defined]

    def with_tensors_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the first arguments, with the tensors of a later call."""
        first, structure = pytree.tree_flatten(self._first)
        now, other_structure = pytree.tree_flatten((args, kwargs))
        if structure != other_structure:  # some are given by name now, and were by position, or the other way round
            return args, kwargs
        leaves = [new if isinstance(new, torch.Tensor) else old for old, new in zip(first, now, strict=True)]
        made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, structure)
        return made

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warns, once, of a Python value that differs from the first call.

        Raises:
            TraceError: A Python value differs, and WAFERBOX_STRICT is 1.
            UsageError: The structure of the arguments differs.
        """
        leaves, structure = self._flatten(args, kwargs)
        if structure != self._structure:
            raise UsageError(
                f"at {user_line()} the @cstorch.trace function is called with arguments of another structure than in "
                "the first step, which was traced and is what runs: an execution runs one graph. Use another "
                "DataExecutor for what differs"
            )
        if self._has_warned:
            return
        for (path, first), (_, now) in zip(self._leaves, leaves, strict=True):
            if _differs(first, now):
                self._has_warned = True
                name = path[0].key + pytree.keystr(path[1:])  # type: ignore[attr-defined]
                report(
                    f"at {user_line()} the argument {name!r} of the @cstorch.trace function is {_shown(now)}, and was "
                    f"{_shown(first)} in the first step. The function was traced once, and every step runs with its "
                    "first values: the change is not seen. What changes from step to step must be a tensor of the "
                    "batch, or a tensor that the step updates in place",
                    user_line(),
                )
                return


def _differs(first: Any, now: Any) -> bool:
    if isinstance(first, LazyTensor) and isinstance(now, LazyTensor):
        one, other = first._handle.deferred, now._handle.deferred
        if one is not None and other is not None:
            return not one.is_like(other)
    if isinstance(first, torch.Tensor) or isinstance(now, torch.Tensor):
        return first is not now
    if not isinstance(first, _PLAIN) and not isinstance(now, _PLAIN):
        return False  # objects of any class: whether they are equal is not defined
    return type(first) is not type(now) or (first != now and first == first)  # NaN does not differ from NaN


def _shown(value: Any) -> str:
    return f"another {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)


class TracedFunction(TracedStep):
    """A step that is a function of the script, recorded in its first call; later calls return the same result.

    Args:
        num_steps: The number of steps of the execution.
        checked: What earlier executions have checked.
    """

    another_program = (
        "the @cstorch.trace function did something else in step {step} than in the first step, whose program the "
        "cluster runs. What changes from step to step must be a tensor of the batch, or a tensor that the step updates "
        "in place"
    )

    def __init__(self, num_steps: int, checked: CheckedPrograms) -> None:
        super().__init__()
        self.step_seconds: float | None = None  # the time of a step on the cluster, once it is known
        self.changed_objects: Sequence[ChangedObjects] = ()  # in the batches after the first
        self._num_steps = num_steps
        self._checked = checked
        self._calls_made = 0
        self._check: ProgramCheck | None = None
        self._batch: Any = None  # the first one
        self._function: Callable[..., Any] | None = None
        self._arguments: Arguments | None = None  # of the recorded call
        self._result: Any = None

    @property
    def name(self) -> str:
        """The function, with its line."""
        name = getattr(self._function, "__name__", "the traced function")
        line = "" if self._function is None else line_of_function(self._function)
        return f"{name} ({line})" if line else name

    @property
    def was_called(self) -> bool:
        """Whether the function was called in the current step."""
        return self.at_hand.phase != "before"

    def begin(self, batch: Any) -> Any:
        """Begins the next step; returns the placeholder of its batch, whose values are on the cluster only.

        Args:
            batch: The first batch, whose shapes and types all have.
        """
        self._batch = batch
        self.calls = []
        self.at_hand.begin()
        sources = itertools.count()

        def as_value(tensor: torch.Tensor) -> torch.Tensor:
            meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            return self.at_hand.show(StepValue(step=self.at_hand.number, source=next(sources)), meta)

        return pytree.tree_map_only(torch.Tensor, as_value, batch)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handles a call of the traced function; returns its result, with values of the current step.

        Raises:
            UsageError: The call is of another function, or the second call for one batch.
        """
        if self.was_called:
            raise UsageError(
                f"at {user_line()} the @cstorch.trace function was called twice for one batch: it is one step. Do all "
                "of it in one call"
            )
        self._calls_made += 1
        if self._function is None or self._arguments is None:
            self._function, self._arguments = function, Arguments(function, args, kwargs)
            self._record_first(function, args, kwargs)
        elif self._function is not function:
            raise UsageError(
                f"at {user_line()} a second @cstorch.trace function was called in one execution: an execution runs one "
                "graph. Use another DataExecutor for the other function"
            )
        elif backends.csx.debug.retrace_every_iteration:
            self._record(function, args, kwargs)
        else:
            for tensor in pytree.tree_leaves((args, kwargs)):
                if isinstance(tensor, LazyTensor):
                    self._check_argument(tensor)
            self._arguments.check(args, kwargs)
            if self._check is not None:
                first = self._arguments

                def trace_again() -> Trace:
                    return self._trace_again(*first.with_tensors_of(args, kwargs))

                self._check.check(self._calls_made, self._text, self.step_seconds, trace_again)
                changed, self.changed_objects = self.changed_objects, ()
                for objects in changed:

                    def trace_with(objects: ChangedObjects = objects) -> Trace:
                        given, by_name = first.with_tensors_of(args, kwargs)
                        placed = {name: objects.placed(value) for name, value in by_name.items()}
                        return self._trace_again(tuple(map(objects.placed, given)), placed)

                    if self._check.check_objects(objects, trace_with, trace_again):
                        break
        self.at_hand.phase = "after"
        for repeat in self.trace.repeats:
            repeat()
        self.calls.extend(self._calls_in_trace)
        return self._shown_result()

    def _shown_result(self) -> Any:
        """Returns the result of the function, with values of the current step."""
        shown: dict[int, LazyTensor] = {}

        def show(tensor: LazyTensor) -> LazyTensor:
            if tensor._handle.cell is not None:
                return tensor  # a state, which stays the same object
            if id(tensor) not in shown:
                value = StepValue(step=self.at_hand.number, source=tensor)
                shown[id(tensor)] = self.at_hand.show(value, tensor._handle.meta)
            return shown[id(tensor)]

        return pytree.tree_map_only(LazyTensor, show, self._result)

    def _check_argument(self, tensor: LazyTensor) -> None:
        """Raises UsageError for an argument that is a value of a step, unless it is made of the current batch."""
        settle(tensor._handle)
        value = tensor._handle.deferred
        if value is None:
            return
        if value.step != self.at_hand.number or not all(isinstance(part.source, int) for part in value.sources()):
            raise UsageError(
                f"at {user_line()} the @cstorch.trace function is given a value of step {value.step} in step "
                f"{self.at_hand.number}. The cluster would not receive it: a step has its batch and its states only. "
                "Keep values that steps pass on in a buffer of the model, and update it in the traced function"
            )

    def _record_first(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._arguments is not None
        if self._num_steps == 1:
            self._record(function, args, kwargs)
            return
        self._check = ProgramCheck(function, self._arguments.by_name(), self._num_steps, self._checked)
        began = time.thread_time()
        self._record(function, args, kwargs)
        self._check.traced(self.trace, time.thread_time() - began)

    def _record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begin_recording()
        self._end_recording(self._trace_of(function, args, kwargs))
        self.at_hand.traces = {self.trace.number}
        self.at_hand.states = {id(cell): cell for cell in self.cells.values()}

    def _trace_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        """Returns the trace of another call, which leaves this object unchanged.

        If it is the same program, its outputs become aliases of those of the first trace: the script may have kept
        them.
        """
        assert self._function is not None
        kept = self.outputs, self._calls_in_trace, self._result, self._is_open
        self._begin_recording()
        try:
            trace = self._trace_of(self._function, args, kwargs)
            if kept[0].add_same(self.outputs):
                self.at_hand.traces.add(trace.number)
            return trace
        finally:
            self.outputs, self._calls_in_trace, self._result, self._is_open = kept

    def _trace_of(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        def step(batch: Any) -> Any:
            tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, LazyTensor)]
            inputs = dict(enumerate(tensors))
            self.outputs.set_inputs(tensors)
            taken_args, taken_kwargs = pytree.tree_map_only(
                torch.Tensor, lambda tensor: self._input_of(tensor, inputs), (args, kwargs)
            )
            return function(*taken_args, **taken_kwargs)

        def collect(result: Any) -> Any:
            self._result = result
            for closure in self._calls_in_trace:
                self.outputs.add_arguments(closure)
            self.outputs.add_results(result)
            return self.outputs.items()

        with logged_if_slow(f"Tracing {self.name}") as work:
            return trace_step(step, self._batch, state.named_getters(), state.module_paths(), collect, work)

    def _input_of(self, tensor: torch.Tensor, inputs: Mapping[int, torch.Tensor]) -> Any:
        """Returns the traced value of a tensor argument."""
        if isinstance(tensor, LazyTensor):
            self._check_argument(tensor)
            return tensor if tensor._handle.deferred is None else tensor._handle.deferred.replay(inputs)
        raise UsageError(
            "the @cstorch.trace function was given a CPU tensor that is not part of the executor's batch: the cluster "
            "would use its first value in every step. Pass the batch on unchanged, and transform it in the input_fn or "
            "in the traced function"
        )

    def close(self) -> None:
        super().close()
        self._batch = self._result = self._check = None


class FunctionExecution(ClusterExecution):
    """One run of a DataExecutor on the cluster, with one call of the traced function for each batch."""

    def __init__(self, executor: Executor, target: Target) -> None:
        session = target.session
        checked = session.checked_programs if session is not None else {}  # without a session one step is traced
        self._function = TracedFunction(executor.asked_steps, checked)
        super().__init__(executor, target, self._function)

    @property
    def step_name(self) -> str:
        return self._function.name

    def batches(self) -> Generator[Any]:
        enter_loop(self._function.at_hand)
        try:
            batch = self._begin(LOOKED_AT)
            self._function.changed_objects = self._changed_objects
            for step in range(1, self.executor.num_steps + 1):
                try:
                    yield self._function.begin(batch)
                except GeneratorExit:
                    if self._function.was_called and self.completes_left_step and not self._is_parents:
                        self._complete_left(step)
                    raise
                if not self._function.was_called:
                    raise UsageError("no @cstorch.trace function was called in a step: call it once for each batch")
                self._complete(step)
            self._finish()
        finally:
            enter_loop(None)
            self._close()

    def _complete(self, step: int) -> None:
        """Completes a step whose function was called; the first one is compiled and started before."""
        self._function.at_hand.phase = "closures"
        if step == 1:
            self._launch()
        elif backends.csx.debug.retrace_every_iteration:
            self._function.check_same_program(step)
        self._end_step(step)
        if self._seconds:
            self._function.step_seconds = self._seconds / step

    def _complete_left(self, step: int) -> None:
        """Completes the step after which the script has left its loop, as that has called the function.

        An error here would only be printed, at the end of the generator: it is raised where states are read.
        """
        try:
            self._complete(step)
        except CstorchError as error:
            logger.error("%s", error)
            if self._job is None:
                for name, cell in self._function.cells.items():
                    cell.set_remote(_Unavailable(name, str(error)))

    def run_step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_in_closure or is_tracing():
            raise UsageError("a @cstorch.trace function cannot be called in a closure or in another traced function")
        return self._function.call(function, args, kwargs)


@dataclass(frozen=True, slots=True)
class _Unavailable:
    """The read of a state of a step that has not run; raises StateError."""

    name: str
    reason: str

    def __call__(self) -> Iterator[torch.Tensor]:
        raise StateError(f"the value of {self.name!r} is not available: {self.reason}")
