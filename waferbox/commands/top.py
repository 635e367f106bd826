"""`waferbox top`: the loads of a job's processes, as rates between the last two reports of each."""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import grpc
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from waferbox import deadlines
from waferbox.commands.connection import (
    ENDED,
    JobWatch,
    ManagementOption,
    OptionalJobArgument,
    WatchLost,
    connect,
    find_job,
)
from waferbox.output.console import Status, fail, output, print_text, printable
from waferbox.output.tables import empty_table, left_text, one_line, phase_text, reason, safe, step_text, styled_phase
from waferbox.text import on_one_line
from wsc.v1 import management_pb2, observation_pb2

# --- Metrics ----------------------------------------------------------------------------------------------------------


STALE_SECONDS: Final = 5.0  # age at which a report yields no rates any more


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMetrics:
    """The load of one process. Rates are per second; None without two recent reports of the same epoch."""

    node: str
    memory_bytes: int
    cores: float | None  # busy cores: CPU seconds per second
    received: float | None  # bytes
    sent: float | None  # bytes
    steps: float | None  # None also if the process counts no steps
    shares: Mapping[str, float]  # of the time, by activity; empty where rates are None


class JobMetrics:
    """The last reports and scalars of a job. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: dict[str, tuple[observation_pb2.NodeReport | None, observation_pb2.NodeReport]] = {}
        self._received_at: dict[str, float] = {}  # monotonic time, as clocks of other hosts may differ
        self._scalars: dict[str, observation_pb2.Scalar] = {}

    def add(self, events: Iterable[observation_pb2.JobEvent]) -> None:
        """Adds reports and scalars, in the order in which they were made."""
        now = time.monotonic()
        with self._lock:
            for event in events:
                if event.HasField("report"):
                    report = event.report
                    former = self._reports.get(report.node)
                    self._reports[report.node] = (former[1] if former else None, report)
                    self._received_at[report.node] = now
                elif event.HasField("scalar"):
                    self._scalars[event.scalar.name] = event.scalar

    def scalars(self) -> Mapping[str, float]:
        """The last value of each scalar output."""
        with self._lock:
            return {name: scalar.value for name, scalar in self._scalars.items()}

    def nodes(self) -> list[NodeMetrics]:
        """The loads of all processes, ordered by role and index."""
        oldest = time.monotonic() - STALE_SECONDS
        with self._lock:
            found = [
                _rates(former if self._received_at[node] >= oldest else None, report)
                for node, (former, report) in self._reports.items()
            ]
        return sorted(found, key=lambda metrics: _sort_key(metrics.node))


def _rates(former: observation_pb2.NodeReport | None, report: observation_pb2.NodeReport) -> NodeMetrics:
    seconds = 0.0
    if former is not None and former.epoch == report.epoch:
        seconds = report.time - former.time
    if former is None or seconds <= 0.0:
        return NodeMetrics(
            node=report.node,
            memory_bytes=report.memory_bytes,
            cores=None,
            received=None,
            sent=None,
            steps=None,
            shares={},
        )
    shares = {
        what: min(1.0, (spent - former.seconds.get(what, 0.0)) / seconds)
        for what, spent in report.seconds.items()
        if what != "total"
    }
    if "wait" in shares:  # it counts when it has ended, though it may have begun before the former report
        others = sum(shares.values()) - shares["wait"]
        shares["wait"] = max(0.0, min(shares["wait"], 1.0 - others))
    return NodeMetrics(
        node=report.node,
        memory_bytes=report.memory_bytes,
        cores=(report.cpu_seconds - former.cpu_seconds) / seconds,
        received=(report.bytes.get("received", 0) - former.bytes.get("received", 0)) / seconds,
        sent=(report.bytes.get("sent", 0) - former.bytes.get("sent", 0)) / seconds,
        steps=(report.step - former.step) / seconds if report.step else None,
        shares=shares,
    )


def _sort_key(node: str) -> tuple[str, int, str]:
    role, _, index = node.rpartition("-")
    return (role, int(index), "") if index.isdecimal() else (node, -1, "")


# --- The command ------------------------------------------------------------------------------------------------------


REFRESH_SECONDS: Final = 1.0
FIRST_SECONDS: Final = 0.3  # before the first picture: management's stored events have arrived by then
END_SECONDS: Final = 5.0  # deadline for the end of the reading thread
_SHOWN_SHARE: Final = 0.01  # the smallest share of the time that is shown


def top(name: OptionalJobArgument = None, management: ManagementOption = None) -> None:
    """Show the loads of a job's processes, each second, until the job ends or Ctrl-C. Default: the only live job.

    Without a terminal the loads are shown once.
    """
    with connect(management) as cluster:
        job = _chosen(cluster.jobs(), name)
        metrics = JobMetrics()
        request = observation_pb2.WatchJobRequest(job=job.job, follow=output.is_terminal, kinds=["report", "scalar"])
        if output.is_terminal:
            watch = JobWatch(cluster, job)
            _watch(watch, watch.responses(lambda: cluster.observation.WatchJob(request)), metrics)
        else:
            with cluster.answering():
                for events in cluster.observation.WatchJob(request, timeout=deadlines.QUERIES.history):
                    metrics.add(events.events)
            output.print(_rendered(job, metrics))


def _chosen(jobs: Sequence[management_pb2.JobInfo], name: str | None) -> management_pb2.JobInfo:
    if name is not None:
        return find_job(jobs, name)
    live = [job for job in jobs if job.phase not in ENDED]
    if len(live) == 1:
        return live[0]
    if live:
        fail(f"several jobs are under way: name one of {', '.join(job.job for job in live)}", Status.NO_JOB)
    fail("no job is under way; `waferbox get jobs` shows those that ended", Status.NO_JOB)


def _watch(watch: JobWatch, stream: Iterator[observation_pb2.JobEvents], metrics: JobMetrics) -> None:
    """Shows the loads each second, until the stream ends."""
    ended = threading.Event()
    problems: list[Exception] = []

    def read() -> None:
        try:
            for events in stream:
                metrics.add(events.events)
        except (grpc.RpcError, WatchLost) as error:
            problems.append(error)
        finally:
            ended.set()

    # The stream blocks between events, while the step and the rates are refreshed each second.
    reader = threading.Thread(target=read, name="events", daemon=True)
    reader.start()
    try:
        with Live(console=output, auto_refresh=False) as live:
            pause = FIRST_SECONDS
            while not ended.wait(pause):
                live.update(_rendered(watch.job(), metrics), refresh=True)
                pause = REFRESH_SECONDS
            if not problems:
                job = watch.job()
                live.update(_rendered(job, metrics), refresh=True)
    finally:
        watch.close()
        reader.join(END_SECONDS)
    if problems:
        raise problems[0]
    print_text(f"{job.job} has ended ({phase_text(job)})")


def _rendered(job: management_pb2.JobInfo, metrics: JobMetrics) -> Group:
    nodes = metrics.nodes()
    rates = [node.steps for node in nodes if node.steps is not None]
    step = f"step {step_text(job)}" if job.num_steps else ""
    left = f"about {left_text(job)} left" if job.seconds_left else ""
    rate = f"{min(rates):.1f} steps/s" if rates else ""
    scalars = [f"{safe(name)} {value:.4g}" for name, value in metrics.scalars().items()]
    line = "   ".join(filter(None, [f"[bold]{job.job}[/]", styled_phase(job), step, left, rate, *scalars]))
    parts: list[RenderableType] = [one_line(Text.from_markup(line))]
    if text := on_one_line(reason(job)):
        parts.append(one_line(Text(printable(text))))
    if not nodes:
        parts.append(Text("There are no reports yet: they begin with the first step."))
        return Group(*parts)
    table = empty_table(
        *("process", "cores", "MB", "MB/s in", "MB/s out", "steps/s", "its time goes into"),
        right=["cores", "MB", "MB/s in", "MB/s out", "steps/s"],
        whole=["process", "cores", "MB", "MB/s in", "MB/s out", "steps/s"],
        dense=True,
    )
    for node in nodes:
        table.add_row(*_row(node))
    return Group(*parts, Text(), table)


def _row(node: NodeMetrics) -> Sequence[RenderableType]:
    shares = sorted(node.shares.items(), key=lambda share: -share[1])
    return (
        safe(node.node),
        _number(node.cores, "{:.2f}"),
        f"{node.memory_bytes / 1e6:.0f}",
        _number(node.received, "{:.1f}", 1e6),
        _number(node.sent, "{:.1f}", 1e6),
        _number(node.steps, "{:.1f}"),
        one_line(Text(", ".join(f"{printable(what)} {share:.0%}" for what, share in shares if share >= _SHOWN_SHARE))),
    )


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else form.format(value / unit)
