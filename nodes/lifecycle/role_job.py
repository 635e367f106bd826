"""What wafers, SwarmX and MemoryX do alike with the commands of a job: load a program, run it in a thread, drop it."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from interconnect.links.cancellation import CancellationToken
from interconnect.links.hub import Hub
from interconnect.links.link import Link
from nodes.lifecycle.execution import Execution
from nodes.lifecycle.node_job import JobContext, JobFailure, LinkKey
from nodes.steps.schedule import StepSchedule, check_groups
from nodes.telemetry.node_report import node_report
from nodes.telemetry.progress import Progress, Recorder
from nodes.telemetry.watchdog import ProgressWatchdog, Usage, hang_seconds
from wsc.v1 import node_pb2, observation_pb2

logger = logging.getLogger(__name__)

HUNG_STOP_SECONDS = 2.0  # that an execution which is known to hang gets to end nevertheless


class StepProgram(Protocol):
    """A plan part made ready to run."""

    @property
    def progress(self) -> Progress:
        """How far it is; read from any thread."""

    def run(self, schedule: StepSchedule) -> Mapping[str, float]:
        """All steps of an execution; returns the seconds by what they were spent on."""

    def interrupt(self) -> None:
        """Make waits of run that are not the hub's raise Stopped. From any thread."""

    def close(self) -> None:
        """Drop buffers. run has returned, and the links are closed."""


class RoleJob(ABC):
    """A NodeJob of a role with a step program."""

    def __init__(self, context: JobContext) -> None:
        self.context = context
        self._number: int | None = None
        self._hub: Hub | None = None
        self._links: dict[LinkKey, Link] = {}
        self._program: StepProgram | None = None
        self._execution: Execution | None = None
        self._watchdog: ProgressWatchdog | None = None
        self._hangs = False
        self._last_load = node_pb2.Load()  # the last that brought a plan

    @abstractmethod
    def compile(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> StepProgram:
        """The program of a Load. The links are open, and in the hub."""

    def missing_states(self) -> Sequence[str]:
        """Which states of the program that was just compiled nobody has written."""
        return ()

    @property
    def running(self) -> bool:
        """Whether steps are being run."""
        return self._execution is not None and self._execution.running

    @property
    def running_execution(self) -> int | None:
        """The number of the execution whose steps are being run."""
        return self._number if self.running else None

    def prepare_input(self, request: node_pb2.PrepareInput) -> None:
        raise JobFailure(node_pb2.Failure.KIND_INTERNAL, f"{self.context.node} takes no input function")

    def load(self, request: node_pb2.Load, cancellation: CancellationToken) -> Sequence[str]:
        self._drop()
        self._complete(request)
        plans = (request.wafer, request.memoryx, request.swarmx, request.pipeline)
        for groups in (plan.groups for plan in plans):
            check_groups(groups)
        begin = time.monotonic()
        self._links = self.context.open_links(request.links, cancellation)
        self._hub = Hub()
        for link in self._links.values():
            self._hub.add(link)
        self._program = self.compile(request, self._hub, self._links)
        self._number = request.execution
        logger.info("execution %d is loaded, after %.2f s", request.execution, time.monotonic() - begin)
        return self.missing_states()

    def start(self, request: node_pb2.Start) -> None:
        program, hub = self._program, self._hub
        if program is None or hub is None or request.execution != self._number or self._execution is not None:
            raise JobFailure(
                node_pb2.Failure.KIND_INTERNAL, f"execution {request.execution} cannot start: {self._number} is loaded"
            )
        schedule = StepSchedule.from_start(request)

        def interrupt() -> None:
            hub.stop()
            program.interrupt()

        program.progress.begin(schedule.done_steps)
        self._execution = Execution(self.context, request.execution, lambda: program.run(schedule), interrupt)
        self._watchdog = ProgressWatchdog(hang_seconds())
        self._execution.start()
        done = f", of which {request.done_steps} are done" if request.done_steps else ""
        logger.info("execution %d begins: %d steps%s", request.execution, request.num_steps, done)

    def stop(self, execution: int) -> None:
        if execution == self._number:
            self._drop()

    def release_snapshot(self, step: int) -> None:
        raise JobFailure(node_pb2.Failure.KIND_INTERNAL, f"{self.context.node} keeps no snapshots")

    def keep_recovery_point(self, request: node_pb2.KeepRecoveryPoint) -> None:  # noqa: B027 - a default
        """A role that has nothing which the job would go on from does nothing."""

    def drop_recovery_points(self, before: int) -> None:  # noqa: B027 - a default
        """A role that keeps no recovery points does nothing."""

    def copy_recovery_point(self, request: node_pb2.CopyRecoveryPoint) -> None:
        raise JobFailure(node_pb2.Failure.KIND_INTERNAL, f"{self.context.node} keeps no recovery points")

    def report(self) -> observation_pb2.NodeReport | None:
        # From another thread: what is dropped meanwhile still has its figures.
        program, number, links = self._program, self._number, self._links
        if program is None or number is None or self._execution is None:
            return None
        return node_report(self.context.node, number, program.progress, links.values())

    def check_progress(self) -> None:
        # From another thread, as report.
        program, hub, execution, watchdog = self._program, self._hub, self._execution, self._watchdog
        if program is None or hub is None or execution is None or watchdog is None or not execution.running:
            return
        moved = sum(link.received_bytes + link.sent_bytes for link in list(self._links.values()))
        hang = watchdog.hang(
            program.progress, Usage.now(), waits=hub.waiting or program.progress.waits, moved_bytes=moved
        )
        if hang:
            self._watchdog, self._hangs = None, True
            self.context.fail(
                node_pb2.Failure.KIND_INTERNAL,
                f"{self.context.node} hangs in step {program.progress.step + 1}: {hang}",
                execution.stack(),
                is_unfit=True,
            )

    def trace(self, request: observation_pb2.Trace) -> None:
        recorder = Recorder(self.context.node, request, self.context.emit)
        if self._program is None or request.execution != self._number or not self.running:
            recorder.close()
            return
        self._program.progress.end_trace()
        self._program.progress.recorder = recorder

    def close(self) -> None:
        self._drop()

    def _complete(self, request: node_pb2.Load) -> None:
        """Give a Load that brings no plan that of the Load before."""
        if not request.same_plan:
            self._last_load = request
        elif (plan := self._last_load.WhichOneof("plan")) is not None:
            getattr(request, plan).CopyFrom(getattr(self._last_load, plan))

    def _drop(self) -> None:
        """End the execution, whatever it does, and drop what belongs to it."""
        if self._execution is not None:
            self._execution.stop(HUNG_STOP_SECONDS if self._hangs else hang_seconds())
        if self._program is not None:
            self._program.progress.end_trace()  # of one that was asked for when the steps were over
        if self._hub is not None:
            self._hub.close()
        for link in self._links.values():
            link.close()
        if self._program is not None:
            self._program.close()
        self._number = self._hub = self._program = self._execution = self._watchdog = None
        self._links = {}
