"""The progress of an execution and the use of its time: recorded, reported each second, and watched for hangs."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from waferbox.links.link import Link
from waferbox.runtime.layer_times import LayerTimes
from waferbox.settings import HANG_SECONDS
from wsc.v1 import node_pb2, observation_pb2, plan_pb2

# --- Progress and traces ----------------------------------------------------------------------------------------------

MAX_SPANS = 100_000  # of one trace: no timeline shows more
BATCH_SPANS = 2_000


class Recorder:
    """The spans of some steps of an execution, which are sent to the coordinator together.

    The thread of the execution adds spans; any thread may close it.
    """

    def __init__(
        self, node: str, request: observation_pb2.Trace, emit: Callable[[node_pb2.AttachResponse], None]
    ) -> None:
        """request: names the steps. emit: sends to the coordinator."""
        self.first = request.first_step
        self.end = request.first_step + request.num_steps  # the first step after the recorded ones
        self._node = node
        self._emit = emit
        self._spans: list[tuple[str, str, int, float, float, str, int | None, str]] = []
        # All processes of a host read the same clock; one reading for all spans keeps them in order.
        self._epoch = time.time() - time.perf_counter()
        self._lock = threading.Lock()
        self._closed = False

    def add(
        self,
        what: str,
        detail: str,
        step: int,
        begin: float,
        end: float,
        *,
        region: str = "",
        group: int | None = None,
        source: str = "",
    ) -> None:
        """Adds a span, if its step is recorded.

        Args:
            what: the activity, and so the row.
            detail: a layer or a group.
            step: of the execution.
            begin: of the clock time.perf_counter, as the end.
            end: of the span.
            region: of a wafer in layer pipelined mode.
            group: the id of the group that is sent, received or passed on; None: there is none.
            source: the node that the group came from; empty: it was not received here.
        """
        if self.first <= step < self.end and len(self._spans) < MAX_SPANS:
            self._spans.append((what, detail, step, begin, end, region, group, source))

    def close(self) -> None:
        """Sends all spans, once. From any thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for first in range(0, len(self._spans), BATCH_SPANS):
            batch = [self._span(*span) for span in self._spans[first : first + BATCH_SPANS]]
            self._emit(node_pb2.AttachResponse(spans=observation_pb2.Spans(spans=batch)))
        self._emit(node_pb2.AttachResponse(spans=observation_pb2.Spans(last=True)))

    def _span(
        self,
        what: str,
        detail: str,
        step: int,
        begin: float,
        end: float,
        region: str,
        group: int | None,
        source: str,
    ) -> observation_pb2.Span:
        return observation_pb2.Span(
            node=self._node,
            what=what,
            detail=detail,
            step=step,
            begin=self._epoch + begin,
            seconds=end - begin,
            region=region,
            group=group,
            source=source,
        )


class Progress:
    """The progress of one execution on one node.

    Written by the thread of the execution alone. Other threads may read it between two writes, which is accurate enough
    for reports.
    """

    __slots__ = ("_work", "disk", "done_steps", "layers", "recorder", "send", "step", "total", "wait", "waits")

    def __init__(self, work: str) -> None:
        """work: the name of time that is spent neither waiting nor sending, such as "compute"."""
        self._work = work
        self.step = 0  # steps done, of the execution
        self.done_steps = 0  # of them, in earlier epochs
        self.total = 0.0  # seconds until then; this and the next three
        self.wait = 0.0
        self.send = 0.0
        self.disk = 0.0  # waiting for a disk
        self.waits = False  # whether it waits now for a party without a deadline; the hub knows of waits on links
        self.recorder: Recorder | None = None
        self.layers: LayerTimes | None = None  # of the first wafer

    def begin(self, done_steps: int) -> None:
        """Sets the number of steps that earlier epochs have done, before the first step."""
        self.step = self.done_steps = done_steps

    def seconds(self) -> dict[str, float]:
        """Returns the seconds by what they were spent on."""
        work = max(0.0, self.total - self.wait - self.send - self.disk)
        parts = {"total": self.total, "wait": self.wait, self._work: work}
        return parts | {what: spent for what, spent in (("send", self.send), ("disk", self.disk)) if spent}

    def end_trace(self) -> None:
        """Sends the recorded spans, if there is a trace."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.close()


def group_label(group: plan_pb2.Group) -> str:
    """Returns the name of a group on a timeline."""
    kind = plan_pb2.GroupKind.Name(group.kind).removeprefix("GROUP_KIND_").lower()
    if group.kind == plan_pb2.GROUP_KIND_BATCH:
        return kind
    if group.kind == plan_pb2.GROUP_KIND_WEIGHTS and not group.members:
        return "step token"
    return f"{kind} {group.layer or group.id}"


def short_list(names: Sequence[str]) -> str:
    """Returns the first name, and the number of others."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


