"""The commands of a job as all roles run them: load a program, run it in a thread, report its end, drop it."""

import errno
import logging
import resource
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from waferbox import deadlines, settings
from waferbox.host.memory import is_refused_memory
from waferbox.host.process_limits import thread_shortage
from waferbox.host.threads import CancellationToken, GuardedThread
from waferbox.links.hub import Hub, Stopped
from waferbox.links.link import Link, LinkLost
from waferbox.runtime.node_job import JobContext, JobFailure, LinkKey
from waferbox.runtime.progress import Progress, ProgressWatchdog, Recorder, Usage, node_report
from waferbox.runtime.schedule import StepSchedule, check_groups
from wsc.v1 import node_pb2, observation_pb2

# --- The thread of an epoch -------------------------------------------------------------------------------------------


class StepThreadHangs(RuntimeError):
    """Raised when the thread of an execution does not end: the process must exit."""

    def __init__(self, message: str, stack: str) -> None:
        """stack: the stack of the thread, as in a traceback."""
        super().__init__(message)
        self.stack = stack


class StepThread:
    """The thread that runs the steps of an epoch, once, and reports its end to the coordinator.

    The report is Finished, with the seconds that `steps` returns, or a Failure: after LinkLost of KIND_NODE with the
    peer, after JobFailure of its kind, after any other exception, which is a defect, of KIND_INTERNAL. Stopped is not
    reported, as `stop` has caused it.
    """

    def __init__(
        self, context: JobContext, epoch: int, steps: Callable[[], Mapping[str, float]], interrupt: Callable[[], None]
    ) -> None:
        """interrupt: makes every wait in `steps` raise Stopped, on links and elsewhere."""
        self._context = context
        self._epoch = epoch
        self._steps = steps
        self._interrupt = interrupt
        self._interrupted = False
        self._steps_over = False
        self._thread = GuardedThread(self._run, name=f"execution-{context.node}", on_defect=self._failed)

    def start(self) -> None:
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether steps run; False before their end is reported."""
        return self._thread.is_alive() and not self._steps_over

    def stop(self, seconds: float) -> None:
        """Interrupts the thread and waits for its end. No failure is reported after the call. May be called again.

        Raises:
            StepThreadHangs: the thread has not ended within so many seconds.
        """
        self._interrupted = True
        self._interrupt()
        if self._thread.ident is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                raise StepThreadHangs(f"{self._thread.name} did not end within {seconds:g} s", self.stack())

    def stack(self) -> str:
        """Returns the stack of the thread, as in a traceback; empty if it has ended."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def _run(self) -> None:
        try:
            seconds = self._run_steps()
        except Stopped:
            return
        except (JobFailure, LinkLost) as error:
            self._failed(error)
        else:
            finished = node_pb2.Finished(epoch=self._epoch, seconds=seconds)
            self._context.emit(node_pb2.AttachResponse(finished=finished))

    def _run_steps(self) -> Mapping[str, float]:
        try:
            return self._steps()
        finally:
            self._steps_over = True

    def _failed(self, error: Exception) -> None:
        if not self._interrupted:
            report_failure(self._context, error)


def failure_of(node: str, error: Exception) -> node_pb2.Failure:
    """Returns the failure of a node's job after an exception has ended an execution or a command."""
    match error:
        case JobFailure():
            failure = node_pb2.Failure(
                kind=error.kind,
                message=error.message,
                traceback=error.traceback,
                peer=error.peer,
                is_unfit=error.is_unfit,
                step=error.step,
            )
        case LinkLost():
            failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_NODE, message=str(error), peer=error.peer)
        case StepThreadHangs():
            message = f"{node} hangs: {error}"
            kind = node_pb2.Failure.KIND_INTERNAL
            failure = node_pb2.Failure(kind=kind, message=message, traceback=error.stack, is_unfit=True)
        case OSError(errno=errno.EMFILE | errno.ENFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            message = f"{error.strerror}: a process may have {limit}. Raise that, with `ulimit -n`, and start again"
            failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_USER, message=message)
        case OSError(errno=errno.EFBIG):
            message = error.strerror or str(error)
            failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_USER, message=message)
        case RuntimeError() if message := thread_shortage(error):
            failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_USER, message=message)
        case _:
            message, is_unfit = f"{type(error).__name__}: {error}", is_refused_memory(error)
            failure = node_pb2.Failure(
                kind=node_pb2.Failure.KIND_INTERNAL,
                message=f"{node} was refused memory: {message}" if is_unfit else message,
                traceback="".join(traceback.format_exception(error)),
                is_unfit=is_unfit,
            )
    failure.node = node
    return failure


def report_failure(context: JobContext, error: Exception) -> None:
    """Reports an exception that has ended an execution or a command to the coordinator."""
    context.emit(node_pb2.AttachResponse(failed=failure_of(context.node, error)))


# --- The job ----------------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


class StepProgram(Protocol):
    """A role's part of a plan, ready to run."""

    @property
    def progress(self) -> Progress:
        """The progress of the execution; read from any thread."""

    def run(self, schedule: StepSchedule) -> Mapping[str, float]:
        """Runs all steps of an epoch. Returns the seconds by what they were spent on."""

    def interrupt(self) -> None:
        """Makes waits of `run` that are not the hub's raise Stopped. From any thread."""

    def close(self) -> None:
        """Frees the buffers, after `run` has returned and the links are closed."""


