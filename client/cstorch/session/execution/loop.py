"""An execution without a traced function: each step is the body of the script's own loop."""

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from cstorch import state
from cstorch.errors import UsageError
from cstorch.execution import Closure
from cstorch.session.execution.csx import CsxExecution
from cstorch.session.execution.outputs import Outputs
from cstorch.session.execution.step_checks import check_habits
from cstorch.tracing import OpenTrace

if TYPE_CHECKING:
    from cstorch.backend import CsxBackend
    from cstorch.utils.data.executor import DataExecutor


class LoopExecution(CsxExecution):
    """Records all that the script does from one batch to the next, or to `mark_step`.

    Every body is recorded, though only the first is compiled: the others must be the same program.
    """

    another_program = (
        "the body of the loop did something else in step {step} than in the first step, whose program the cluster "
        "runs. A number that changes (a learning rate, a counter) must be a tensor: use the schedules of "
        "cerebras_torch.optim.lr_scheduler. Add the same step closures in every step, and decide inside of them"
    )

    def __init__(self, executor: "DataExecutor", backend: "CsxBackend") -> None:
        super().__init__(executor, backend)
        self._body: OpenTrace | None = None

    def batches(self) -> Generator[Any]:
        try:
            self._take_first_batch()
            for _ in range(self.executor.num_steps):
                self._outputs, self._in_trace = Outputs(), []
                self._body = OpenTrace(self._batch, state.named_getters(), state.module_paths())
                yield self._body.batch
                self.mark_step()
        finally:
            if self._body is not None:
                self._body.close()
            self._close()

    def mark_step(self) -> None:
        """Ends the body: waits for the values of the step and runs its closures. Nothing if it has ended."""
        body, self._body = self._body, None
        if body is None:
            return
        for closure in self._in_trace:
            self._outputs.add_arguments(closure)
        self._trace = body.finish(None, lambda _: self._outputs.items())
        self._calls = self._in_trace
        if self._text:
            self._check_same_program()
        else:
            check_habits(self._trace, self._model)
            self._launch(self._lower())
        if self._stream is not None:
            self._end_step(self.executor.user_iteration)
        if self.executor.on_final_iteration:
            self._finish()  # here, as the script may leave its loop after the last mark_step

    def track(self, result: Any) -> None:
        """Makes the tensors of a nest outputs of the step."""
        if self._body is not None:
            self._outputs.add_results(result)

    def call_closure(self, closure: Closure) -> Any:
        if self._body is None and not self._running_closures:
            raise UsageError("a step closure was added after mark_step: add it before, its tensors are those of a step")
        return super().call_closure(closure)
