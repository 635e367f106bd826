"""An execution on the cluster: the first step is compiled and started; closures run as the results come back."""

import logging
import time
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from cstorch._internal import state, step_clock
from cstorch._internal.batch import check_batch
from cstorch._internal.execution import Closure, Execution, Executor
from cstorch._internal.session.cluster_session import Target, outcome
from cstorch._internal.session.execution.compiling import compile_step
from cstorch._internal.session.execution.input import prepared_input, read_state
from cstorch._internal.session.execution.outputs import takes_values
from cstorch._internal.session.execution.run import ClusterRun
from cstorch._internal.session.execution.traced_step import TracedStep
from cstorch._internal.session.staging import Staged
from cstorch._internal.session.tensor_hooks import call_tensor_hooks
from cstorch.errors import UsageError
from waferbox.cirh.modules.verify import verify

logger = logging.getLogger("cstorch.execution")

EXECUTION_LEFT_UNFINISHED = (
    "the loop of the execution that changed it was left before its last step, so the cluster was stopped somewhere "
    "ahead of the script. Let the executor run to its end, or load a checkpoint"
)


class ClusterExecution(Execution):
    """What executions on the cluster share; a subclass says when the script's step begins and ends."""

    def __init__(self, executor: Executor, target: Target, step: TracedStep) -> None:
        super().__init__(executor)
        self._target = target
        self._step = step
        self._rows = 0
        self._input: Future[None] | None = None  # the workers have the input_fn
        self._staged: Staged | None = None  # initial values that the cluster makes meanwhile
        self._run: ClusterRun | None = None
        self._last_ended: float | None = None  # the step before whose closures ran, as of time.monotonic
        self._is_finished = False
        self._is_in_closure = False
        self._input_states: list[bytes] | None = None  # of the checkpoint step whose closures run

    def _begin(self) -> Any:
        """Gives the input to the workers, and returns the first batch."""
        loader, session, config = self.executor.dataloader, self._target.session, self._target.config
        if session is not None:
            session.open_in_background()
            if not self._target.compile_only:
                builder = loader.builder()  # with the state of the random generators before the first batch
                self._input = session.prepare_input(prepared_input(builder, config, self.executor.artifact_dir))
                self._staged = Staged(state.named_getters(), session.stage)
        batch = loader.first_batch()
        self._rows = check_batch(batch, config.num_csx)
        return batch

    def _launch(self) -> None:
        """Lowers the step, and has it compiled and started as far as the target says."""
        path = self.executor.artifact_dir / "cirh.mlir"
        module = self._step.lower()
        path.write_text(self._step.text)
        if self._target.session is None:
            verify(module)
            logger.info("The step is valid. With validate_only nothing is compiled or run. CIRH: %s", path)
            return
        job, compiled = compile_step(self._target, self._step.text, trains=self._step.trains)
        if self._input is None or self._staged is None:
            return
        outcome(self._input)
        self._run = ClusterRun(self.executor, self._target, job, compiled, self._step.cells)
        self._run.start(self._staged)
        self.executor.profiler.start()
        logger.info("Beginning the run")

    def _end_step(self, step: int) -> None:
        """Waits for what the step has for the script, and runs the closures that were called in it."""
        run, executor = self._run, self.executor
        if run is None:
            return
        executor.profiler.step(self._rows)
        if not executor.on_activation_step and not executor.on_checkpoint_step:
            return
        values = run.receive_outputs() if executor.on_activation_step else {}
        if values:
            executor.profiler.record_elapsed(run.seconds)
        calls = [call for call in self._step.calls if not call.at_checkpoint]
        if executor.on_checkpoint_step:
            calls += [call for call in self._step.calls if call.at_checkpoint]
            with run.checkpoint(step) as self._input_states:
                self._run_closures(calls, values)
            self._input_states = None
        else:
            self._run_closures(calls, values)
        run.consumed(step)

    def _run_closures(self, calls: list[Closure], values: dict[str, torch.Tensor]) -> None:
        assert self._run is not None
        step, outputs = self._step, self._step.outputs
        step.at_hand.evaluate(step.has_output, lambda source: outputs.value(source, values))
        # All before the first runs: a closure may write to its tensors.
        filled = [outputs.fill(call, values) for call in calls]
        step.at_hand.is_last = self.executor.on_final_iteration
        self._is_in_closure = True
        try:
            ended = self._run.began + self._run.seconds if values else time.monotonic()
            with step_clock.closures_of_step(self._last_ended or self._run.began, ended):
                arrived = False
                for closure, call in zip(calls, filled, strict=True):
                    if not arrived and takes_values(closure):
                        # Not before: what runs ahead of it may prepare for the values, as plain PyTorch's forward pass.
                        call_tensor_hooks(values)
                        arrived = True
                    call.run()
                if not arrived:
                    call_tensor_hooks(values)
            self._last_ended = ended
        finally:
            self._is_in_closure = False

    def _finish(self) -> None:
        if self._run is not None:
            states = self._run.finish(is_saved=self.executor.num_steps in self.executor.checkpoint_steps)
            if states:
                self.executor.dataloader.completed([read_state(state) for state in states])
            kind = "Training" if self._step.trains else "Evaluation"
            logger.info("%s of %d steps completed successfully!", kind, self.executor.num_steps)
        self._is_finished = True

    def _close(self) -> None:
        self._step.close()
        if self._run is not None:
            self._run.close()
            self._run = None
            if not self._is_finished:
                assert self._target.session is not None
                self._target.session.abandon_job(EXECUTION_LEFT_UNFINISHED)

    # What the script calls within a step.

    def input_states(self) -> list[dict[str, Any]]:
        if self._input_states is None:
            raise UsageError(
                "the cluster has not come to this step yet: ask for the state of the input in a @checkpoint_closure"
            )
        return [read_state(state) for state in self._input_states]

    def use_model(self, model: nn.Module) -> None:
        self._step.use_model(model)

    def call_closure(self, closure: Closure) -> Any:
        if self._is_in_closure:
            return closure.run()
        self._step.call_closure(closure)
        return None
