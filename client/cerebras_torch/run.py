"""The run of this process: the script's settings, and the number of steps so far."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cstorch import amp
from cstorch._internal import state
from cstorch._internal.execution import current_execution
from cstorch.backend import Backend, CsxBackend, current_backend, has_backend
from cstorch.backends.open_settings import OpenSettings
from cstorch.errors import ConfigurationError, UsageError
from cstorch.metrics import Metric
from cstorch.utils.data import DataExecutor
from cstorch.utils.tracker import RateTracker

logger = logging.getLogger("cstorch.progress")


@dataclass(slots=True, kw_only=True)
class Environment:
    """The arguments of cbtorch.initialize: `cbtorch.env()`. Scripts set and read weight_streaming_mode."""

    service_workdir: str
    compile_dir: str | None
    appliance: bool
    weight_streaming_mode: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The arguments of cm.set_run_config. last_step: counted over the whole process; None: there is no end."""

    last_step: int | None = None
    checkpoint_steps: int = 0
    fetch_steps: int = 1

    def steps_left(self, steps: int) -> int | None:
        """Returns the number of steps after so many; None: there is no end."""
        return None if self.last_step is None else max(self.last_step - steps, 0)


class InitTracker:
    """Logs how long the parts of a script's preparation take: `cbtorch.state().init_tracker`."""

    @contextmanager
    def entry(self, name: str) -> Iterator[None]:
        """Measures the part of that name."""
        began = time.monotonic()
        yield
        logger.debug("Preparation: %s took %.1f s", name, time.monotonic() - began)


@dataclass(slots=True, kw_only=True)
class ScriptRun:
    """The state of the process from `initialize` on: `cbtorch.state()`."""

    environment: Environment
    backend: Backend
    config: RunConfig = field(default_factory=RunConfig)
    full_config: OpenSettings = field(default_factory=OpenSettings)
    init_tracker: InitTracker = field(default_factory=InitTracker)
    executor: DataExecutor | None = None  # of the newest pass over a loader
    steps: int = 0

    @property
    def modules(self) -> list[Any]:
        """The models that cbtorch.module has taken."""
        return list(state.registered("model"))

    @property
    def metrics(self) -> list[Metric]:
        """The metrics of the process."""
        return list(state.registered("metric"))

    @property
    def mixed_precision(self) -> bool:
        """Whether steps compute in a half type."""
        return amp.mixed_precision()

    @property
    def rate_tracker(self) -> RateTracker | None:
        """The tracker of the newest pass over a loader; None before the first."""
        return None if self.executor is None else self.executor.profiler.rate_tracker.tracker

    @property
    def progress_tracker(self) -> None:
        """None: the making of a model and an optimizer has no progress display."""
        return None

    @property
    def is_inside_execution_loop(self) -> bool:
        """Whether the script is in a loop over a loader."""
        return current_execution() is not None

    def track_object(self, obj: Any) -> None:
        """Makes the cluster compute the tensors of a nest in each step, even if no step closure needs them."""
        from cstorch._internal.session.execution.loop import LoopExecution  # the CPU needs no gRPC

        execution = current_execution()
        if isinstance(execution, LoopExecution):
            execution.track(obj)

    def set_config(self, num_steps: int, checkpoint_steps: int, fetch_steps: int) -> None:
        """Sets the number of steps that follow, and the steps with state and values.

        Raises:
            ConfigurationError: There are no steps, or an interval is negative.
        """
        if num_steps < 1 or checkpoint_steps < 0 or fetch_steps < 0:
            raise ConfigurationError(
                "set_run_config takes a number of steps of at least 1 and two intervals that are not negative, got "
                f"{num_steps}, {checkpoint_steps} and {fetch_steps}"
            )
        self.config = RunConfig(
            last_step=self.steps + num_steps, checkpoint_steps=checkpoint_steps, fetch_steps=fetch_steps or num_steps
        )


_run: ScriptRun | None = None


def begin(environment: Environment) -> None:
    """Begins the run of the backend that was made for it."""
    global _run
    _run = ScriptRun(environment=environment, backend=current_backend())


def current_run() -> ScriptRun:
    """Returns the run of this process: `cbtorch.state()`.

    Scripts of release 1.9 make a backend and do not call `initialize`, while their models set compiler settings in
    `cbtorch.state().full_config`: so a backend alone begins a run as well.

    Raises:
        UsageError: Nothing is initialized yet, and there is no backend.
    """
    if not has_backend():
        raise UsageError("begin with cbtorch.initialize(cs_ip=...): it says where this process runs")
    backend = current_backend()
    if _run is None or _run.backend is not backend:
        begin(
            Environment(
                service_workdir=os.fspath(backend.artifact_dir),
                compile_dir=backend.compile_dir if isinstance(backend, CsxBackend) else None,
                appliance=backend.is_csx,
            )
        )
    assert _run is not None
    return _run


def current_environment() -> Environment:
    """Returns the arguments of `initialize`: `cbtorch.env()`.

    Raises:
        UsageError: Nothing is initialized yet.
    """
    return current_run().environment