class RoleJob(ABC):
    """A NodeJob with a step program. Commands come from one thread; reports and checks are made in another."""

    def __init__(self, context: JobContext) -> None:
        self.context = context
        self._epoch: int | None = None
        self._hub: Hub | None = None
        self._links: dict[LinkKey, Link] = {}
        self._program: StepProgram | None = None
        self._execution: StepThread | None = None
        self._watchdog: ProgressWatchdog | None = None
        self._hangs = False
        self._last_load = node_pb2.Load()  # the last that brought a plan

    @abstractmethod
    def compile(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> StepProgram:
        """Returns the program of a Load. The links are open, and in the hub."""

    def missing_states(self) -> Sequence[str]:
        """Returns the states of the program that was compiled last which have no value."""
        return ()

    @property
    def running(self) -> bool:
        """Whether steps run."""
        return self._execution is not None and self._execution.running

    @property
    def running_epoch(self) -> int | None:
        """The number of the epoch whose steps run; None: none run."""
        return self._epoch if self.running else None

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
        self._epoch = request.epoch
        logger.info("epoch %d is loaded, after %.2f s", request.epoch, time.monotonic() - begin)
        return self.missing_states()

    def start(self, request: node_pb2.Start) -> None:
        program, hub = self._program, self._hub
        if program is None or hub is None or request.epoch != self._epoch or self._execution is not None:
            raise JobFailure(
                node_pb2.Failure.KIND_INTERNAL, f"epoch {request.epoch} cannot start: {self._epoch} is loaded"
            )
        schedule = StepSchedule.from_start(request)

        def run() -> Mapping[str, float]:
            try:
                return program.run(schedule)
            except JobFailure as error:
                if error.kind == node_pb2.Failure.KIND_INPUT and not error.step:
                    error.step = program.progress.step + 1
                raise

        def interrupt() -> None:
            hub.stop()
            program.interrupt()

        program.progress.begin(schedule.done_steps)
        self._execution = StepThread(self.context, request.epoch, run, interrupt)
        self._watchdog = ProgressWatchdog(settings.HANG_SECONDS.get())
        self._execution.start()
        done = f", of which {request.done_steps} are done" if request.done_steps else ""
        logger.info("epoch %d begins: %d steps%s", request.epoch, request.num_steps, done)

    def stop(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._drop()

    def release_snapshot(self, step: int) -> None:
        raise JobFailure(node_pb2.Failure.KIND_INTERNAL, f"{self.context.node} keeps no snapshots")

    def keep_recovery_point(self, request: node_pb2.KeepRecoveryPoint) -> None:  # noqa: B027 - a default
        """Does nothing, in a role from which the job resumes nothing."""

    def drop_recovery_points(self, before: int) -> None:  # noqa: B027 - a default
        """Does nothing, in a role without recovery points."""

    def copy_recovery_point(self, request: node_pb2.CopyRecoveryPoint) -> None:
        raise JobFailure(node_pb2.Failure.KIND_INTERNAL, f"{self.context.node} keeps no recovery points")

    def report(self) -> observation_pb2.NodeReport | None:
        # From another thread: a program that is dropped meanwhile still has its figures.
        program, epoch, hub, links = self._program, self._epoch, self._hub, self._links
        if program is None or epoch is None or hub is None or self._execution is None:
            return None
        return node_report(self.context.node, epoch, program.progress, links.values(), hub.waits_for)

    def check_progress(self) -> None:
        # From another thread, as report.
        program, hub, execution, watchdog = self._program, self._hub, self._execution, self._watchdog
        if program is None or hub is None or execution is None or watchdog is None or not execution.running:
            return
        moved = sum(link.received_bytes + link.sent_bytes for link in list(self._links.values()))
        hang = watchdog.hang(
            program.progress, Usage.now(), waits=bool(hub.waits_for) or program.progress.waits, moved_bytes=moved
        )
        if hang:
            self._watchdog, self._hangs = None, True
            message = f"{self.context.node} hangs in step {program.progress.step + 1}: {hang}"
            kind = node_pb2.Failure.KIND_INTERNAL
            failure = JobFailure(kind, message, traceback=execution.stack(), is_unfit=True)
            report_failure(self.context, failure)

    def trace(self, request: observation_pb2.Trace) -> None:
        recorder = Recorder(self.context.node, request, self.context.emit)
        if self._program is None or request.epoch != self._epoch or not self.running:
            recorder.close()
            return
        self._program.progress.end_trace()
        self._program.progress.recorder = recorder

    def close(self) -> None:
        self._drop()

    def _complete(self, request: node_pb2.Load) -> None:
        """Copies the plan of the Load before into a Load of the same plan."""
        if not request.same_plan:
            self._last_load = request
        elif (plan := self._last_load.WhichOneof("plan")) is not None:
            getattr(request, plan).CopyFrom(getattr(self._last_load, plan))

    def _drop(self) -> None:
        """Ends the execution, whatever its state, and drops its program and links."""
        if self._execution is not None:
            self._execution.stop(deadlines.ATTACHMENT.hung_stop if self._hangs else settings.HANG_SECONDS.get())
        if self._program is not None:
            self._program.progress.end_trace()  # A trace may have begun when the steps were over.
        if self._hub is not None:
            self._hub.close()
        for link in self._links.values():
            link.close()
        if self._program is not None:
            self._program.close()
        self._epoch = self._hub = self._program = self._execution = self._watchdog = None
        self._links = {}
