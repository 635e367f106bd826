"""Why a job fails, or a node is replaced: one reason out of several reports, and nodes that owe a report and send
none.
"""

import re
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Final

from waferbox import deadlines, roles
from waferbox.host.threads import GuardedTimer
from wsc.v1 import node_pb2

# --- Which of several reports is the reason why a job failed ----------------------------------------------------------
#
# When a node dies, its neighbours report lost links, often before the death itself is seen. So a lost link is taken for
# the reason only if nothing better comes within deadlines.RECOVERY.grace.


class Verdict:
    """The reason why a job ends, found once. Thread-safe."""

    def __init__(self, on_reached: Callable[[], None]) -> None:
        """on_reached() is called once, from any thread, when there is a reason."""
        self._on_reached = on_reached
        self._lock = threading.Lock()
        self._failure: node_pb2.Failure | None = None
        self._timer: GuardedTimer | None = None

    @property
    def failure(self) -> node_pb2.Failure | None:
        return self._failure

    def report(self, failure: node_pb2.Failure) -> None:
        """Something went wrong."""
        is_lost_link = failure.kind == node_pb2.Failure.KIND_NODE and failure.peer
        if is_lost_link:
            self._reach_after(deadlines.RECOVERY.grace, failure)
        else:
            self._reach(failure)

    def fail(self, failure: node_pb2.Failure) -> "JobFailed":
        """Report what the job cannot go on after, and return what is to be raised then."""
        self.report(failure)
        return JobFailed(failure)

    def report_defect(self, error: Exception) -> None:
        """A thread of the coordinator ended by an exception that it did not expect."""
        self._reach(internal_failure(error))

    def report_end(self, failure: node_pb2.Failure) -> None:
        """This process is told to end: often because something else has died, which is then the reason."""
        self._reach_after(deadlines.RECOVERY.end_grace, failure)

    def _reach_after(self, seconds: float, failure: node_pb2.Failure) -> None:
        with self._lock:
            if self._timer is not None or self._failure is not None:
                return
            self._timer = GuardedTimer(
                seconds, lambda: self._reach(failure), name="verdict", on_defect=self.report_defect
            )
            self._timer.start()

    def close(self) -> None:
        """Nothing that is reported from now on counts."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._failure is None:
                self._failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_CANCELLED, message="the job has ended")

    def _reach(self, failure: node_pb2.Failure) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            if self._timer is not None:
                self._timer.cancel()
        self._on_reached()


def internal_failure(error: Exception) -> node_pb2.Failure:
    """The failure for a defect in the coordinator."""
    return node_pb2.Failure(
        kind=node_pb2.Failure.KIND_INTERNAL,
        node=roles.COORDINATOR.name,
        message=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )


class JobFailed(Exception):
    """Raised in threads that work for a job which has failed; the reason is in the job's verdict."""

    def __init__(self, failure: node_pb2.Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


# --- Why a node is replaced, in one line for the user: what it has said, and where in the code it was -----------------


MAX_FRAMES: Final = 3  # of a stack that are told

_FRAME: Final = re.compile(r'^ *File "(?P<path>[^"\n]*)", line (?P<line>\d+), in (?P<function>.*)$', re.MULTILINE)


def cause_of_replacement(failure: node_pb2.Failure, description: str) -> str:
    """description: of the node, in place of its name at the beginning of what it says; see JobMembers.describe."""
    cause = f"{description} {failure.message.removeprefix(f'{failure.node} ')}"
    frames = list(_FRAME.finditer(failure.traceback))[-MAX_FRAMES:]
    where = ", ".join(f"{_name(frame['path'])}:{frame['line']} in {frame['function']}" for frame in frames)
    return f"{cause} ({where})" if where else cause


def _name(path: str) -> str:
    """Its last two parts: files of one name are in many folders."""
    return "/".join(path.split("/")[-2:])


# ----------------------------------------------------------------------------------------------------------------------
# Which nodes owe a report and send none: a process whose interpreter hangs still answers at its socket


class SilenceWatch:
    """Counts ticks rather than seconds: while this process is suspended nobody else falls silent. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        """seconds: that a node may say nothing while it owes reports, with one tick in each; one at least."""
        self._max_ticks = max(1, round(seconds))
        self._lock = threading.Lock()
        self._silent: dict[str, int] = {}  # ticks, by node

    def heard(self, node: str) -> None:
        """The node has said something."""
        with self._lock:
            self._silent.pop(node, None)

    def describe(self, node: str) -> str:
        """What is told of one that has been silent too long."""
        return f"{node} hangs: it has its connections and has said nothing for {self._max_ticks} s"

    def tick(self, owing: Iterable[str]) -> list[str]:
        """To be called once a second. Returns those of the nodes that owe reports which have been silent too long."""
        with self._lock:
            self._silent = {node: self._silent.get(node, 0) + 1 for node in owing}
            return [node for node, ticks in self._silent.items() if ticks > self._max_ticks]
