"""The tables of the commands, and the texts in their cells."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from waferbox import roles
from waferbox.holders import holders_text
from waferbox.output.console import printable
from waferbox.text import on_one_line
from wsc.v1 import management_pb2

_STYLES: Final = {
    management_pb2.JOB_PHASE_RUNNING: "green",
    management_pb2.JOB_PHASE_FAILED: "red",
    management_pb2.JOB_PHASE_CANCELLED: "yellow",
}


def empty_table(*columns: str, right: Sequence[str] = (), whole: Sequence[str] = (), dense: bool = False) -> Table:
    """Returns a table in the commands' style.

    Args:
        columns: their titles.
        right: the columns with numbers, which are aligned right.
        whole: the columns that are never folded.
        dense: whether there is less space between columns.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0) if dense else (0, 1))
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in right else "left",
            overflow="fold",
            no_wrap=column in whole,
        )
    return table


def sorted_nodes(nodes: Iterable[management_pb2.NodeInfo]) -> list[management_pb2.NodeInfo]:
    """The nodes by role, then in the order of their registrations."""
    order = [role.number for role in roles.REGISTERED]
    return sorted(nodes, key=lambda node: (order.index(node.role), int(node.node_id.lstrip("n") or 0)))


def is_free(node: management_pb2.NodeInfo) -> bool:
    """Whether a job may lease the node; an ingress is never leased."""
    return not node.job and roles.role_of(node.role).is_leased


def cluster_table(nodes: Sequence[management_pb2.NodeInfo]) -> Table:
    """The table of `waferbox up`, with a row for each role that has nodes."""
    table = empty_table("role", "nodes", "processes", right=["nodes"])
    for role in roles.REGISTERED:
        pids = [str(node.process_id) for node in sorted_nodes(nodes) if node.role == role.number]
        if pids:
            table.add_row(role.name, str(len(pids)), ", ".join(pids))
    return table


def nodes_table(nodes: Sequence[management_pb2.NodeInfo], *, wide: bool = False) -> Table:
    """A row for each node, with its lease; wide: also with its addresses."""
    more = ("host", "address", "metrics", "pid", "version") if wide else ()
    columns = ("node", "role", "job", "member", "lease", *more)
    table = empty_table(*columns, right=["pid", "lease"], whole=columns)
    for node in sorted_nodes(nodes):
        cells = [
            node.node_id,
            roles.role_of(node.role).name,
            "[dim]free[/]" if is_free(node) else node.job,
            node.member,
            f"{node.lease_left_seconds:.1f} s",
        ]
        if wide:
            cells += [safe(text) for text in (node.host, node.address, node.metrics)]
            cells += [str(node.process_id), safe(node.version)]
        table.add_row(*cells)
    return table


def jobs_table(jobs: Sequence[management_pb2.JobInfo], *, wide: bool = False) -> Table:
    """A row for each job; wide: also with its time left, priority, host, nodes, and message."""
    more = ("left", "priority", "host", "nodes", "message") if wide else ()
    whole = ("job", "phase", "step", "age", "user", "wafers", "left", "priority", "host", "nodes")
    columns = ("job", "phase", "step", "age", "user", "wafers", "labels", *more)
    table = empty_table(*columns, right=["step", "left", "age", "wafers", "priority", "nodes"], whole=whole)
    for job in jobs:
        cells: list[str | Text] = [
            job.job,
            styled_phase(job),
            step_text(job),
            age_text(job.age_seconds),
            safe(job.user),
            str(job.num_csx),
            one_line(Text.from_markup(safe(" ".join(job.labels)))),
        ]
        if wide:
            cells += [left_text(job), str(job.priority), safe(job.host), str(len(job.nodes))]
            cells.append(safe(on_one_line(reason(job))))
        table.add_row(*cells)
    return table


def phase_text(job: management_pb2.JobInfo) -> str:
    """The phase, such as "running"; for a job in the queue also its place."""
    name = management_pb2.JobPhase.Name(job.phase).removeprefix("JOB_PHASE_").lower()
    return f"{name}, place {job.queue_position}" if job.queue_position else name


def styled_phase(job: management_pb2.JobInfo) -> str:
    """The phase with its colour, as markup."""
    style = _STYLES.get(job.phase)
    return f"[{style}]{phase_text(job)}[/]" if style else phase_text(job)


def reason(job: management_pb2.JobInfo) -> str:
    """The cause of a job's wait, with those who hold what it waits for; or else its message."""
    if not job.waiting_for:
        return job.message
    held = holders_text(job.holders)
    return f"waits for {job.waiting_for}" + (f" ({held})" if held else "")


def step_text(job: management_pb2.JobInfo) -> str:
    """A job's step, such as 20/400; empty before the first execution."""
    return f"{job.step}/{job.num_steps}" if job.num_steps else ""


def left_text(job: management_pb2.JobInfo) -> str:
    """The time until the end of the running execution, such as "12 min"; empty where it is not known."""
    return age_text(job.seconds_left) if job.seconds_left else ""


def age_text(seconds: float) -> str:
    """A duration, such as 15 s, 3 min, 2.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def time_text(seconds: float) -> str:
    """Local time, such as 2026-11-21 16:20:11. seconds: since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def safe(text: str) -> str:
    """Untrusted text on one line, escaped for a string with markup."""
    return escape(printable(text).replace("\n", "\\n").replace("\t", "\\t"))


def one_line(text: Text) -> Text:
    """The text cut, not folded, at the width of the terminal, so that repeated output keeps its height."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def passes_table(descriptions: Mapping[str, str]) -> Table:
    """A row for each pass of the compiler. descriptions: by name."""
    table = empty_table("pass", "what it does")
    for name, description in descriptions.items():
        table.add_row(name, escape(description))
    return table
