"""HTML from what is known of the cluster and of a job: whole pages, and the regions of them that change.

All text is escaped by the templates. Nothing has a style attribute or a script in it: the page's policy forbids it.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import jinja2

from appliance.drawing.quantities import bytes_text, count_text, seconds_text
from appliance.page.compile_report import CompileReport, read_report
from appliance.page.job_view import PARTS, JobView, LogRow
from waferbox import roles
from wsc.v1 import management_pb2, node_pb2

Regions = Mapping[str, str]  # HTML by the id of the element that it fills

_ENDED: Final = (
    management_pb2.JOB_PHASE_SUCCEEDED,
    management_pb2.JOB_PHASE_FAILED,
    management_pb2.JOB_PHASE_CANCELLED,
)
_LEVELS: Final = {40: "error", 30: "warning", 20: "info", 10: "debug"}
_PARTS: Final = {"wait": "stream wait"}  # what is not called what it is on the wire
RECENT_JOBS: Final = 20
MAX_REPORTS: Final = 8


def has_ended(job: management_pb2.JobInfo) -> bool:
    return job.phase in _ENDED


def cluster_page(nodes: Sequence[management_pb2.NodeInfo], jobs: Sequence[management_pb2.JobInfo]) -> str:
    return _render("cluster.html", regions=cluster_regions(nodes, jobs))


def cluster_regions(nodes: Sequence[management_pb2.NodeInfo], jobs: Sequence[management_pb2.JobInfo]) -> Regions:
    waiting = sorted((job for job in jobs if job.queue_position), key=lambda job: job.queue_position)
    ended = [job for job in jobs if has_ended(job)]
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
        "nodes": _render("regions/nodes.html", groups=groups),
    }


def job_page(job: management_pb2.JobInfo) -> str:
    return _render("job.html", job=job, regions={**job_regions(job, JobView()), **compile_regions(job)})


def job_regions(job: management_pb2.JobInfo, view: JobView) -> Regions:
    """All but those of compile_regions."""
    ended = has_ended(job)
    reports = list(_reports_of(job).values())
    if ended:  # as below
        reports.sort(key=lambda report: report.name == "training")
    report = reports[-1] if reports else None
    execution = view.execution(longest=ended)  # what was trained, and not a look at the result, stays on show
    rate = view.rate(execution)
    rows = rate * report.batch_rows if rate is not None and report is not None else None
    return {
        "phase": _render("regions/phase.html", job=job, first_error=view.first_error),
        "facts": _render("regions/facts.html", job=job, ended=ended, rate=rate, rows=rows, report=report),
        "split": _render("regions/split.html", splits=view.splits(execution), execution=execution),
        "members": _render("regions/members.html", job=job, loads=view.loads(), ended=ended),
    }


def compile_regions(job: management_pb2.JobInfo) -> Regions:
    """What the compile reports of the job's executions tell. Does not change as long as job.artifacts does not."""
    reports = _reports_of(job)
    wafers = [node for node in job.nodes if node.role == node_pb2.ROLE_WAFER]
    return {
        "placement": _render("regions/placement.html", job=job, reports=reports, wafers=wafers),
        "layers": _render("regions/layers.html", reports=reports),
    }


def log_rows(rows: Sequence[LogRow]) -> str:
    return _render("log_rows.html", rows=rows)


def error_page(title: str, message: str) -> str:
    return _render("error.html", title=title, message=message)


_reports: dict[str, CompileReport] = {}  # of a few artifacts: one job is looked at at a time, mostly


def _reports_of(job: management_pb2.JobInfo) -> Mapping[int, CompileReport]:
    """Those that there are, by their place in job.artifacts; that of the last execution is the last."""
    found = {place: _cached_report(artifact) for place, artifact in enumerate(job.artifacts[:MAX_REPORTS])}
    return {place: report for place, report in found.items() if report is not None}


def _cached_report(artifact: str) -> CompileReport | None:
    """An artifact is named after what it is made of, and does not change."""
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
    return datetime.fromtimestamp(_time_or_none(seconds)).strftime("%H:%M:%S")


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(_time_or_none(seconds)).strftime("%Y-%m-%d %H:%M:%S")


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(_time_or_none(seconds)).astimezone().isoformat(timespec="seconds")


def _time_or_none(seconds: float) -> float:
    """A time that the wire has may be none."""
    return min(seconds, 4e9) if seconds >= 0 else 0.0


def _duration(seconds: float) -> str:
    """As in 42 s, 3 min, 2 h 5 min."""
    minutes = int(_time_or_none(seconds)) // 60
    if minutes < 1:
        return f"{int(_time_or_none(seconds))} s"
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _ago(seconds: float) -> str:
    passed = time.time() - seconds
    return "just now" if passed < 5 else f"{_duration(passed)} ago"


def _number(number: float) -> str:
    """As in 12,800 or 3.42."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _part(name: str) -> str:
    return _PARTS.get(name, name)


def _render(template: str, **values: Any) -> str:
    return _environment.get_template(template).render(values)


_environment: Final = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.globals["coloured"] = PARTS
_environment.filters |= {
    "ago": _ago,
    "bytes": bytes_text,
    "clock": _clock,
    "count": count_text,
    "date": _date,
    "duration": _duration,
    "iso": _iso,
    "level": _level,
    "number": _number,
    "part": _part,
    "phase": _phase,
    "seconds": seconds_text,
}
