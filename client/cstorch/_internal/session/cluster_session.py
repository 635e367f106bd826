"""The script's session with a cluster: the embedded cluster if there is one, and one job at a time."""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, TypeVar

from cstorch._internal.session.cluster_state import ClusterState
from cstorch._internal.session.command_line import command_line
from cstorch._internal.session.connecting import connect
from cstorch._internal.session.embedded import EmbeddedCluster
from cstorch._internal.session.job import FORKED, ClientJob
from cstorch._internal.session.management import Management
from cstorch._internal.session.staging import stage
from cstorch._internal.tracing.provenance import warn_user
from cstorch._internal.tracing.random_counter import random_counter
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.distributed.run_settings import execution_strategy
from cstorch.errors import ClusterUnreachableError, CstorchError, UsageError
from waferbox import deadlines
from wsc.v1 import initialisation_pb2, node_pb2

logger = logging.getLogger("cstorch.session")

Result = TypeVar("Result")

OPENING_SECONDS = 5.0
LOCKED = ("mgmt_address", "num_csx", "num_workers_per_csx", "max_wgt_servers", "max_act_per_csx")


def outcome(future: Future[Result]) -> Result:
    """Returns the result of a thread of this package; its error is raised without the frames of that thread."""
    # No timeout: every wait of such a thread has a deadline.
    error = future.exception()
    if error is not None:
        raise error.with_traceback(None) from None
    return future.result()


