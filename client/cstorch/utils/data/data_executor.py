"""The DataExecutor: the loop over the steps of one execution."""

import copy
import math
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import Any

from cstorch import backends
from cstorch._internal import state
from cstorch._internal.artifacts import make_artifact_dir
from cstorch._internal.batch import num_samples
from cstorch._internal.check.run import checked_run
from cstorch._internal.execution import Execution, check_not_nested, enter, record_loop
from cstorch._internal.imported_again import is_for_input, is_imported_again
from cstorch._internal.notebook import inline_report
from cstorch._internal.tracing.provenance import user_line, warn_user
from cstorch.backend import Backend, CsxBackend, current_backend
from cstorch.backends.csx_flags import MicroBatchSize as MbsSetting
from cstorch.distributed.cs_config import CSConfig
from cstorch.errors import ConfigurationError, InputError, UsageError
from cstorch.utils.data.dataloader import DataLoader
from cstorch.utils.data.schedule import Schedule
from cstorch.utils.profiler import Activity, Profiler
from waferbox.execution_folders import EXECUTIONS


class DataExecutor:
    """The loop over the steps of one execution: `for batch in executor: training_step(batch)`. Used by one thread.

    On CSX every step yields the same batch, the first one. The step is traced with it, and the cluster's workers make
    the batches that the step then runs on.

    A notebook shows an executor on CSX as the compile report of its last loop: write `executor` in the last line of a
    cell.

    Args:
        dataloader: The source of the batches.
        num_steps: The number of steps; None: one pass over the dataloader.
        checkpoint_steps: k for checkpoints after steps k, 2k, ... and the last; a Schedule for others; None or 0: none.
        activation_steps: k for step closures on steps k, 2k, ... and the last; None: on every step.
        profiler_activities: Classes of what `executor.profiler` measures besides the rate.
        cs_config: The cluster, as releases up to 2.2 have it; the same for all executors of a process.
        writer: The writer of summaries, as in releases up to 2.2. It has `add_scalar(name, value, step)` and
            `add_tensor(name, tensor, step)`.
        listeners: Accepted without effect.
        micro_batch_size: Sets `cstorch.backends.csx.performance.micro_batch_size`, unless it is None.

    Raises:
        TypeError: An argument has the wrong type.
        ConfigurationError: A number is out of range, or `num_steps` is needed and not given.
        UsageError: There is no backend yet, or `cs_config` differs from that of an earlier executor.

    Example:
        ::

            executor = cstorch.utils.data.DataExecutor(dataloader, num_steps=1000, checkpoint_steps=100)
            for batch in executor:
                log_loss(training_step(batch))
                save_checkpoint()

    Reference: release 2.10, `cerebras.pytorch.utils`.
    """

    def __init__(
        self,
        dataloader: DataLoader,
        num_steps: int | None = None,
        checkpoint_steps: int | Schedule | None = None,
        activation_steps: int | None = None,
        profiler_activities: Sequence[type[Activity]] | None = None,
        *,
        cs_config: CSConfig | None = None,
        writer: Any = None,
        listeners: Any = None,
        micro_batch_size: Any = None,
    ) -> None:
        if not isinstance(dataloader, DataLoader):
            raise TypeError(
                f"dataloader must be a cstorch.utils.data.DataLoader, not {type(dataloader).__name__}: wrap the "
                "function that makes your loader, cstorch.utils.data.DataLoader(input_fn, ...)"
            )
        if cs_config is not None and not isinstance(cs_config, CSConfig):
            raise TypeError(f"cs_config must be a cstorch.utils.CSConfig, not {type(cs_config).__name__}")
        self.dataloader = dataloader
        self.writer = writer
        self._cs_config = cs_config
        self.backend: Backend = current_backend()
        self.num_steps = self._steps_to_run(num_steps)
        self.checkpoint_schedule = _checkpoint_schedule(checkpoint_steps, self.num_steps)
        self.activation_steps = self._activation_steps(activation_steps)
        self._activities = _activities(profiler_activities)
        self._profiler = Profiler(self.backend.artifact_dir, self._activities)
        self._iteration = -1
        self._is_stopped = False
        self._artifact_dir: Path | None = None
        if micro_batch_size is not None:
            backends.csx.performance.micro_batch_size = None if micro_batch_size == "disable" else micro_batch_size
        if cs_config is not None and isinstance(self.backend, CsxBackend):
            cs_config.set_flags()
            self.backend.use_cluster(cs_config.cluster_config())

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Generator[Any]:
        loop = self._loop()
        record_loop(loop)
        return loop

    def _loop(self) -> Generator[Any]:
        _check_runs_steps()
        check_not_nested()  # before anything changes that belongs to the open loop
        self._artifact_dir = new_artifact_dir(self.backend.artifact_dir).absolute()  # the script may change its folder
        self._profiler = Profiler(self._artifact_dir, self._activities)
        for optimizer in state.registered("optimizer"):
            optimizer.remake_state()
            optimizer.fit_beta_powers()
        execution = self.make_execution()
        self._iteration = -1
        self._is_stopped = False
        try:
            with enter(execution), closing(execution.batches()) as batches:
                for iteration, batch in zip(range(self.num_steps), batches, strict=True):
                    if self._is_stopped:
                        return
                    self._iteration = iteration
                    if iteration == 0:
                        self.dataloader.batch_size = num_samples(batch)
                    yield batch
            self._iteration = self.num_steps
        except InputError:
            self._iteration = execution.last_step - 1
            raise
        finally:
            if self._iteration >= 0:
                self._profiler.write()

    def stop(self) -> None:
        """Ends the loop after the current step, as `break` does; in a closure, after the step of the closure.

        The states are those after this step: they can be saved, read, and trained on. A Cerebras system runs an
        execution to its last step.

        Example:
            ::

                @cstorch.step_closure
                def stop_when_good(loss):
                    if loss < 0.3:
                        executor.stop()

                for batch in executor:
                    stop_when_good(training_step(batch))
                cstorch.save(model.state_dict(), "model.mdl")
        """
        self._is_stopped = True

    def make_execution(self) -> Execution:
        """Returns the execution that runs the steps."""
        return self.backend.make_execution(self)

    @property
    def profiler(self) -> Profiler:
        """The measurements of the execution, or of the one before; they begin with the loop."""
        return self._profiler

    @property
    def iteration(self) -> int:
        """The current step, from 0; before the loop -1, and after its last step the number of steps."""
        return self._iteration

    @property
    def user_iteration(self) -> int:
        """The current step, from 1: one more than `iteration`."""
        return self.iteration + 1

    @property
    def is_initial_step(self) -> bool:
        """Whether the current step is the first."""
        return self.iteration == 0

    @property
    def on_final_iteration(self) -> bool:
        """Whether the current step is the last, or the loop has ended."""
        return self.user_iteration >= self.num_steps

    @property
    def on_activation_step(self) -> bool:
        """Whether step closures run on the current step."""
        return self.on_final_iteration or self.user_iteration % self.activation_steps == 0

    @property
    def on_checkpoint_step(self) -> bool:
        """Whether the state can be saved on the current step."""
        return self.checkpoint_schedule is not None and self.checkpoint_schedule.match(self.iteration)

    @property
    def checkpoint_steps(self) -> list[int]:
        """The steps, from 1, after which checkpoints can be taken."""
        if self.checkpoint_schedule is None:
            return []
        return [step + 1 for step in takewhile(lambda step: step < self.num_steps, self.checkpoint_schedule)]

    @property
    def cs_config(self) -> CSConfig:
        """The cluster as releases up to 2.2 have it: of the executor if it was given one, else of the backend.

        `precision_opt_level` is the level in effect.
        """
        if self._cs_config is not None:
            config = copy.copy(self._cs_config)
        elif isinstance(self.backend, CsxBackend):
            config = CSConfig.of(self.backend.cluster_config)
        else:
            config = CSConfig()
        config.precision_opt_level = backends.csx.precision.optimization_level
        return config

    @property
    def artifact_dir(self) -> Path:
        """The folder of this execution's artifacts."""
        if self._artifact_dir is None:
            raise UsageError("the executor has no artifacts before it is iterated")
        return self._artifact_dir

    def _repr_html_(self) -> str | None:
        """Returns the compile report of the last loop, for a notebook; None if its step is not compiled."""
        return None if self._artifact_dir is None else inline_report(self._artifact_dir)

    def _steps_to_run(self, num_steps: int | None) -> int:
        if num_steps is None:
            try:
                num_steps = len(self.dataloader)
            except TypeError as error:
                raise ConfigurationError(
                    f"the loader of the input_fn does not know its length ({error}): give the executor num_steps"
                ) from error
            if num_steps < 1:
                raise ConfigurationError("the loader of the input_fn is empty: its length, the number of steps, is 0")
        elif not _is_count(num_steps):
            raise TypeError(f"num_steps must be an int, not {type(num_steps).__name__}")
        if num_steps < 1:
            raise ConfigurationError(f"num_steps must be at least 1, got {num_steps}")
        self.asked_steps = num_steps
        if (run := checked_run()) is not None:
            return min(num_steps, run.settings.steps)
        if num_steps > 1 and not self.backend.is_e2e_execution:
            flag = "validate_only" if self.backend.validate_only else "compile_only"
            warn_user(f"with {flag} one step is traced: num_steps={num_steps} becomes 1")
            return 1
        return num_steps

    def _activation_steps(self, activation_steps: int | None) -> int:
        if activation_steps is None:
            return 1
        if not _is_count(activation_steps):
            raise TypeError(f"activation_steps must be an int, not {type(activation_steps).__name__}")
        if activation_steps < 1:
            raise ConfigurationError(f"activation_steps must be at least 1, got {activation_steps}")
        common = math.gcd(activation_steps, *(step for step in self.checkpoint_steps if step != self.num_steps))
        if common != activation_steps:
            warn_user(
                f"activation_steps={activation_steps} becomes {common}: every checkpoint step is an activation step"
            )
        return common


