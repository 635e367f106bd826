"""Causes of failures and replacements: the verdict of a job, the text for the user, and the watch for silent nodes."""

import re
import traceback
from collections.abc import Callable, Iterable
from typing import Final

from waferbox import roles
from wsc.v1 import node_pb2

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


# --- Silent nodes -----------------------------------------------------------------------------------------------------


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
