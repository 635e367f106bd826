"""The executions of checked runs: on the cluster with the states of every step, and by plain PyTorch on the CPU."""

import shutil
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, Self

import torch
from safetensors.torch import save_file
from torch.utils import _pytree as pytree
from xdsl.dialects.builtin import ModuleOp

from cstorch._internal import state
from cstorch._internal.backend.cpu import CpuExecution
from cstorch._internal.batch import num_samples
from cstorch._internal.check.counted_random import CountedRandom
from cstorch._internal.check.double_precision import DoublePrecision
from cstorch._internal.check.half_range import HalfRange
from cstorch._internal.check.loader import BusyLines, line_of_input, partial_batch, shared_samples
from cstorch._internal.check.resumption import report_lost_states
from cstorch._internal.check.run import CheckedRun, tensors
from cstorch._internal.execution import Closure, Executor
from cstorch._internal.random_state import random_state, random_state_kept, set_random_state
from cstorch._internal.session.execution.cluster_execution import LEFT_EARLY, ClusterExecution
from cstorch._internal.session.execution.function import FunctionExecution
from cstorch._internal.session.execution.loop import LoopExecution
from cstorch._internal.tracing import user_line
from cstorch.backends.mixed_precision import get_half_dtype, mixed_precision
from cstorch.errors import StateError
from waferbox.checked_run.moments import WIDTH, moments
from waferbox.checked_run.record import INPUT, InputMeasured, Program, Question, StepObserved, Way
from waferbox.execution_folders import CIRH

_EARLY_READ: Final = (
    "state is read or saved in a step closure on a step that is no checkpoint step: outside of a check this is an "
    "error, as the cluster is ahead of the script. Do it in a @cstorch.checkpoint_closure, on a step of the "
    "DataExecutor's checkpoint_steps, or after the loop"
)

# --- On the cluster ---------------------------------------------------------------------------------------------------


class CheckedExecution(ClusterExecution):
    """The part of an execution on the cluster that records the outputs and the states of every step."""

    _run: CheckedRun
    _asked_csx = 1
    _number = 0
    _result: Any = None  # of the current step, with CPU tensors; None: it is not known
    _began_call = 0.0
    _trains = False

    def checked_by(self, run: CheckedRun, asked_csx: int) -> Self:
        """Sets the checked run, and the wafers that the script asks for."""
        self._run = run
        self._asked_csx = asked_csx
        self._first_states: dict[str, torch.Tensor] = {}  # after the first step
        self._changed: set[str] = set()
        return self

    @property
    def snapshot_steps(self) -> list[int]:
        return list(range(1, self.executor.num_steps + 1))

    def batches(self) -> Generator[Any]:
        self._number = self._run.begin_execution(self.executor.num_steps, self.executor.asked_steps)
        self._began_call = time.monotonic()
        try:
            yield from super().batches()  # type: ignore[safe-super]  # a subclass has the execution as its next class
        except GeneratorExit:
            self._note_left()
            self._measure_input()
            raise
        self._note_left()
        self._measure_input()
        if self._trains:
            report_lost_states(self._run, self._changed)
        self._run.end_execution()

    def _note_left(self) -> None:
        """Records that the script has left its loop early, unless the step has failed."""
        is_early = self.executor.user_iteration < self.executor.num_steps
        if is_early and not self._run.in_step and not self._run.is_refused:
            self._run.found(Question.RESUME, LEFT_EARLY, user_line(), is_error=True)

    def _measure_input(self) -> None:
        """Times the batches after the first, and records what is wrong with the loader, if no run by PyTorch does."""
        if self._run.settings.way is not Way.TRACE:
            return
        # A trainer asks for a single step if nothing is to run.
        count = self._run.settings.steps - 1
        busy = BusyLines()
        with random_state_kept():
            passes = self.executor.dataloader.passes()
            batch = next(passes)
            began = time.perf_counter()
            with busy:
                for _ in range(count):
                    batch = next(passes)
            seconds = time.perf_counter() - began
        _record_input(self._run, self._number, self.executor, batch, count, seconds, busy.busiest)

    def _launch(self) -> None:
        seconds = time.monotonic() - self._began_call
        super()._launch()
        record = self._record()
        self._trains = self._step.trains
        if self._run.settings.way is Way.TRACE:
            self._changed = {info.name for info in self._step.trace.states if info.changed}
        program = self._run.folder / f"program-{self._number}.mlir"  # the artifact folder may be one of the script's
        shutil.copyfile(self.executor.artifact_dir / CIRH, program)
        self._run.add(
            Program(
                execution=self._number,
                path=str(program),
                function=record.function,
                trains=self._trains,
                half=record.half,
                optimization_level=record.optimization_level,
                half_gradients=record.half_gradients,
                trace_seconds=seconds,
                num_csx=self._asked_csx,
                input_line=line_of_input(self.executor.dataloader, self._run.loader_lines),
            )
        )

    def _lower(self) -> ModuleOp:
        try:
            module = super()._lower()
        except Exception:
            if self._run.is_refused:  # the trace has stand-ins, which need not fit together
                raise SystemExit(0) from None
            raise
        if self._run.is_refused:
            raise SystemExit(0)  # the program has stand-ins for values
        return module

    @property
    def _is_saved(self) -> bool:
        executor = self.executor
        if executor.checkpoint_schedule is None:
            return False
        # The check may run fewer steps than the script asks for.
        is_last = self._done == executor.num_steps and executor.checkpoint_schedule.match(executor.asked_steps - 1)
        return is_last or self._done in executor.checkpoint_steps

    def _check_changes(self) -> None:
        try:
            super()._check_changes()
        except StateError as error:
            self._run.found(Question.TRACE, str(error), user_line(), is_error=True)

    def _run_closures(self, calls: list[Closure], values: dict[str, torch.Tensor]) -> None:
        states = self._session.state
        states.on_read = None if self.executor.on_checkpoint_step else self._note_early_read
        try:
            super()._run_closures(calls, values)
        finally:
            states.on_read = None

    def _note_early_read(self) -> None:
        self._run.found(Question.TRACE, _EARLY_READ, user_line(), is_error=True)

    def _at_snapshot(self, step: int) -> None:
        states = {name: tensor.detach().cpu() for name, tensor in _state_tensors().items()}
        self._run.record_step(self._number, step, self._result, states)
        for name, tensor in states.items():
            before = self._first_states.setdefault(name, tensor.clone())
            if name not in self._changed and not torch.equal(before, tensor):
                self._changed.add(name)


