"""An execution whose step is a function of the script, marked by cstorch.trace."""

import time
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cstorch import backends, state
from cstorch.errors import UsageError
from cstorch.execution import Executor
from cstorch.session.execution.arguments import Arguments
from cstorch.session.execution.cluster_execution import ClusterExecution
from cstorch.session.execution.program_check import CheckedProgram, ProgramCheck
from cstorch.session.execution.target import Target
from cstorch.session.execution.traced_step import TracedStep
from cstorch.tracing import LazyTensor, Trace, is_tracing, trace_step, user_line


class TracedFunction(TracedStep):
    """The function is called to record it in the first step; later calls return what that one returned."""

    another_program = (
        "the @cstorch.trace function did something else in step {step} than in the first step, whose program the "
        "cluster runs. What changes from step to step must be a tensor of the batch, or a tensor that the step updates "
        "in place"
    )

    def __init__(self, num_steps: int, checked: set[CheckedProgram]) -> None:
        super().__init__()
        self.was_called = False  # in the step at hand
        self.step_seconds: float | None = None  # what a step takes on the cluster, when that is known
        self._num_steps = num_steps
        self._checked = checked
        self._calls_made = 0
        self._check: ProgramCheck | None = None
        self._batch: Any = None
        self._function: Callable[..., Any] | None = None
        self._arguments: Arguments | None = None  # that it was recorded with
        self._result: Any = None

    def begin(self, batch: Any) -> None:
        """The next step begins, with this batch."""
        self._batch = batch
        self.calls = []
        self.was_called = False

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the traced function.

        Raises:
            UsageError: it is another function, or the second call for one batch.
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
            self._arguments.check(args, kwargs)
            if self._check is not None:
                self._check.check(self._calls_made, self._text, self.step_seconds, self._trace_again)
        self.was_called = True
        self.calls.extend(self._calls_in_trace)
        return self._result

    def _record_first(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._arguments is not None
        if self._num_steps == 1:
            self._record(function, args, kwargs)
            return
        self._check = ProgramCheck(function, self._arguments.by_name(), self._num_steps, self._checked)
        began = time.monotonic()
        self._record(function, args, kwargs)
        self._check.traced(self.trace, time.monotonic() - began)

    def _record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begin_recording()
        self._end_recording(self._trace_of(function, args, kwargs))

    def _trace_again(self) -> Trace:
        """A trace of another call, which is dropped: nothing here is changed by it.

        Should it be the same program, its outputs are known here, as the script may have kept them.
        """
        assert self._function is not None
        assert self._arguments is not None
        kept = self.outputs, self._calls_in_trace, self._result
        self._begin_recording()
        try:
            trace = self._trace_of(self._function, *self._arguments.first)
            if len(self.outputs) == len(kept[0]):
                kept[0].add_same(self.outputs)
            return trace
        finally:
            self.outputs, self._calls_in_trace, self._result = kept

    def _trace_of(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        leaves = pytree.tree_leaves(self._batch)

        def step(batch: Any) -> Any:
            inputs = {
                id(own): traced
                for own, traced in zip(leaves, pytree.tree_leaves(batch), strict=True)
                if isinstance(own, torch.Tensor)
            }
            taken_args, taken_kwargs = pytree.tree_map_only(
                torch.Tensor, lambda tensor: _input_of(tensor, inputs), (args, kwargs)
            )
            return function(*taken_args, **taken_kwargs)

        def collect(result: Any) -> Any:
            self._result = result
            for closure in self._calls_in_trace:
                self.outputs.add_arguments(closure)
            self.outputs.add_results(result)
            return self.outputs.items()

        return trace_step(step, self._batch, state.named_getters(), state.module_paths(), collect)

    def close(self) -> None:
        super().close()
        self._batch = self._result = self._check = None


class FunctionExecution(ClusterExecution):
    """One run of a DataExecutor on the cluster, with one call of the traced function for each batch."""

    def __init__(self, executor: Executor, target: Target) -> None:
        session = target.session
        checked = session.checked_programs if session is not None else set()  # without one a single step is traced
        self._function = TracedFunction(executor.num_steps, checked)
        super().__init__(executor, target, self._function)

    def batches(self) -> Generator[Any]:
        try:
            batch = self._begin()
            for step in range(1, self.executor.num_steps + 1):
                self._function.begin(batch)
                yield batch
                if not self._function.was_called:
                    raise UsageError(
                        "a step went by in which no @cstorch.trace function was called: call it once for each batch"
                    )
                if step == 1:
                    self._launch()
                elif backends.csx.debug.retrace_every_iteration:
                    self._function.check_same_program(step)
                self._end_step(step)
                if self._run is not None and self._run.seconds:
                    self._function.step_seconds = self._run.seconds / step
            self._finish()
        finally:
            self._close()

    def run_step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_in_closure or is_tracing():
            raise UsageError("a @cstorch.trace function cannot be called in a closure or in another traced function")
        return self._function.call(function, args, kwargs)


def _input_of(tensor: torch.Tensor, inputs: dict[int, torch.Tensor]) -> torch.Tensor:
    if isinstance(tensor, LazyTensor):
        return tensor
    traced = inputs.get(id(tensor))
    if traced is None:
        raise UsageError(
            "the @cstorch.trace function was given a CPU tensor that is not part of the executor's batch: the cluster "
            "would never see it change. Hand the batch over as it comes, and transform it in the input_fn or in the "
            "traced function"
        )
    return traced
