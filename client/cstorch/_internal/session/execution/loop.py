"""Executions without a traced function: each step is the body of the script's own loop."""

from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any

from cstorch._internal import state
from cstorch._internal.execution import Closure, Executor
from cstorch._internal.log import logged_if_slow
from cstorch._internal.session.cluster_session import Target
from cstorch._internal.session.execution.cluster_execution import ClusterExecution
from cstorch._internal.session.execution.traced_step import TracedStep
from cstorch._internal.tracing import OpenTrace
from cstorch.errors import UsageError


class LoopBody(TracedStep):
    """A step that is the body of the script's loop, up to the next batch or `mark_step`. Every body is recorded."""

    another_program = (
        "the body of the loop did something else in step {step} than in the first step, whose program the cluster "
        "runs. A number that changes (a learning rate, a counter) must be a tensor: use the schedules of "
        "cerebras_torch.optim.lr_scheduler. Add the same step closures in every step, and decide inside of them"
    )

    def __init__(self) -> None:
        super().__init__()
        self._open: OpenTrace | None = None
        self._tracing = ExitStack()  # the context of the open body

    @property
    def is_open(self) -> bool:
        """Whether a body is being recorded."""
        return self._open is not None

    def begin(self, batch: Any) -> Any:
        """Begins the next body; returns its batch."""
        self._begin_recording()
        work = self._tracing.enter_context(logged_if_slow("Tracing the loop's body"))
        self._open = OpenTrace(batch, state.named_getters(), state.module_paths(), work)
        return self._open.batch

    def end(self) -> None:
        """Ends the body."""
        assert self._open is not None
        for closure in self._calls_in_trace:
            self.outputs.add_arguments(closure)
        trace = self._open.finish(None, lambda _: self.outputs.items())
        self._open = None
        self._tracing.close()
        self._end_recording(trace)
        self.calls = self._calls_in_trace

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None
        self._tracing.close()
        super().close()


class LoopExecution(ClusterExecution):
    """One run of a DataExecutor on the cluster, whose steps are bodies of the loop.

    Only the first body is compiled; the others must be the same program.
    """

    def __init__(self, executor: Executor, target: Target) -> None:
        self._body = LoopBody()
        super().__init__(executor, target, self._body)

    @property
    def step_name(self) -> str:
        return "the loop's body"

    def batches(self) -> Generator[Any]:
        try:
            batch = self._begin()
            for _ in range(self.executor.num_steps):
                yield self._body.begin(batch)
                self.mark_step()
        finally:
            self._close()

    def mark_step(self) -> None:
        """Ends the body, if it has not ended: waits for the outputs of the step and runs its closures."""
        if not self._body.is_open:
            return
        step = self.executor.user_iteration
        self._body.end()
        if self._body.text:
            self._body.check_same_program(step)
        else:
            self._launch()
        self._end_step(step)
        if self.executor.on_final_iteration:
            self._finish()  # here, as the script may leave its loop after the last mark_step

    def track(self, result: Any) -> None:
        """Makes the tensors in a nested structure outputs of the step."""
        if self._body.is_open:
            self._body.outputs.add_results(result)

    def run_step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise UsageError(
            "a @cstorch.trace function cannot be called in a loop over a cbtorch.dataloader: its body is the step"
        )

    def call_closure(self, closure: Closure) -> Any:
        if not self._body.is_open and not self._is_in_closure:
            raise UsageError("a step closure was added after mark_step: add it before, its tensors are those of a step")
        return super().call_closure(closure)