class CheckedFunctionExecution(CheckedExecution, FunctionExecution):
    """An execution on the cluster, recorded, whose step is a function of the script."""

    def run_step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._began_call = time.monotonic()
        self._run.in_step = True
        result = super().run_step(function, args, kwargs)
        self._run.in_step = False
        if self._target.session is not None:
            self.call_closure(Closure(function=self._note, args=(result,), kwargs={}, at_checkpoint=False))
        return result

    def _note(self, result: Any) -> None:
        self._result = result


class CheckedLoopExecution(CheckedExecution, LoopExecution):
    """An execution on the cluster, recorded, whose steps are bodies of the script's loop, without results."""


def _state_tensors() -> dict[str, torch.Tensor]:
    return {name: getter() for name, getter in state.named_getters().items()}


# --- The input --------------------------------------------------------------------------------------------------------


def _record_input(
    run: CheckedRun, execution: int, executor: Executor, batch: Any, timed: int, seconds: float, busiest_line: str
) -> None:
    """Records how long some batches took, and what is wrong with the loader."""
    loader, rows = executor.dataloader, num_samples(batch)
    run.add(
        InputMeasured(
            execution=execution,
            batches=timed,
            rows=rows,
            seconds=seconds,
            line=busiest_line,
            nbytes=sum(leaf.nbytes for leaf in tensors(batch)),
            is_restartable=loader.is_restartable,
        )
    )
    for what in (partial_batch(loader.dataloader, executor.asked_steps), shared_samples(loader, rows)):
        if what:
            run.found(Question.INPUT, what, line_of_input(loader, run.loader_lines))


# --- By plain PyTorch -------------------------------------------------------------------------------------------------


