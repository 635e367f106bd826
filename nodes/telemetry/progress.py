"""How far an execution is and where its time went; and, in steps that are traced, what it did when.

All of it is written by the thread of the execution alone. Other threads read it: they may see a moment between two
writes, which is good enough for a figure that somebody looks at.
"""

import threading
import time
from collections.abc import Callable, Sequence

from wsc.v1 import node_pb2, observation_pb2, plan_pb2

MAX_SPANS = 100_000  # of one trace: more would be no picture
BATCH_SPANS = 2_000


class Recorder:
    """The spans of some steps of an execution, on their way to the coordinator."""

    def __init__(
        self, node: str, request: observation_pb2.Trace, emit: Callable[[node_pb2.AttachResponse], None]
    ) -> None:
        """request: which steps. emit is called by close."""
        self.first = request.first_step
        self.end = request.first_step + request.num_steps  # the first step that is not recorded any more
        self._node = node
        self._emit = emit
        self._spans: list[tuple[str, str, int, float, float, str]] = []
        # All processes of a host read the same clock; one reading for all spans keeps them in order.
        self._epoch = time.time() - time.perf_counter()
        self._lock = threading.Lock()
        self._closed = False

    def add(self, what: str, detail: str, step: int, begin: float, end: float, region: str = "") -> None:
        """begin, end: as time.perf_counter has them. Of another step than those that are wanted: no effect."""
        if self.first <= step < self.end and len(self._spans) < MAX_SPANS:
            self._spans.append((what, detail, step, begin, end, region))

    def close(self) -> None:
        """Send what there is, the first time that it is called. From any thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for first in range(0, len(self._spans), BATCH_SPANS):
            batch = [self._span(*span) for span in self._spans[first : first + BATCH_SPANS]]
            self._emit(node_pb2.AttachResponse(spans=observation_pb2.Spans(spans=batch)))
        self._emit(node_pb2.AttachResponse(spans=observation_pb2.Spans(last=True)))

    def _span(self, what: str, detail: str, step: int, begin: float, end: float, region: str) -> observation_pb2.Span:
        return observation_pb2.Span(
            node=self._node,
            what=what,
            detail=detail,
            step=step,
            begin=self._epoch + begin,
            seconds=end - begin,
            region=region,
        )


class Progress:
    """Of one execution of one role."""

    __slots__ = ("_work", "disk", "done_steps", "recorder", "send", "step", "total", "wait", "waits")

    def __init__(self, work: str) -> None:
        """work: what the time is spent on that is spent neither waiting nor sending, such as "compute"."""
        self._work = work
        self.step = 0  # steps done, of the execution
        self.done_steps = 0  # of them, in earlier epochs
        self.total = 0.0  # seconds until then; this and the next three
        self.wait = 0.0
        self.send = 0.0
        self.disk = 0.0  # waiting for a disk
        self.waits = False  # now, for somebody who may take as long as he likes; waits on links are the hub's
        self.recorder: Recorder | None = None

    def begin(self, done_steps: int) -> None:
        """The steps are about to be run, behind those that were done in earlier epochs."""
        self.step = self.done_steps = done_steps

    def seconds(self) -> dict[str, float]:
        """Where the time went."""
        work = max(0.0, self.total - self.wait - self.send - self.disk)
        parts = {"total": self.total, "wait": self.wait, self._work: work}
        return parts | {what: spent for what, spent in (("send", self.send), ("disk", self.disk)) if spent}

    def end_trace(self) -> None:
        """Send what was recorded."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.close()


def group_label(group: plan_pb2.Group) -> str:
    """What a group is called on a timeline."""
    kind = plan_pb2.GroupKind.Name(group.kind).removeprefix("GROUP_KIND_").lower()
    if group.kind == plan_pb2.GROUP_KIND_BATCH:
        return kind
    if group.kind == plan_pb2.GROUP_KIND_WEIGHTS and not group.members:
        return "step token"
    return f"{kind} {group.layer or group.id}"


def short_list(names: Sequence[str]) -> str:
    """The first name, and how many there are besides."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
