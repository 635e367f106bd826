"""The CPU backend: steps run eagerly in this process."""

import itertools
import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cstorch._internal.backend.interface import Backend, BackendType
from cstorch._internal.batch import num_samples
from cstorch._internal.execution import Closure, Execution, Executor
from cstorch.backends.mixed_precision import enable_mixed_precision, get_half_dtype


class CpuExecution(Execution):
    """An execution that runs steps eagerly with CPU tensors; closures run at once."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self._samples = 0

    def batches(self) -> Generator[Any]:
        for batch in itertools.islice(self.executor.dataloader.passes(), self.executor.num_steps):
            rows = num_samples(batch)
            self._samples += rows
            self.executor.profiler.step(rows)
            yield batch
        if self.executor.dataloader.is_restartable:
            self.executor.dataloader.completed(self.input_states())

    def input_states(self) -> list[dict[str, Any]]:
        step = self.executor.user_iteration
        return [self.executor.dataloader.own_state(worker_step=step, samples_streamed=self._samples)]

    def run_step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    def use_model(self, model: nn.Module) -> None:
        pass

    def call_closure(self, closure: Closure) -> Any:
        executor = self.executor
        due = executor.on_checkpoint_step if closure.at_checkpoint else executor.on_activation_step
        return closure.run() if due else None


class CpuBackend(Backend):
    """The backend that runs steps eagerly on the CPU, without a cluster.

    Random operations draw from torch's own generator: other numbers than the cluster's, which come from a counter.

    Args:
        artifact_dir: The folder for the files of executions.
        mixed_precision: The argument of `cstorch.amp.enable_mixed_precision`, as in releases up to 2.2. If it is True,
            compiled models also compute under `torch.autocast`, in the half type; backward passes and updates do not.
    """

    backend_type = BackendType.CPU

    def __init__(self, artifact_dir: str | os.PathLike[str] = "./", mixed_precision: bool | None = None) -> None:
        super().__init__(Path(artifact_dir))
        self._is_autocast = bool(mixed_precision)
        if mixed_precision is not None:
            enable_mixed_precision(mixed_precision)

    def make_execution(self, executor: Executor) -> Execution:
        return CpuExecution(executor)

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", get_half_dtype()) if self._is_autocast else nullcontext()

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass
