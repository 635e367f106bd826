"""Renders the cluster and its jobs as HTML: whole pages, and the regions of them that change.

The templates escape all text. There are no style attributes and no scripts in it: the page's policy forbids them.
"""

import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from appliance.drawing.number_text import seconds_text
from appliance.drawing.pages import template_environment
from appliance.page.compile_report import CompileReport, read_report
from appliance.page.job_view import PARTS, JobView, LogRow
from appliance.page.step_comparison import compare_layers, compare_step
from waferbox import roles
from waferbox.text import on_one_line
from wsc.v1 import management_pb2, node_pb2

Regions = Mapping[str, str]  # HTML by the id of the element that it fills

_ENDED: Final = (
    management_pb2.JOB_PHASE_SUCCEEDED,
    management_pb2.JOB_PHASE_FAILED,
    management_pb2.JOB_PHASE_CANCELLED,
)
_LEVELS: Final = {40: "error", 30: "warning", 20: "info", 10: "debug"}
_PARTS: Final = {"wait": "stream wait"}  # parts of a step whose name on the page is not that on the wire
RECENT_JOBS: Final = 20
STORED_JOBS: Final = 100
MAX_REPORTS: Final = 8
MAX_OTHERS: Final = 200  # jobs to compare with


def has_ended(job: management_pb2.JobInfo) -> bool:
    return job.phase in _ENDED


def cluster_page(nodes: Sequence[management_pb2.NodeInfo], jobs: Sequence[management_pb2.JobInfo]) -> str:
    return _render("cluster.html", regions=cluster_regions(nodes, jobs))


def cluster_regions(nodes: Sequence[management_pb2.NodeInfo], jobs: Sequence[management_pb2.JobInfo]) -> Regions:
    waiting = sorted((job for job in jobs if job.queue_position), key=lambda job: job.queue_position)
    stored = [job for job in jobs if job.stored]
    ended = [job for job in jobs if has_ended(job) and not job.stored]
    running = [job for job in jobs if not job.queue_position and not has_ended(job)]
    wafers = [node for node in nodes if node.role == node_pb2.ROLE_WAFER]
    summary = {
        "wafers": len(wafers),
        "free": sum(1 for wafer in wafers if not wafer.job),
        "running": len(running),
        "waiting": len(waiting),
        "hosts": len({node.host for node in nodes}),
    }
    groups = [
        (role.heading, [node for node in nodes if node.role == role.number], role.is_leased)
        for role in roles.REGISTERED
    ]
    return {
        "summary": _render("regions/summary.html", **summary),
        "running": _render("regions/running.html", jobs=running),
        "queue": _render("regions/queue.html", jobs=waiting),
        "recent": _render("regions/recent.html", jobs=sorted(ended, key=_end, reverse=True)[:RECENT_JOBS]),
        "stored": _render("regions/stored.html", jobs=stored[:STORED_JOBS]),
        "nodes": _render("regions/nodes.html", groups=groups),
    }


def job_page(job: management_pb2.JobInfo, jobs: Sequence[management_pb2.JobInfo]) -> str:
    """jobs: those whose curves can be drawn beside those of the job."""
    others = [other for other in jobs if other.job != job.job][:MAX_OTHERS]
    regions = {**job_regions(job, JobView()), **compile_regions(job)}
    return _render("job.html", job=job, others=others, regions=regions)


def job_regions(job: management_pb2.JobInfo, view: JobView) -> Regions:
    """The regions of a job that change while it runs; the others are those of `compile_regions`."""
    ended = has_ended(job)
    reports = list(_reports_of(job).values())
    # After the end of a job its training is shown, not an evaluation that followed.
    if ended:
        reports.sort(key=lambda report: report.name == "training")
    report = reports[-1] if reports else None
    execution = view.execution(longest=ended)
    rate = view.rate(execution)
    rows = rate * report.batch_rows if rate is not None and report is not None else None
    splits = view.splits(execution)
    return {
        "phase": _render("regions/phase.html", job=job, first_error=view.first_error),
        "facts": _render("regions/facts.html", job=job, ended=ended, rate=rate, rows=rows, report=report),
        "split": _render(
            "regions/split.html",
            splits=splits,
            execution=execution,
            compared=compare_step(report, splits),
            layers=compare_layers(report, view.layers(execution)),
        ),
        "members": _render("regions/members.html", job=job, loads=view.loads(), ended=ended),
    }