def _check_runs_steps() -> None:
    """Raises UsageError in a process that only imports a module of the script."""
    if is_imported_again():
        what = "the process of an input_fn" if is_for_input() else "a process that multiprocessing spawns"
        raise UsageError(
            f"at {user_line()} the loop of an executor begins in {what}, which imports the script's module and runs no "
            'steps. Put the training under `if __name__ == "__main__":`, or in a function that the script calls'
        )


def _checkpoint_schedule(checkpoint_steps: int | Schedule | None, num_steps: int) -> Schedule | None:
    if checkpoint_steps is None or isinstance(checkpoint_steps, Schedule):
        return copy.deepcopy(checkpoint_steps)  # what the script changes later does not count
    if not _is_count(checkpoint_steps):
        raise TypeError(f"checkpoint_steps must be an int or a Schedule, not {type(checkpoint_steps).__name__}")
    if checkpoint_steps < 0:
        raise ConfigurationError(f"checkpoint_steps must not be negative, got {checkpoint_steps}")
    return Schedule.every(checkpoint_steps, num_steps) if checkpoint_steps else None


def _activities(kinds: Sequence[type[Activity]] | None) -> tuple[type[Activity], ...]:
    for kind in kinds or ():
        if not isinstance(kind, type) or not issubclass(kind, Activity):
            raise TypeError(f"profiler_activities are classes made from cstorch.utils.profiler.Activity, not {kind!r}")
    return tuple(kinds or ())


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def new_artifact_dir(root: Path) -> Path:
    """Makes the next of root/executors/000001, 000002, ... and points root/executors/latest to it."""
    executors = root / EXECUTIONS
    make_artifact_dir(executors)
    number = 1 + max((int(path.name) for path in executors.iterdir() if path.name.isdecimal()), default=0)
    while True:
        folder = executors / f"{number:06d}"
        try:
            folder.mkdir()
            break
        except FileExistsError:  # another process was faster
            number += 1
    link = executors / "latest"
    temporary = executors / f"latest.{folder.name}"
    temporary.symlink_to(folder.name)
    temporary.replace(link)
    return folder


__all__ = ["DataExecutor", "MbsSetting"]