# --- Reports ----------------------------------------------------------------------------------------------------------

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Returns the physical memory that this process has."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * _PAGE_BYTES


def process_report(node: str) -> observation_pb2.NodeReport:
    """Returns a report with the figures of any process."""
    return observation_pb2.NodeReport(
        node=node, time=time.time(), cpu_seconds=time.process_time(), memory_bytes=resident_bytes()
    )


def node_report(
    node: str, epoch: int, progress: Progress, links: Iterable[Link], waits_for: str
) -> observation_pb2.NodeReport:
    """Returns a report with the figures of a process that runs an execution. waits_for: as of the report."""
    links = list(links)
    report = process_report(node)
    report.epoch, report.step, report.done_steps = epoch, progress.step, progress.done_steps
    report.seconds.update(progress.seconds())
    report.bytes["received"] = sum(link.received_bytes for link in links)
    report.bytes["sent"] = sum(link.sent_bytes for link in links)
    report.waits_for = waits_for
    report.queued["received"] = sum(len(link.inbox) for link in links)
    report.queued["sent"] = sum(link.not_taken for link in links)
    if progress.layers is not None:
        report.layers.extend(progress.layers.means())
    return report


# --- Hangs ------------------------------------------------------------------------------------------------------------

IDLE_PARTS: Final = 3  # a process that does nothing gets this part of the time
IDLE_SHARE: Final = 0.02  # of a processor; heartbeats and reports take less
MAX_COUNTED_SECONDS: Final = 2.0  # between two calls; more passes only if the process was suspended


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The processor time and disk traffic of this process until now."""

    cpu_seconds: float
    disk_bytes: int  # read and written; 0 where the kernel does not count them

    @classmethod
    def now(cls) -> "Usage":
        nbytes = 0
        with contextlib.suppress(OSError):
            counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
            nbytes = int(counts["read_bytes"]) + int(counts["write_bytes"])
        return cls(cpu_seconds=time.process_time(), disk_bytes=nbytes)


class ProgressWatchdog:
    """Detects that the thread of one execution is busy with one action for too long. Used by one thread.

    A thread that waits does not hang: its peers, a slow input_fn or a client in a debugger may take any time. A thread
    that does not wait must end its kernel, copy or send. It gets less time if its process neither computes nor uses the
    disk meanwhile.
    """

    def __init__(self, seconds: float) -> None:
        """seconds: the most that one action may take, as in WAFERBOX_HANG_SECONDS."""
        self._seconds = seconds
        self._last_state: tuple[object, ...] | None = None
        self._last_call = 0.0  # time of the last call, as of time.monotonic
        self._busy = 0.0  # seconds without a change of the state
        self._usage = Usage(cpu_seconds=0.0, disk_bytes=0)  # at the begin of the action

    def hang(self, progress: Progress, usage: Usage, *, waits: bool, moved_bytes: int) -> str:
        """Returns how the execution hangs, for a message; empty: it does not. Called about once a second.

        Args:
            progress: the progress of the execution.
            usage: the usage of the process until now.
            waits: whether the thread waits for another process.
            moved_bytes: the bytes that were received and sent until now.
        """
        now = time.monotonic()
        passed, self._last_call = now - self._last_call, now
        state = (progress.step, progress.wait, progress.send, progress.disk, moved_bytes)
        if waits or state != self._last_state:
            self._last_state, self._busy, self._usage = state, 0.0, usage
        else:
            self._busy += min(passed, MAX_COUNTED_SECONDS)
        if self._busy > self._seconds:
            return f"one action has taken more than {self._seconds:g} s, the most by {HANG_SECONDS.name}"
        idle_seconds = self._seconds / IDLE_PARTS
        computes = usage.cpu_seconds - self._usage.cpu_seconds >= IDLE_SHARE * self._busy
        if self._busy > idle_seconds and not computes and usage.disk_bytes == self._usage.disk_bytes:
            most = f"{idle_seconds:g} s, the most for that by {HANG_SECONDS.name}"
            return f"one action computes nothing, and has taken more than {most}"
        return ""
