"""`waferbox top`: what the processes of a job are busy with."""

import threading
from collections.abc import Iterator, Sequence
from typing import Final

import grpc
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from waferbox.commands.connection import ManagementOption, WatchLost, connect
from waferbox.commands.job_arguments import ENDED, OptionalJobArgument, find_job
from waferbox.commands.job_watch import JobWatch
from waferbox.commands.logs import KEPT_SECONDS
from waferbox.output.console import Status, fail, output, printable, say
from waferbox.output.job_metrics import JobMetrics, NodeMetrics
from waferbox.output.tables import empty_table, one_line, phase_text, reason, safe, step_text, styled_phase
from wsc.v1 import management_pb2, observation_pb2

REFRESH_SECONDS: Final = 1.0
FIRST_SECONDS: Final = 0.3  # until what is kept of a job has come
END_SECONDS: Final = 5.0  # until the stream of a job has ended, once it is told to
_SHOWN_SHARE: Final = 0.01  # of the time: less is not worth a word


def top(name: OptionalJobArgument = None, management: ManagementOption = None) -> None:
    """Show what the processes of a job use, each second, until it has ended or Ctrl-C. Without JOB: the only one.

    Where no terminal shows it, it is shown once.
    """
    with connect(management) as cluster:
        job = _chosen(cluster.jobs(), name)
        metrics = JobMetrics()
        request = observation_pb2.WatchJobRequest(job=job.job, follow=output.is_terminal, kinds=["report", "scalar"])
        if output.is_terminal:
            watch = JobWatch(cluster, job)
            _watch(watch, watch.responses(lambda: cluster.observation.WatchJob(request)), metrics)
        else:
            for events in cluster.observation.WatchJob(request, timeout=KEPT_SECONDS):
                metrics.add(events.events)
            output.print(_picture(job, metrics))


def _chosen(jobs: Sequence[management_pb2.JobInfo], name: str | None) -> management_pb2.JobInfo:
    if name is not None:
        return find_job(jobs, name)
    live = [job for job in jobs if job.phase not in ENDED]
    if len(live) == 1:
        return live[0]
    if live:
        fail(f"several jobs are under way: say which of {', '.join(job.job for job in live)}", Status.NO_JOB)
    fail("no job is under way; `waferbox get jobs` shows those that ended", Status.NO_JOB)


def _watch(watch: JobWatch, stream: Iterator[observation_pb2.JobEvents], metrics: JobMetrics) -> None:
    """Show it again and again, until the stream ends."""
    over = threading.Event()
    problems: list[Exception] = []

    def read() -> None:
        try:
            for events in stream:
                metrics.add(events.events)
        except (grpc.RpcError, WatchLost) as error:
            problems.append(error)
        finally:
            over.set()

    reader = threading.Thread(target=read, name="events", daemon=True)
    reader.start()
    try:
        with Live(console=output, auto_refresh=False) as live:
            pause = FIRST_SECONDS
            while not over.wait(pause):
                live.update(_picture(watch.job(), metrics), refresh=True)
                pause = REFRESH_SECONDS
            if not problems:
                job = watch.job()
                live.update(_picture(job, metrics), refresh=True)
    finally:
        watch.close()
        reader.join(END_SECONDS)
    if problems:
        raise problems[0]
    say(f"{job.job} has ended ({phase_text(job)})")


def _picture(job: management_pb2.JobInfo, metrics: JobMetrics) -> Group:
    nodes = metrics.nodes()
    rates = [node.steps for node in nodes if node.steps is not None]
    step = f"step {step_text(job)}" if job.num_steps else ""
    rate = f"{min(rates):.1f} steps/s" if rates else ""
    scalars = [f"{safe(name)} {value:.4g}" for name, value in metrics.scalars().items()]
    line = "   ".join(filter(None, [f"[bold]{job.job}[/]", styled_phase(job), step, rate, *scalars]))
    parts: list[RenderableType] = [one_line(Text.from_markup(line))]
    if said := reason(job).strip():
        parts.append(one_line(Text(printable(said.splitlines()[0]))))
    if not nodes:
        parts.append(Text("Nothing is reported of it yet: that begins with its first step."))
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
