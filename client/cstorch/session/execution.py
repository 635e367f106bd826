"""An execution on the cluster: the first step is traced, compiled and started; results come back in step order."""

import logging
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from xdsl.dialects.builtin import ModuleOp

from cirh.modules.verify import verify
from cirh.text.printer import print_module
from cstorch import amp, backends, state
from cstorch.batch import check_batch
from cstorch.errors import ClusterError, UsageError
from cstorch.execution import Closure, Execution
from cstorch.lowering import lower
from cstorch.session.arguments import Arguments
from cstorch.session.habits import check_habits
from cstorch.session.initialisation import Staged
from cstorch.session.input import loader_name, prepared_input
from cstorch.session.job import Job
from cstorch.session.outputs import Outputs, unknown_tensor, unpack, weight_in_closure
from cstorch.session.session import outcome
from cstorch.session.stream import ExecutionStream
from cstorch.session.tensor_hooks import call_tensor_hooks
from cstorch.tracing import LazyTensor, Trace, is_tracing, trace_step, user_line
from cstorch.utils.data.restartable import read_state
from wsc.v1 import coordinator_pb2, plan_pb2

if TYPE_CHECKING:
    from cstorch.backend import CsxBackend
    from cstorch.utils.data.executor import DataExecutor

logger = logging.getLogger("cstorch.execution")

_HALF_TYPES = {
    "float16": plan_pb2.HALF_TYPE_FLOAT16,
    "bfloat16": plan_pb2.HALF_TYPE_BFLOAT16,
    "cbfloat16": plan_pb2.HALF_TYPE_CBFLOAT16,
}

LEFT_EARLY = (
    "the loop of the execution that changed it was left before its last step, so the cluster was stopped somewhere "
    "ahead of the script. Let the executor run to its end, or load a checkpoint"
)


