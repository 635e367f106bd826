"""What the command shows, as tables."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from wsc.v1 import management_pb2, node_pb2

ROLES = {
    node_pb2.ROLE_WAFER: "wafer",
    node_pb2.ROLE_MEMORYX: "memoryx",
    node_pb2.ROLE_SWARMX: "swarmx",
    node_pb2.ROLE_WORKER: "worker",
}
PHASES = {
    management_pb2.JOB_PHASE_STARTING: "starting",
    management_pb2.JOB_PHASE_COMPILING: "compiling",
    management_pb2.JOB_PHASE_QUEUED: "waiting for nodes",
    management_pb2.JOB_PHASE_RUNNING: "[green]running[/]",
    management_pb2.JOB_PHASE_IDLE: "idle",
    management_pb2.JOB_PHASE_SUCCEEDED: "succeeded",
    management_pb2.JOB_PHASE_FAILED: "[red]failed[/]",
    management_pb2.JOB_PHASE_CANCELLED: "[yellow]cancelled[/]",
}


def empty_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table in the command's style. right: the columns with numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _sorted(nodes: Iterable[management_pb2.NodeInfo]) -> list[management_pb2.NodeInfo]:
    order = list(ROLES)
    return sorted(nodes, key=lambda node: (order.index(node.role), int(node.node_id.lstrip("n") or 0)))


def cluster_table(nodes: Sequence[management_pb2.NodeInfo]) -> Table:
    """One line for each role: what `up` shows."""
    table = empty_table("role", "nodes", "processes", right=["nodes"])
    counts = Counter(node.role for node in nodes)
    for role, name in ROLES.items():
        pids = ", ".join(str(node.process_id) for node in _sorted(nodes) if node.role == role)
        table.add_row(name, str(counts[role]), pids)
    return table


def nodes_table(nodes: Sequence[management_pb2.NodeInfo]) -> Table:
    """One line for each node, with its lease."""
    table = empty_table("node", "role", "address", "pid", "version", "job", "lease", right=["pid", "lease"])
    for node in _sorted(nodes):
        table.add_row(
            node.node_id,
            ROLES[node.role],
            node.address,
            str(node.process_id),
            node.version,
            node.job or "[dim]free[/]",
            f"{node.lease_left_seconds:.1f} s",
        )
    if not nodes:
        table.add_row("[dim]none[/]")
    return table


def jobs_table(jobs: Sequence[management_pb2.JobInfo]) -> Table:
    """One line for each job, newest first."""
    table = empty_table("job", "phase", "step", "age", "labels", "message", right=["step", "age"])
    for job in jobs:
        step = f"{job.step}/{job.num_steps}" if job.num_steps else ""
        table.add_row(
            job.job,
            PHASES.get(job.phase, "?"),
            step,
            _age(job.age_seconds),
            " ".join(job.labels),
            _escaped(job.message),
        )
    if not jobs:
        table.add_row("[dim]none[/]")
    return table


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _escaped(text: str) -> str:
    first = text.strip().splitlines()[0] if text.strip() else ""
    return escape(first)


def passes_table(descriptions: Mapping[str, str]) -> Table:
    """One line for each pass of the compiler."""
    table = empty_table("pass", "what it does")
    for name, description in descriptions.items():
        table.add_row(name, escape(description))
    return table
