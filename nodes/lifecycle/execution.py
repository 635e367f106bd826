"""The thread of one execution on one node: runs the steps, and tells the coordinator how it ended."""

import sys
import traceback
from collections.abc import Callable, Mapping

from interconnect.links.hub import Stopped
from interconnect.links.link import LinkLost
from interconnect.threads import GuardedThread
from nodes.lifecycle.node_job import JobContext, JobFailure
from nodes.refused_memory import is_refused_memory
from wsc.v1 import node_pb2


class ExecutionHangs(RuntimeError):
    """The thread of an execution does not end; only the end of the process ends it."""

    def __init__(self, message: str, stack: str) -> None:
        """stack: of the thread, as in a traceback."""
        super().__init__(message)
        self.stack = stack


class Execution:
    """Runs `steps` in a thread of its own, once, and reports how it ended.

    Returned seconds, by what they were spent on: Finished. Stopped: silence, for whoever interrupts knows. LinkLost: a
    Failure of KIND_NODE with the peer. JobFailure: as it says. Anything else is a defect: a Failure of KIND_INTERNAL.
    """

    def __init__(
        self, context: JobContext, number: int, steps: Callable[[], Mapping[str, float]], interrupt: Callable[[], None]
    ) -> None:
        """interrupt makes every wait inside steps raise Stopped: Hub.stop, and whatever else steps waits for."""
        self._context = context
        self._number = number
        self._steps = steps
        self._interrupt = interrupt
        self._interrupted = False
        self._steps_over = False
        self._thread = GuardedThread(self._run, name=f"execution-{context.node}", on_defect=self._failed)

    def start(self) -> None:
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether steps are run; not so any more when the coordinator is told of their end."""
        return self._thread.is_alive() and not self._steps_over

    def stop(self, seconds: float) -> None:
        """Interrupt and join; once it has been called, no failure is reported. To be called once or more.

        Raises ExecutionHangs: the thread has not ended in so many seconds.
        """
        self._interrupted = True
        self._interrupt()
        if self._thread.ident is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                raise ExecutionHangs(f"{self._thread.name} did not end within {seconds:g} s", self.stack())

    def stack(self) -> str:
        """What the thread does now, as in a traceback; empty if it has ended."""
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
            finished = node_pb2.Finished(execution=self._number, seconds=seconds)
            self._context.emit(node_pb2.AttachResponse(finished=finished))

    def _run_steps(self) -> Mapping[str, float]:
        try:
            return self._steps()
        finally:
            self._steps_over = True

    def _failed(self, error: Exception) -> None:
        if not self._interrupted:
            report_failure(self._context, error)


def report_failure(context: JobContext, error: Exception) -> None:
    """Tell the coordinator of an exception that ended an execution, or came out of a command."""
    if isinstance(error, JobFailure):
        context.fail(error.kind, error.message, error.traceback, error.peer)
    elif isinstance(error, LinkLost):
        context.fail(node_pb2.Failure.KIND_NODE, str(error), peer=error.peer)
    elif isinstance(error, ExecutionHangs):
        context.fail(node_pb2.Failure.KIND_INTERNAL, f"{context.node} hangs: {error}", error.stack, is_unfit=True)
    else:
        text = "".join(traceback.format_exception(error))
        message, is_unfit = f"{type(error).__name__}: {error}", is_refused_memory(error)
        if is_unfit:
            message = f"{context.node} was refused memory: {message}"
        context.fail(node_pb2.Failure.KIND_INTERNAL, message, text, is_unfit=is_unfit)