def _in_thread(name: str, call: Callable[[], Result]) -> Future[Result]:
    """Makes a call in a daemon thread of that name; the future has its result or its error."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:  # noqa: BLE001  the script's thread raises it
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def _check_answers(management: Management) -> None:
    """Checks that management answers, before the script builds its model and traces it."""

    def check() -> None:
        silent = deadlines.JOB_CREATION.silent
        connect(management.address, "management service", management.token(), silent_seconds=silent).close()

    try:
        outcome(_in_thread("cstorch connecting", check))  # as an interrupt within gRPC can leave its channel open
    except ClusterUnreachableError as error:
        raise ClusterUnreachableError(f"{error}; the address is from {management.source}") from None


class ClusterSession:
    """The script's session with a cluster; it owns the job and the embedded cluster.

    Used by the script's thread; a thread of its own opens the job.

    Args:
        config: What the job requires of the cluster.
        compile_dir: The folder of the cluster for artifacts, below its cache root unless absolute.
        cluster: The management service of the cluster, or an embedded cluster, which the session owns.

    Raises:
        ClusterUnreachableError: No management service answers at the address.
        UsageError: This process was forked from one with an open session.
    """

    _open_in: ClassVar[int] = 0  # the process with an open session; 0: there is none

    def __init__(self, config: ClusterConfig, compile_dir: str, cluster: Management | EmbeddedCluster) -> None:
        self._config = replace(config)  # a copy: the script may change its own
        # Those whose later calls were traced, with the Python values whose change made no difference.
        self.checked_programs: dict[tuple[Hashable, bytes], set[str]] = {}
        self._first_trains: bool | None = None  # whether the first compiled step trains
        self._compile_dir = compile_dir
        self._strategy = execution_strategy()  # of the job
        self._opening: Future[ClientJob] | None = None
        self._job: ClientJob | None = None
        self._state: ClusterState | None = None
        self._management = cluster if isinstance(cluster, Management) else None
        self._embedded = cluster if isinstance(cluster, EmbeddedCluster) else None
        self._process = os.getpid()
        if ClusterSession._open_in not in (0, self._process):
            if self._embedded is not None:
                self._embedded.stop()
            raise UsageError(FORKED)
        if self._management is not None:
            _check_answers(self._management)
        ClusterSession._open_in = self._process
        if self._embedded is not None:
            self.open_in_background()

    @property
    def is_parents(self) -> bool:
        """Whether this process was forked from the one with the session, in which alone gRPC works."""
        return os.getpid() != self._process

    def check_compile(self, config: ClusterConfig, trains: bool) -> None:
        """Checks a compile before it begins; warns of a training step after an evaluation.

        Args:
            config: The settings that the backend has now.
            trains: Whether the step trains.

        Raises:
            UsageError: Settings that the first compile locks have changed.
        """
        for name in LOCKED:
            before, now = getattr(self._config, name), getattr(config, name)
            if before != now:
                raise UsageError(
                    f"{name} is {now!r} and was {before!r}: the cluster configuration is locked in on the first "
                    "compile job, and is global across all executions. Give the backend a ClusterConfig with the most "
                    "that any execution needs, or use another process"
                )
        if trains and self._first_trains is False:
            warn_user(
                "a training step is compiled after an evaluation. The first compile locks in what a job has of the "
                "cluster, so on the real system the training might not find enough: train before you evaluate"
            )
        self._first_trains = trains if self._first_trains is None else True

    @property
    def log_path(self) -> Path | None:
        """The log file of the embedded cluster; None without one."""
        return self._embedded.log if self._embedded is not None else None

    def open_in_background(self) -> None:
        """Begins to open a job, unless there is a live one with the execution strategy of the script.

        Raises:
            UsageError: This process was forked from the one with the session.
        """
        if self.is_parents:
            raise UsageError(FORKED)
        strategy = execution_strategy()
        if strategy != self._strategy:
            self.end_job()
            self._strategy = strategy
        if self._opening is not None or (self._job is not None and self._job.alive):
            return
        self._opening = _in_thread("cstorch job opening", self._open)

    def prepare_input(self, request: node_pb2.PrepareInput) -> Future[None]:
        """Sends the input_fn of an execution to the workers, in the background, as soon as there is a job.

        Returns:
            The future to wait for before the execution begins; it raises the error of the call.
        """
        return self._with_job("cstorch input", lambda job: job.prepare_input(request))

    def stage(self, programs: Mapping[str, initialisation_pb2.InitialProgram]) -> Future[dict[str, int]]:
        """Orders initial values from MemoryX, in the background, once there is a job.

        Args:
            programs: The program of each value, by the name of its state.

        Returns:
            The shard of each staged value; values without a shard were not staged.
        """
        return self._with_job("cstorch initialisation", lambda job: stage(job, programs))

    def _with_job(self, name: str, call: Callable[[ClientJob], Result]) -> Future[Result]:
        """Makes a call with the job, as soon as there is one, in a thread of that name."""
        self.open_in_background()
        opening, job = self._opening, self._job

        def run() -> Result:
            target = job if opening is None else opening.result()
            assert target is not None
            return call(target)

        return _in_thread(name, run)

    def _open(self) -> ClientJob:
        management = self._management
        if management is None:
            assert self._embedded is not None
            management = Management(address=self._embedded.management(), source="the embedded cluster", is_own=True)
        job = ClientJob(
            management.address,
            self._config,
            self._compile_dir,
            self._strategy,
            management.token(),
            command=command_line(sys.argv),
        )
        logger.debug("opened job %s at %s", job.name, management.address)
        return job

    def job(self) -> ClientJob:
        """Returns the live job; opens one if there is none.

        Raises:
            ClusterError: The cluster cannot be reached, did not start, or refuses the job.
        """
        if self._job is not None and self._job.alive and self._opening is None:
            return self._job
        self.open_in_background()
        assert self._opening is not None
        opening, self._opening = self._opening, None
        try:
            job = outcome(opening)
        except KeyboardInterrupt:
            self._opening = opening
            raise
        self._drop_job()
        self._job = job
        self._state = ClusterState(lane=self._config.lane, job=job, gateway=job.gateway)
        return job

    def end_left_execution(self) -> None:
        """Ends the execution whose loop the script has left, before another begins.

        Raises:
            ClusterError: The cluster failed.
        """
        if self._state is not None:
            self._state.end_left()

    @property
    def state(self) -> ClusterState:
        """The states of the job that `job` returned last."""
        assert self._state is not None
        return self._state

    def abandon_job(self, reason: str) -> None:
        """Cancels the job after an execution that failed, whose states are of no known step.

        Args:
            reason: The error message of later reads of these states.
        """
        if self._state is not None:
            self._lose_state(reason)
        if self._job is not None:
            self._job.cancel()
            self._job = None

    def _lose_state(self, reason: str) -> None:
        self.state.lose(reason)
        # The script must load its weights again; the sequence of random numbers may continue anywhere.
        random_counter.forget()

    def end_job(self) -> None:
        """Ends the job, after all its states are fetched; `job` opens another.

        Raises:
            ClusterError: The cluster failed.
        """
        if self._opening is not None:
            opening, self._opening = self._opening, None
            with contextlib.suppress(CstorchError):  # opening the next job raises the same error
                outcome(opening).close()
        if self._state is not None and self._job is not None and self._job.alive:
            self._state.fetch_all()
        self._drop_job()

    def _drop_job(self) -> None:
        is_left = self._state is not None and self._state.is_left
        if self._state is not None:
            failure = None if self._job is None else self._job.failure
            cause = "" if failure is None else f": {failure}"
            self._lose_state(f"the job that held it has ended{cause}")
            self._state = None
        if self._job is not None:
            if is_left:
                self._job.cancel()
            else:
                self._job.close()
            self._job = None

    def close(self) -> None:
        """Ends the job, and the embedded cluster with all its processes. No effect in a forked process."""
        if self.is_parents:
            return
        try:
            if self._opening is not None:
                opening, self._opening = self._opening, None
                if self._embedded is not None:
                    self._embedded.stop()  # ends the wait of the thread
                with contextlib.suppress(TimeoutError):  # the thread and its job end with the process
                    if opening.exception(OPENING_SECONDS) is None:
                        # Not close: a coordinator that does not have the session yet would not notice its end.
                        opening.result().cancel()
            self._drop_job()
        finally:
            ClusterSession._open_in = 0
            if self._embedded is not None:
                embedded, self._embedded = self._embedded, None
                embedded.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The cluster of an execution, and the stage with which the execution ends there.

    config: The settings that the backend has now.
    session: The session with the cluster; None if the execution ends with the lowering.
    compile_only: Whether the execution ends with the compile.
    """

    config: ClusterConfig
    session: ClusterSession | None
    compile_only: bool
