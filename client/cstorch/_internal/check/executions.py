"""The executions of checked runs: on the cluster with the states of every step, and by plain PyTorch on the CPU."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils import _pytree as pytree

from cstorch import backends
from cstorch._internal import state
from cstorch._internal.backend.cpu import CpuExecution
from cstorch._internal.batch import num_samples
from cstorch._internal.check.counted_random import CountedRandom
from cstorch._internal.check.run import CheckedRun
from cstorch._internal.execution import Closure, Executor
from cstorch._internal.random_state import random_state, set_random_state
from cstorch._internal.session.cluster_session import Target
from cstorch._internal.session.execution.function import FunctionExecution
from cstorch.backends.mixed_precision import get_half_dtype_str, mixed_precision
from waferbox.check.moments import WIDTH, moments
from waferbox.check.record import InputMeasured, Program, Question, StepObserved, Way

# --- On the cluster ---------------------------------------------------------------------------------------------------


class CheckedClusterExecution(FunctionExecution):
    """An execution on the cluster that records the outputs and the states of every step.

    Args:
        executor: What is run.
        target: The cluster.
        run: The checked run.
        asked_csx: The wafers that the script asks for.
    """

    def __init__(self, executor: Executor, target: Target, run: CheckedRun, asked_csx: int) -> None:
        super().__init__(executor, target)
        self._run = run
        self._asked_csx = asked_csx
        self._number = 0
        self._name = ""
        self._result: Any = None  # of the current step, with CPU tensors
        self._began_call = 0.0
        self._seen: dict[str, torch.Tensor] = {}  # the states after the first step, sampled
        self._changed: set[str] = set()

    @property
    def snapshot_steps(self) -> list[int]:
        return list(range(1, self.executor.num_steps + 1))

    def batches(self) -> Generator[Any]:
        self._number = self._run.begin_execution(self.executor.num_steps, self.executor.asked_steps)
        yield from super().batches()
        self._check_resumption()
        self._run.end_execution()

    def run_step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._name = self._name or _described(function)
        self._began_call = time.monotonic()
        self._run.in_step = True
        result = super().run_step(function, args, kwargs)
        self._run.in_step = False
        if self._target.session is not None:
            self.call_closure(Closure(function=self._note, args=(result,), kwargs={}, at_checkpoint=False))
        return result

    def _launch(self) -> None:
        if self._run.is_refused:
            raise SystemExit(0)  # the program has stand-ins for values
        seconds = time.monotonic() - self._began_call
        super()._launch()
        is_half = mixed_precision()
        self._run.add(
            Program(
                execution=self._number,
                path=str(self.executor.artifact_dir / "cirh.mlir"),
                function=self._name,
                trains=self._step.trains,
                half=get_half_dtype_str() if is_half else "",
                optimization_level=backends.csx.precision.optimization_level,
                half_gradients=is_half and backends.csx.precision.half_gradients,
                trace_seconds=seconds,
                num_csx=self._asked_csx,
            )
        )

    def _note(self, result: Any) -> None:
        self._result = result

    def _at_snapshot(self, step: int) -> None:
        states = {name: tensor.detach().cpu() for name, tensor in _state_tensors().items()}
        self._run.record_step(self._number, step, self._result, states)
        for name, tensor in states.items():
            before = self._seen.setdefault(name, tensor.clone())
            if name not in self._changed and not torch.equal(before, tensor):
                self._changed.add(name)

    def _check_resumption(self) -> None:
        """Reports states that change in steps and that a checkpoint lacks."""
        if not self._step.trains or not self._changed:
            return
        for model in state.registered("model"):
            kept = set(model.state_dict())
            for name, _ in model.named_buffers():
                if name not in kept and f"state.model.{name}" in self._changed:
                    self._run.found(
                        Question.RESUME,
                        f"the buffer {name!r} changes in every step and is no part of model.state_dict(), as it was "
                        "registered with persistent=False: a run that goes on from a checkpoint begins with its first "
                        "value. Register it without that argument",
                    )


def _described(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", "the traced function")
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _state_tensors() -> dict[str, torch.Tensor]:
    return {name: getter() for name, getter in state.named_getters().items()}


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
        self._number = 0
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
        passes = executor.dataloader.passes()
        seconds, rows, nbytes = 0.0, 0, 0
        for step in range(1, executor.num_steps + 1):
            set_random_state(loader_random)
            began = time.perf_counter()
            batch = next(passes)
            if step > 1:
                seconds += time.perf_counter() - began
            loader_random = random_state()
            set_random_state(own_random)
            rows = num_samples(batch)
            nbytes = sum(t.nbytes for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor))
            self._samples += rows
            executor.profiler.step(rows)
            self._result = None
            yield batch
            own_random = random_state()
            states = {name: tensor.detach() for name, tensor in _state_tensors().items()}
            self._run.record_step(number, step, self._result, states)
        if executor.dataloader.is_restartable:
            executor.dataloader.completed(self.input_states())
        self._run.add(
            InputMeasured(
                execution=number,
                batches=executor.num_steps - 1,
                rows=rows,
                seconds=seconds,
                nbytes=nbytes,
                is_restartable=executor.dataloader.is_restartable,
            )
        )
        self._run.end_execution()

    def run_step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_double:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _as_double, (args, kwargs))
        self._run.in_step = True
        with ExitStack() as stack:
            if (self._number, self.executor.user_iteration) in self._run.settings.observed:
                stack.enter_context(self._observed((args, kwargs)))
            if self._is_double:
                stack.enter_context(_double_by_default())
            stack.enter_context(self._random)
            result = function(*args, **kwargs)
        self._run.in_step = False
        self._result = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), result)
        for name in sorted(self._random.unknown):
            self._run.found(
                Question.VALUES, f"`{name}` draws random numbers that plain PyTorch and the cluster draw differently"
            )
        return result

    @contextmanager
    def _observed(self, arguments: Any) -> Iterator[None]:
        """Context that records the operations of the step, with the states that it begins with and its batch."""
        inputs = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        kept = {f"input.{number}": tensor for number, tensor in enumerate(inputs)} | _state_tensors()
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


def _as_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _make_double() -> None:
    """Converts all states of floating point types to float64, in place."""
    for kind in ("model", "metric"):
        for module in state.registered(kind):
            module.double()
    for optimizer in state.registered("optimizer"):
        for values in optimizer.state.values():
            values.update({name: _as_double(v) for name, v in values.items() if isinstance(v, torch.Tensor)})


@contextmanager
def _double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
