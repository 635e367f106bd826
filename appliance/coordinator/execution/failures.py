"""Causes of failures: the verdict of a job, the text for the user, and the watches over silent and waiting nodes."""

import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from waferbox import roles
from wsc.v1 import node_pb2, observation_pb2

# --- The verdict ------------------------------------------------------------------------------------------------------


class Verdict:
    """The reason why a job ends, which is set once. Used in one event loop."""

    def __init__(self, on_reached: Callable[[], None]) -> None:
        """on_reached: called once, when there is a reason."""
        self.failure: node_pb2.Failure | None = None
        self._on_reached = on_reached

    def report(self, failure: node_pb2.Failure) -> None:
        """Makes this failure the verdict, unless there is one."""
        if self.failure is None:
            self.failure = failure
            self._on_reached()

    def fail(self, failure: node_pb2.Failure) -> "JobFailed":
        """Reports a fatal failure, and returns the exception to raise."""
        self.report(failure)
        return JobFailed(failure)

    def report_defect(self, error: Exception) -> None:
        """Reports an unexpected exception in the coordinator."""
        self.report(internal_failure(error))

    def close(self) -> None:
        """Ignores all later reports."""
        if self.failure is None:
            self.failure = node_pb2.Failure(kind=node_pb2.Failure.KIND_CANCELLED, message="the job has ended")


def internal_failure(error: Exception) -> node_pb2.Failure:
    """The failure for a defect in the coordinator."""
    return node_pb2.Failure(
        kind=node_pb2.Failure.KIND_INTERNAL,
        node=roles.COORDINATOR.name,
        message=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )


class JobFailed(Exception):
    """Raised in coroutines that work for a job that has failed, with its failure."""

    def __init__(self, failure: node_pb2.Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


# --- The cause of a replacement, for the user -------------------------------------------------------------------------

MAX_FRAMES: Final = 3  # innermost frames of a stack in a message

_FRAME: Final = re.compile(r'^ *File "(?P<path>[^"\n]*)", line (?P<line>\d+), in (?P<function>.*)$', re.MULTILINE)


def cause_of_replacement(failure: node_pb2.Failure, description: str) -> str:
    """One line for the user: the failure that a node has reported, and the place in the code.

    Args:
        failure: with the traceback of the node's thread.
        description: replaces the name of the node at the start of the message; see JobMembers.describe.
    """
    cause = f"{description} {failure.message.removeprefix(f'{failure.node} ')}"
    frames = list(_FRAME.finditer(failure.traceback))[-MAX_FRAMES:]
    where = ", ".join(f"{_name(frame['path'])}:{frame['line']} in {frame['function']}" for frame in frames)
    return f"{cause} ({where})" if where else cause


def _name(path: str) -> str:
    """The last two parts of a path: many folders have files of the same name."""
    return "/".join(path.split("/")[-2:])


# --- Silent and waiting nodes -----------------------------------------------------------------------------------------


class SilenceWatch:
    """Finds nodes that should send reports and do not: a process that hangs keeps its connections.

    Counts ticks rather than seconds: during a suspension of this process no node falls silent.
    """

    def __init__(self, seconds: float) -> None:
        """seconds: how long a node may be silent while it should report; at least one tick of a second."""
        self._max_ticks = max(1, round(seconds))
        self._silent: dict[str, int] = {}  # ticks, by node

    def note_message(self, node: str) -> None:
        """Notes any message from a node."""
        self._silent.pop(node, None)

    def describe(self, node: str) -> str:
        """The message for the user about a node that has been silent too long."""
        return f"{node} hangs: it has its connections and has sent nothing for {self._max_ticks} s"

    def tick(self, owing: Iterable[str]) -> list[str]:
        """Counts a second; returns the nodes that have been silent too long.

        Args:
            owing: names of the nodes that should send reports now.
        """
        self._silent = {node: self._silent.get(node, 0) + 1 for node in owing}
        return [node for node, ticks in self._silent.items() if ticks > self._max_ticks]


class StandstillWatch:
    """Finds an epoch whose nodes all wait for each other: each could wait for ever.

    A node that computes, or waits for an input_fn or a disk, may take any time, and so may the client. Counts ticks, as
    SilenceWatch; a tick counts once all nodes have sent a report since the last one that did.
    """

    def __init__(self, seconds: float) -> None:
        """seconds: how long all nodes may wait without a byte between them; at least one tick of a second."""
        self._max_ticks = max(1, round(seconds))
        self._ticks = 0
        self._reports: dict[str, observation_pb2.NodeReport] = {}  # the last one of each node
        self._reported: set[str] = set()  # since the last tick that counted
        self._moved: set[str] = set()  # nodes with which something has happened since the last tick

    def note_report(self, node: str, report: observation_pb2.NodeReport) -> None:
        """Notes a node's report."""
        last = self._reports.get(node)
        if last is None or _figures(last) != _figures(report):
            self._moved.add(node)
        self._reports[node] = report
        self._reported.add(node)

    def tick(self, running: Sequence[str], *, is_client_behind: bool) -> str:
        """Counts a second; returns the message for the user if the nodes have waited too long, and begins anew.

        Args:
            running: names of all nodes that run steps now.
            is_client_behind: whether the client has outputs that it has not consumed.
        """
        moved, self._moved = self._moved, set()
        can_move = is_client_behind or not all(map(self._waits_for, running))
        if not running or can_move or not moved.isdisjoint(running):
            self._ticks = 0
        elif self._reported.issuperset(running):
            self._reported.clear()
            self._ticks += 1
        if self._ticks < self._max_ticks:
            return ""
        waits = ", ".join(f"{node} for {self._waits_for(node)}" for node in running)
        self._ticks = 0
        self._reports.clear()  # those of the next epoch may come later than the next tick
        return f"all nodes have waited for each other for {self._max_ticks} s: {waits}"

    def _waits_for(self, node: str) -> str:
        report = self._reports.get(node)
        return "" if report is None else report.waits_for


def _figures(report: observation_pb2.NodeReport) -> tuple[object, ...]:
    """What changes while anything happens between nodes."""
    return report.epoch, report.step, report.waits_for, report.bytes["received"], report.bytes["sent"]