class CheckedEagerExecution(CpuExecution):
    """An execution by plain PyTorch, with the random numbers and the batches that the cluster has.

    Args:
        executor: What is run.
        run: The checked run.
        random: The random numbers of all steps of the run.
    """

    def __init__(self, executor: Executor, run: CheckedRun, random: CountedRandom) -> None:
        super().__init__(executor)
        self._run = run
        self._random = random
        self._is_double = run.settings.way is Way.DOUBLE
        self._is_half = run.settings.way is Way.HALF and mixed_precision()
        self._is_judge_of_half = run.settings.way is Way.TORCH and mixed_precision()
        self._range = HalfRange(get_half_dtype()) if self._is_judge_of_half else None
        self._number = 0
        self._batch: Any = None  # of the current step
        self._result: Any = None

    def batches(self) -> Generator[Any]:
        executor = self.executor
        self._number = number = self._run.begin_execution(executor.num_steps, executor.asked_steps)
        if self._is_double:
            _make_double()
        # The loader's generators: on the cluster it runs in another process, and its first batch in the script's too.
        loader_random = random_state()
        executor.dataloader.first_batch()
        own_random = random_state()
        self._run.record_step(number, 0, None, _detached_states())
        busy = BusyLines()
        seconds = 0.0
        passes = executor.dataloader.passes()
        for step in range(1, executor.num_steps + 1):
            set_random_state(loader_random)
            with busy if step == 2 else nullcontext():
                began = time.perf_counter()
                batch = next(passes)
                ended = time.perf_counter()
            if step > 1:
                seconds += ended - began
            loader_random = random_state()
            set_random_state(own_random)
            rows = num_samples(batch)
            self._samples += rows
            executor.profiler.step(rows)
            self._result = None
            if self._is_double:
                batch = pytree.tree_map_only(torch.Tensor, _as_double, batch)
            elif self._is_judge_of_half:
                # A loader may give half precision, which fits no weight in float32.
                batch = pytree.tree_map_only(torch.Tensor, _as_single, batch)
            self._batch = batch
            try:
                with self._around_body():
                    yield batch
            except GeneratorExit:  # the script has left its loop
                if step > 1:
                    _record_input(self._run, number, executor, batch, step - 1, seconds, busy.busiest)
                raise
            own_random = random_state()
            self._run.record_step(number, step, self._result, _detached_states(), batch)
        if executor.dataloader.is_restartable:
            executor.dataloader.completed(self.input_states())
        _record_input(self._run, number, executor, self._batch, executor.num_steps - 1, seconds, busy.busiest)
        if self._range is not None:
            for line, what in self._range.beyond.items():
                self._run.found(Question.HALF, what, line)
        self._run.end_execution()

    def _around_body(self) -> AbstractContextManager[Any]:
        """Returns the context in which the body of the script's loop runs."""
        return nullcontext()

    def run_step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._step_modes():
            result = function(*args, **kwargs)
        self._result = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), result)
        return result

    @contextmanager
    def _step_modes(self) -> Iterator[None]:
        """Context in which a step runs."""
        self._run.in_step = True
        is_observed = (self._number, self.executor.user_iteration) in self._run.settings.observed
        with ExitStack() as stack:
            if is_observed:
                stack.enter_context(self._observed(self._batch))
            for mode in (self._random, self._range or nullcontext(), self._precision()):
                stack.enter_context(mode)
            yield
        self._run.in_step = False
        for name in sorted(self._random.unknown):
            self._run.found(
                Question.VALUES, f"`{name}` draws random numbers that plain PyTorch and the cluster draw differently"
            )

    @contextmanager
    def _observed(self, batch: Any) -> Iterator[None]:
        """Context that records the operations of the step, with the states that it begins with and its batch."""
        kept = {f"{INPUT}{number}": tensor for number, tensor in enumerate(tensors(batch))} | _state_tensors()
        kept = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in kept.items()}
        rows: list[torch.Tensor] = []

        def observe(result: Any) -> None:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel():
                    rows.append(moments(leaf))

        self._random.on_result = observe
        try:
            yield
        finally:
            self._random.on_result = None
        step = self.executor.user_iteration
        path = f"observed-{self._number}-{step}.safetensors"
        kept["moments"] = torch.stack(rows) if rows else torch.zeros(0, WIDTH, dtype=torch.float64)
        save_file(kept, self._run.folder / path)
        self._run.add(StepObserved(execution=self._number, step=step, path=path, counter=self._random.counter_of_step))

    def _precision(self) -> AbstractContextManager[Any]:
        if self._is_double:
            return DoublePrecision()
        return torch.autocast("cpu", get_half_dtype()) if self._is_half else nullcontext()


class CheckedEagerLoop(CheckedEagerExecution):
    """The same, where each step is the body of the script's loop."""

    def _around_body(self) -> AbstractContextManager[Any]:
        return self._step_modes()


def _detached_states() -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in _state_tensors().items()}


def _as_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _as_single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _make_double() -> None:
    """Converts all states of floating point types to float64, in place."""
    for kind in ("model", "metric"):
        for module in state.registered(kind):
            module.double()
    for optimizer in state.registered("optimizer"):
        for values in optimizer.state.values():
            values.update({name: _as_double(v) for name, v in values.items() if isinstance(v, torch.Tensor)})