def compile_regions(job: management_pb2.JobInfo) -> Regions:
    """The regions from the compile reports of the job's executions, which change only if `job.artifacts` does."""
    reports = _reports_of(job)
    wafers = [node for node in job.nodes if node.role == node_pb2.ROLE_WAFER]
    return {
        "placement": _render("regions/placement.html", job=job, reports=reports, wafers=wafers),
        "layers": _render("regions/layers.html", reports=reports),
    }


def way_to_job(job: management_pb2.JobInfo) -> str:
    """The links from a page of a job, such as its compile report, to the job and the cluster."""
    return _render("way_to_job.html", job=job)


def log_rows(rows: Sequence[LogRow]) -> str:
    return _render("log_rows.html", rows=rows)


def error_page(title: str, message: str) -> str:
    return _render("error.html", title=title, message=message)


# By artifact, the reports of the last few: mostly one job is viewed at a time.
_reports: dict[str, CompileReport] = {}


def _reports_of(job: management_pb2.JobInfo) -> Mapping[int, CompileReport]:
    """The existing reports of a job, by index in `job.artifacts`; the last one is that of the last execution."""
    found = {place: _cached_report(artifact) for place, artifact in enumerate(job.artifacts[:MAX_REPORTS])}
    return {place: report for place, report in found.items() if report is not None}


def _cached_report(artifact: str) -> CompileReport | None:
    """The report of an artifact. An artifact is named by the hash of its inputs, so it does not change."""
    if artifact not in _reports:
        report = read_report(artifact)
        if report is None:
            return None
        if len(_reports) >= MAX_REPORTS:
            _reports.clear()
        _reports[artifact] = report
    return _reports[artifact]


def _end(job: management_pb2.JobInfo) -> float:
    return job.ended


def _phase(job: management_pb2.JobInfo) -> str:
    return management_pb2.JobPhase.Name(job.phase).removeprefix("JOB_PHASE_").lower()


def _level(record_level: int) -> str:
    return next((name for least, name in _LEVELS.items() if record_level >= least), "debug")


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(_valid_time(seconds)).strftime("%H:%M:%S")


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(_valid_time(seconds)).strftime("%Y-%m-%d %H:%M:%S")


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(_valid_time(seconds)).astimezone().isoformat(timespec="seconds")


def _valid_time(seconds: float) -> float:
    """A time limited to what `datetime` accepts: a message may have any number."""
    return min(seconds, 4e9) if seconds >= 0 else 0.0


def _duration(seconds: float) -> str:
    """A duration, such as "42 s", "3 min" or "2 h 5 min"."""
    minutes = int(_valid_time(seconds)) // 60
    if minutes < 1:
        return f"{int(_valid_time(seconds))} s"
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _ago(seconds: float) -> str:
    passed = time.time() - seconds
    return "just now" if passed < 5 else f"{_duration(passed)} ago"


def _number(number: float) -> str:
    """A number, such as "12,800" or "3.42"."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _command(command: Sequence[str]) -> str:
    """The command line as one would type it; the first part is the script."""
    return shlex.join(command)


def _script(job: management_pb2.JobInfo) -> str:
    """The name of the script's file; empty if the job has no script."""
    return Path(job.command[0]).name if job.command else ""


def _more(seconds: float) -> str:
    """A difference of times, such as "+3.42 ms"."""
    if abs(seconds) < 1e-9:  # of rounding
        return "0 s"
    return f"{'-' if seconds < 0 else '+'}{seconds_text(abs(seconds))}"


def _part(name: str) -> str:
    return _PARTS.get(name, name)


def _render(template: str, **values: Any) -> str:
    return _environment.get_template(template).render(values)


_environment: Final = template_environment(Path(__file__).with_name("templates"))
_environment.globals["coloured"] = PARTS
_environment.filters |= {
    "ago": _ago,
    "clock": _clock,
    "command": _command,
    "date": _date,
    "duration": _duration,
    "iso": _iso,
    "level": _level,
    "more": _more,
    "number": _number,
    "on_one_line": on_one_line,
    "part": _part,
    "phase": _phase,
    "script": _script,
}