class CsxExecution(Execution):
    """One run of a DataExecutor on the cluster."""

    another_program = (
        "the @cstorch.trace function did something else in step {step} than in the first step, whose program the "
        "cluster runs. What changes from step to step must be a tensor of the batch, or a tensor that the step updates "
        "in place"
    )

    def __init__(self, executor: "DataExecutor", backend: "CsxBackend") -> None:
        super().__init__(executor)
        self._backend = backend
        self._batch: Any = None
        self._input: Future[None] | None = None  # the workers have the input_fn
        self._staged: Staged | None = None  # initial values that the cluster makes meanwhile
        self._rows = 0
        self._model: nn.Module | None = None
        self._trace: Trace | None = None
        self._function: Callable[..., Any] | None = None
        self._arguments: Arguments | None = None  # that it was traced with
        self._text = ""  # the CIRH that runs
        self._result: Any = None
        self._outputs = Outputs()
        self._in_trace: list[Closure] = []  # closures called in the traced function: they run on every step
        self._calls: list[Closure] = []  # closures of the step at hand, in order
        self._traced_this_step = False
        self._running_closures = False
        self._input_states: list[bytes] | None = None  # of the checkpoint step whose closures run
        self._compiled: coordinator_pb2.CompileResponse | None = None
        self._stream: ExecutionStream | None = None
        self._finished = False

    # The loop.

    def batches(self) -> Generator[Any]:
        try:
            self._take_first_batch()
            for step in range(1, self.executor.num_steps + 1):
                self._calls = []
                self._traced_this_step = False
                yield self._batch
                if not self._traced_this_step:
                    raise UsageError(
                        "a step went by in which no @cstorch.trace function was called: call it once for each batch"
                    )
                if step == 1:
                    self._launch(self._lower())
                elif backends.csx.debug.retrace_every_iteration:
                    self._check_same_program()
                if self._stream is not None:
                    self._end_step(step)
            self._finish()
        finally:
            self._close()

    def _take_first_batch(self) -> None:
        loader = self.executor.dataloader
        if not self._backend.validate_only:
            self._backend.session.open_in_background()
        if self._backend.is_e2e_execution:
            builder = loader.builder()  # with the state of the random generators before the first batch
            prepared = prepared_input(builder, self._backend.cluster_config, self.executor.artifact_dir)
            self._input = self._backend.session.prepare_input(prepared)
            self._staged = Staged(state.named_getters(), self._backend.session.stage)
        self._batch = loader.first_batch()
        self._rows = check_batch(self._batch, self._backend.cluster_config.num_csx)

    def _check_same_program(self) -> None:
        """Of a step that was traced again.

        Raises:
            UsageError: it is not the program that runs.
        """
        if print_module(self._lower()) != self._text:
            raise UsageError(self.another_program.format(step=self.executor.user_iteration))

    def _lower(self) -> ModuleOp:
        assert self._trace is not None
        for call in self._calls:
            self._outputs.rename_by_arguments(call)
        return lower(self._outputs.named(self._trace))

    def _launch(self, module: ModuleOp) -> None:
        path = self.executor.artifact_dir / "cirh.mlir"
        self._text = print_module(module)
        path.write_text(self._text)
        if self._backend.validate_only:
            verify(module)
            logger.info("The step is valid. With validate_only nothing is compiled or run. CIRH: %s", path)
            return
        assert self._trace is not None
        session = self._backend.session
        session.check_compile(self._backend.cluster_config, trains=bool(self._trace.optimizers))
        logger.info("Compiling the model. This may take a few minutes.")
        logger.info("No image is built: input workers run in the Python environment of the script")
        job = session.job()
        logger.info("Compile job id: %s%s", job.name, f", log path: {session.log_path}" if session.log_path else "")
        logger.info("The coordinator of the job is ready")
        options = _compile_options()
        if options.HasField("precision"):
            level = options.precision.optimization_level
            logger.info("Mixed precision: %s, optimization level %d", amp.get_half_dtype_str(), level)
        self._compiled = job.compile(self._text, options)
        found = "found in the cache and verified" if self._compiled.cached else "compiled"
        logger.info("Compile artifact %s: %s in %.1f s", self._compiled.artifact, found, self._compiled.seconds)
        if self._compiled.report:
            where = " (on the cluster)" if job.gateway else ""
            logger.info("Compile report: %s%s", self._compiled.report, where)
        logger.info("Compile was successful!")
        if self._backend.compile_only:
            logger.info("With compile_only nothing is run, and no weights were sent")
        if self._input is not None:
            outcome(self._input)
            self._start(job, self._compiled)

    def _start(self, job: Job, compiled: coordinator_pb2.CompileResponse) -> None:
        assert self._trace is not None
        executor = self.executor
        cells = {info.name: info.cell for info in self._trace.states}
        on_cluster = self._backend.session.state
        if self._backend.cluster_config.changes_need_checkpoint:
            on_cluster.check_changes(cells, backends.csx.debug.lazy_initialization)
        on_cluster.prepare(cells)
        logger.info("Programming the cluster for execution. This may take a few minutes.")
        logger.info("Execute job id: %s", job.name)
        logger.info("Preparing to execute using %d CSX", self._backend.cluster_config.num_csx)
        begin = coordinator_pb2.Begin(
            token=job.token,
            artifact=compiled.artifact,
            loader=loader_name(executor.artifact_dir),
            num_steps=executor.num_steps,
            activation_steps=executor.activation_steps,
            checkpoint_steps=executor.checkpoint_steps,
            wants_input_states=bool(executor.checkpoint_steps) and executor.dataloader.is_restartable,
        )
        self._stream = ExecutionStream(job, begin)
        wanted = self._stream.receive("state_wanted").state_wanted
        logger.info("Sending initial weights to the weight servers")
        assert self._staged is not None
        try:
            sent = on_cluster.send(cells, compiled.states, wanted, self._staged.current(cells))
        except ClusterError as error:
            raise job.wait_for_failure() or error from None
        logger.info("Sent %d of %d state tensors to the cluster", len(sent), len(cells))
        self._stream.send(coordinator_pb2.ExecuteRequest(state_sent=coordinator_pb2.StateSent()))
        on_cluster.begin(cells)
        logger.info("Staging the run: the input workers fill their buffers")
        self._stream.receive("started")
        executor.profiler.rate_tracker.reset_time()
        logger.info("Beginning the run")

    def _end_step(self, step: int) -> None:
        """Waits for what the step has for the script, and runs the closures that were called in it."""
        assert self._stream is not None
        assert self._compiled is not None
        executor = self.executor
        executor.profiler.step(self._rows)
        if not executor.on_activation_step and not executor.on_checkpoint_step:
            return
        values: dict[str, torch.Tensor] = {}
        if executor.on_activation_step and self._compiled.outputs:
            values = unpack(self._compiled.outputs, self._stream.receive_outputs())
            call_tensor_hooks(values)
        calls = [call for call in self._calls if not call.at_checkpoint]
        if executor.on_checkpoint_step:
            self._input_states = list(self._stream.receive("checkpoint").checkpoint.input_states)
            calls += [call for call in self._calls if call.at_checkpoint]
            with self._backend.session.state.at_checkpoint(step):
                self._run_closures(calls, values)
            self._input_states = None
            taken = coordinator_pb2.CheckpointTaken(step=step)
            self._stream.send(coordinator_pb2.ExecuteRequest(checkpoint_taken=taken))
        else:
            self._run_closures(calls, values)
        self._stream.consumed(step)

    def input_states(self) -> list[dict[str, Any]]:
        if self._input_states is None:
            raise UsageError(
                "the cluster has not come to this step yet: ask for the state of the input in a @checkpoint_closure"
            )
        return [read_state(state) for state in self._input_states]

    def _run_closures(self, calls: list[Closure], values: dict[str, torch.Tensor]) -> None:
        self._running_closures = True
        try:
            for call in calls:
                self._outputs.fill(call, values).run()
        finally:
            self._running_closures = False

    def _finish(self) -> None:
        if self._stream is not None:
            finished = self._stream.receive("finished").finished
            for name, seconds in sorted(finished.seconds.items()):
                logger.debug("%s: %.3f s", name, seconds)
            self._backend.session.state.settle(self.executor.num_steps in self.executor.checkpoint_steps)
            logger.info("%s of %d steps completed successfully!", self._kind(), self.executor.num_steps)
        self._finished = True

    def _kind(self) -> str:
        return "Training" if self._trace is not None and self._trace.optimizers else "Evaluation"

    def _close(self) -> None:
        self._batch = self._result = self._trace = None
        self._calls, self._in_trace = [], []
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            if not self._finished:
                self._backend.session.abandon_job(LEFT_EARLY)

    # What the script calls within a step.

    def run_step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._running_closures or is_tracing():
            raise UsageError("a @cstorch.trace function cannot be called in a closure or in another traced function")
        if self._traced_this_step:
            raise UsageError(
                f"at {user_line()} the @cstorch.trace function was called twice for one batch: it is one step. Do all "
                "of it in one call"
            )
        if self._function is None or self._arguments is None:
            self._function, self._arguments = function, Arguments(function, args, kwargs)
            self._trace_function(function, args, kwargs)
        elif self._function is not function:
            raise UsageError(
                f"at {user_line()} a second @cstorch.trace function was called in one execution: an execution runs one "
                "graph. Use another DataExecutor for the other function"
            )
        elif backends.csx.debug.retrace_every_iteration:
            self._outputs, self._in_trace = Outputs(), []
            self._trace_function(function, args, kwargs)
        else:
            self._arguments.check(args, kwargs)
        self._traced_this_step = True
        self._calls.extend(self._in_trace)
        return self._result

    def _trace_function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
            for closure in self._in_trace:
                self._outputs.add_arguments(closure)
            self._outputs.add_results(result)
            return self._outputs.items()

        self._trace = trace_step(step, self._batch, state.named_getters(), state.module_paths(), collect)
        check_habits(self._trace, self._model)

    def use_model(self, model: nn.Module) -> None:
        if self._model is not None and self._model is not model:
            raise UsageError(
                "two compiled models are called in one traced step: put them into one torch.nn.Module and compile that"
            )
        self._model = model

    def call_closure(self, closure: Closure) -> Any:
        if self._running_closures:
            return closure.run()
        leaves = pytree.tree_leaves((closure.args, closure.kwargs))
        if any(isinstance(leaf, nn.Parameter) for leaf in leaves):
            raise weight_in_closure(closure)
        if is_tracing():
            self._in_trace.append(closure)
            return None
        if any(isinstance(leaf, LazyTensor) and leaf not in self._outputs for leaf in leaves):
            raise unknown_tensor(closure)
        self._calls.append(closure)
        return None


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


def _compile_options() -> plan_pb2.CompileOptions:
    """What the script has said."""
    library = backends.csx.performance.kernel_library
    options = plan_pb2.CompileOptions(
        kernel_library=plan_pb2.KernelLibrary.Value(f"KERNEL_LIBRARY_{library.upper()}"),
        wafer_memory_bytes=(backends.csx.debug.wafer_memory_gi or 0) << 30,
    )
    if amp.mixed_precision():
        options.precision.half = _HALF_TYPES[amp.get_half_dtype_str()]
        options.precision.optimization_level = backends.csx.precision.optimization_level
    return options
