"""The script's session with a cluster: the embedded cluster if there is one, and the one job at a time."""

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from cstorch._internal.session.cluster_state import ClusterState
from cstorch._internal.session.embedded import EmbeddedCluster
from cstorch._internal.session.job import ClientJob
from cstorch._internal.session.staging import stage
from cstorch._internal.tracing.random_counter import random_counter
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.distributed.run_settings import execution_strategy
from cstorch.errors import CstorchError, UsageError
from waferbox.security.tokens import Kind, own_clusters_token
from wsc.v1 import initialisation_pb2, node_pb2

logger = logging.getLogger("cstorch.session")

Result = TypeVar("Result")

OPENING_SECONDS = 5.0
LOCKED = ("mgmt_address", "num_csx", "num_workers_per_csx", "max_wgt_servers", "max_act_per_csx")


def outcome(future: Future[Result]) -> Result:
    """What a thread of ours came to; its error is raised without the frames of that thread.

    Every wait of such a thread has a deadline.
    """
    error = future.exception()
    if error is not None:
        raise error.with_traceback(None) from None
    return future.result()


class ClusterSession:
    """Owns the embedded cluster and the job. Used by the script's thread; the job is opened by a thread of ours.

    Args:
        config: of the cluster.
        compile_dir: where the cluster keeps artifacts, below its cache root unless absolute.
        embedded: the cluster that config leaves open; it is the session's.
    """

    def __init__(self, config: ClusterConfig, compile_dir: str, embedded: EmbeddedCluster | None) -> None:
        self._config = replace(config)  # as it is now, whatever the script does to it later
        self.checked_programs: set[tuple[Hashable, bytes]] = set()  # whose later calls were traced
        self._first_trains: bool | None = None  # whether the first step that was compiled trains
        self._compile_dir = compile_dir
        self._strategy = execution_strategy()  # of the job
        self._opening: Future[ClientJob] | None = None
        self._job: ClientJob | None = None
        self._state: ClusterState | None = None
        self._embedded = embedded
        if embedded is not None:
            self.open_in_background()

    def check_compile(self, config: ClusterConfig, trains: bool) -> None:
        """To be called before a compile, with the settings that the backend has by now.

        Args:
            config: must ask for what it asked for when the session began.
            trains: whether the step trains; a training step after an evaluation is warned of.

        Raises:
            UsageError: it asks for something else.
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
            warnings.warn(
                "a training step is compiled after an evaluation. The first compile locks in what a job has of the "
                "cluster, so on the real system the training might not find enough: train before you evaluate",
                stacklevel=2,
            )
        self._first_trains = trains if self._first_trains is None else True

    @property
    def log_path(self) -> Path | None:
        """Where an embedded cluster writes its log."""
        return self._embedded.log if self._embedded is not None else None

    def open_in_background(self) -> None:
        """Begins to open a job, unless there is one for the strategy that the script has chosen."""
        strategy = execution_strategy()
        if strategy != self._strategy:
            self._end_job()
            self._strategy = strategy
        if self._opening is not None or (self._job is not None and self._job.alive):
            return
        opening: Future[ClientJob] = Future()
        self._opening = opening

        def open_job() -> None:
            try:
                opening.set_result(self._open())
            except Exception as error:  # noqa: BLE001  whatever it is, job() raises it in the script's thread
                opening.set_exception(error)

        threading.Thread(target=open_job, name="cstorch job opening", daemon=True).start()

    def prepare_input(self, request: node_pb2.PrepareInput) -> Future[None]:
        """Gives an execution's input_fn to the workers of the job, as soon as there is one, while the script goes on.

        Returns:
            What is to be waited for before the execution begins; it raises what went wrong.
        """
        return self._with_job("cstorch input", lambda job: job.prepare_input(request))

    def stage(self, programs: Mapping[str, initialisation_pb2.InitialProgram]) -> Future[dict[str, int]]:
        """Lets MemoryX make initial values as soon as there is a job, while the script goes on.

        Args:
            programs: by name of the state.

        Returns:
            The shard on which each value is staged; what is not named was not.
        """
        return self._with_job("cstorch initialisation", lambda job: stage(job, programs))

    def _with_job(self, name: str, call: Callable[[ClientJob], Result]) -> Future[Result]:
        """Calls with the job, as soon as there is one, in a thread of that name."""
        self.open_in_background()
        opening, job = self._opening, self._job
        done: Future[Result] = Future()

        def run() -> None:
            try:
                target = job if opening is None else opening.result()
                assert target is not None
                done.set_result(call(target))
            except Exception as error:  # noqa: BLE001  whatever it is, the future raises it in the script's thread
                done.set_exception(error)

        threading.Thread(target=run, name=name, daemon=True).start()
        return done

    def _open(self) -> ClientJob:
        management = self._config.management if self._embedded is None else self._embedded.management()
        assert management is not None
        token = None if self._embedded is None else own_clusters_token(Kind.USER)
        job = ClientJob(management, self._config, self._compile_dir, self._strategy, token)
        logger.debug("opened job %s at %s", job.name, management)
        return job

    def job(self) -> ClientJob:
        """The live job; opens one if there is none.

        Raises:
            ClusterError: the cluster cannot be reached, did not start, or refuses.
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

    @property
    def state(self) -> ClusterState:
        """The state on the cluster, of the job that `job` returned last."""
        assert self._state is not None
        return self._state

    def abandon_job(self, reason: str) -> None:
        """Cancels the job: an execution did not come to its end, so nobody knows what its state is.

        Args:
            reason: what reading the lost state is answered with.
        """
        if self._state is not None:
            self._lose_state(reason)
        if self._job is not None:
            self._job.cancel()
            self._job = None

    def _lose_state(self, reason: str) -> None:
        self.state.lose(reason)
        # Unlike weights, which the script must load again, random numbers can go on from anywhere.
        random_counter.forget()

    def _end_job(self) -> None:
        """Ends the job, which has other nodes than the next one needs; what it has of the state comes here."""
        if self._opening is not None:
            opening, self._opening = self._opening, None
            with contextlib.suppress(CstorchError):  # the next job will not open either, and say so
                outcome(opening).close()
        if self._state is not None and self._job is not None and self._job.alive:
            self._state.fetch_all()
        self._drop_job()

    def _drop_job(self) -> None:
        if self._state is not None:
            self._lose_state("the job that held it has ended")
            self._state = None
        if self._job is not None:
            self._job.close()
            self._job = None

    def close(self) -> None:
        """Ends the job, and the embedded cluster with all its processes."""
        try:
            if self._opening is not None:
                opening, self._opening = self._opening, None
                if self._embedded is not None:
                    self._embedded.stop()  # what the thread waits for
                with contextlib.suppress(TimeoutError):  # the thread and its job end with the process
                    if opening.exception(OPENING_SECONDS) is None:
                        opening.result().cancel()  # its session may be too young for its end to be noticed
            self._drop_job()
        finally:
            if self._embedded is not None:
                embedded, self._embedded = self._embedded, None
                embedded.stop()


# --- What executions of a backend run on ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A cluster, and how far an execution goes on it.

    config: as the script has it by now.
    session: with the cluster; None if the execution ends with the lowering.
    compile_only: whether it ends with the compile.
    """

    config: ClusterConfig
    session: ClusterSession | None
    compile_only: bool
