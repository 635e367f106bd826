"""`waferbox get`, `describe` and `status`: the nodes and jobs of a cluster."""

import shlex
import time
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from waferbox import __version__, roles
from waferbox.commands.connection import (
    ENDED,
    Connection,
    JobArgument,
    ManagementOption,
    OptionalJobArguments,
    connect,
    find_job,
)
from waferbox.holders import holders_text
from waferbox.launch.local_clusters import Starter, given_up, local_clusters
from waferbox.output.console import (
    Format,
    FormatOption,
    errors,
    output,
    print_data,
    print_heading,
    print_text,
    print_unfolded,
    printable,
    warn,
)
from waferbox.output.tables import (
    age_text,
    empty_table,
    is_free,
    jobs_table,
    left_text,
    nodes_table,
    safe,
    sorted_nodes,
    step_text,
    styled_phase,
    time_text,
)
from wsc.v1 import management_pb2

NO_JOBS = "No jobs. To run a script:  WAFERBOX_MANAGEMENT={address} python SCRIPT"
NO_NODES = "No nodes. To start one:  python -m wafer --management {address}; also memoryx, swarmx, workers"

get = typer.Typer(no_args_is_help=True, help="Show jobs, nodes, or the cluster.")
describe = typer.Typer(no_args_is_help=True, help="Show the details of one job.")

Selector = Annotated[
    list[str] | None, typer.Option("--selector", "-l", metavar="KEY=VALUE", help="Only jobs with this label.")
]


@get.command("job", hidden=True)
@get.command("jobs")
def get_jobs(
    names: OptionalJobArguments = None,
    selector: Selector = None,
    form: FormatOption = Format.TABLE,
    management: ManagementOption = None,
) -> None:
    """Show the jobs: live ones, newest first, then the last that ended."""
    wrong = [text for text in selector or () if text.find("=") < 1]
    if wrong:
        raise typer.BadParameter(f"--selector: {wrong[0]!r} is not KEY=VALUE")
    with connect(management) as cluster:
        jobs = cluster.jobs()
    chosen = [find_job(jobs, name) for name in names or ()] or jobs
    wanted = set(selector or ())
    chosen = [job for job in chosen if wanted <= set(job.labels)]
    if form.is_data:
        print_data(management_pb2.ListJobsResponse(jobs=chosen), form)
    elif jobs and not chosen:
        errors.print(f"No job has the label {safe(' and '.join(sorted(wanted)))}.")
    else:
        _show_jobs(cluster.address, chosen, wide=form == Format.WIDE)


@get.command("node", hidden=True)
@get.command("nodes")
def get_nodes(form: FormatOption = Format.TABLE, management: ManagementOption = None) -> None:
    """Show the nodes, the jobs that lease them, and the time left of each lease."""
    with connect(management) as cluster:
        listed = cluster.list_nodes()
    nodes = sorted_nodes(listed.nodes)
    if form.is_data:
        print_data(management_pb2.ListNodesResponse(nodes=nodes, metrics=listed.metrics), form)
    else:
        _show_nodes(cluster.address, nodes, wide=form == Format.WIDE)


@get.command("cluster")
def get_cluster(form: FormatOption = Format.TABLE, management: ManagementOption = None) -> None:
    """Show the numbers of nodes and free nodes of each role, and of jobs."""
    with connect(management) as cluster:
        summary = _summary(cluster)
    if form.is_data:
        print_data(summary, form)
        return
    print_heading(f"Cluster at {cluster.address}")
    table = empty_table("role", "nodes", "free", right=["nodes", "free"])
    for role in summary["roles"]:
        table.add_row(role["role"], str(role["nodes"]), str(role["free"]))
    output.print(table)
    jobs = summary["jobs"]
    output.print(f"Jobs: {jobs['under_way']} under way ({jobs['queued']} in the queue), {jobs['ended']} ended.")
    if summary["metrics"]:
        print_text(f"Metrics of management: {summary['metrics']}")


@get.command("clusters")
def get_clusters() -> None:
    """Show the clusters that this account has started on this machine, and not ended."""
    known = local_clusters()
    if not known:
        errors.print("No clusters. To start one:  waferbox up")
        return
    table = empty_table("name", "started by", "management", "page", "pid", "age", right=["pid", "age"], whole=["name"])
    for cluster in known:
        starter = {Starter.UP: "waferbox up", Starter.RUN: "waferbox run", Starter.SCRIPT: "a script"}[cluster.starter]
        age = age_text(time.time() - cluster.created)
        table.add_row(cluster.name, starter, cluster.management, cluster.page, str(cluster.pid), age)
    output.print(table)


def status(management: ManagementOption = None) -> None:
    """Show the nodes and the jobs."""
    with connect(management) as cluster:
        nodes, jobs = cluster.nodes(), cluster.jobs()
    print_heading(f"Nodes of {cluster.address}")
    _show_nodes(cluster.address, nodes)
    for reason in given_up(cluster.address):
        warn(reason)
    output.print()
    print_heading("Jobs")
    _show_jobs(cluster.address, jobs)


def _show_jobs(address: str, jobs: Sequence[management_pb2.JobInfo], *, wide: bool = False) -> None:
    if jobs:
        (print_unfolded if wide else output.print)(jobs_table(jobs, wide=wide))
    else:
        errors.print(NO_JOBS.format(address=address), soft_wrap=True)


def _show_nodes(address: str, nodes: Sequence[management_pb2.NodeInfo], *, wide: bool = False) -> None:
    if nodes:
        (print_unfolded if wide else output.print)(nodes_table(nodes, wide=wide))
    else:
        errors.print(NO_NODES.format(address=address), soft_wrap=True)


def _summary(cluster: Connection) -> dict[str, Any]:
    listed, jobs = cluster.list_nodes(), cluster.jobs()
    nodes = listed.nodes
    total = Counter(node.role for node in nodes)
    free = Counter(node.role for node in nodes if is_free(node))
    ended = sum(job.phase in ENDED for job in jobs)
    queued = sum(job.phase == management_pb2.JOB_PHASE_QUEUED for job in jobs)
    return {
        "management": cluster.address,
        "metrics": listed.metrics,
        "version": __version__,
        "roles": [
            {"role": role.name, "nodes": total[role.number], "free": free[role.number]} for role in roles.REGISTERED
        ],
        "jobs": {"under_way": len(jobs) - ended, "queued": queued, "ended": ended},
    }


@describe.command("jobs", hidden=True)
@describe.command("job")
def describe_job(name: JobArgument, management: ManagementOption = None) -> None:
    """Show the details of a job. For programs: `waferbox get jobs JOB -o json`."""
    with connect(management) as cluster:
        job = find_job(cluster.jobs(), name)
    table = Table.grid(padding=(0, 2))
    for title, text in _facts(job):
        if text:
            table.add_row(f"{title}:", text)
    output.print(table)
    if job.nodes:
        output.print()
        output.print(_job_nodes(job.nodes))
    if job.restarts:
        output.print()
        output.print(_restarts(job.restarts))


def _facts(job: management_pb2.JobInfo) -> Sequence[tuple[str, str]]:
    until_started = f", after {age_text(job.started - job.created)}" if job.started else ""
    until_ended = f", after {age_text(job.ended - job.created)}" if job.ended else ""
    return (
        ("Job", job.job),
        ("Phase", styled_phase(job)),
        ("Step", step_text(job)),
        ("Left", left_text(job)),
        ("Message", escape(printable(job.message.strip()))),
        ("Waits for", safe(job.waiting_for)),
        ("Held by", safe(holders_text(job.holders))),
        ("User", safe(f"{job.user} on {job.host}" if job.user else "")),
        ("Script", safe(shlex.join(job.command))),
        ("Labels", safe(" ".join(job.labels))),
        ("Priority", str(job.priority)),
        ("Wafers", str(job.num_csx)),
        ("Created", f"{time_text(job.created)}"),
        ("Idle since", time_text(job.idle_since) if job.idle_since else ""),
        ("Got nodes", f"{time_text(job.started)}{until_started}" if job.started else ""),
        ("Ended", f"{time_text(job.ended)}{until_ended}" if job.ended else ""),
        ("Restarts", str(job.num_restarts or "")),
        ("Coordinator", safe(job.coordinator)),
    )


def _restarts(restarts: Sequence[management_pb2.Restart]) -> Table:
    table = empty_table("restarted", "from step", "reached", "after", "cause", right=["from step", "reached", "after"])
    for restart in restarts:
        steps = (str(restart.from_step), str(restart.reached_step))
        table.add_row(time_text(restart.time), *steps, f"{restart.seconds:.1f} s", safe(restart.cause))
    return table


def _job_nodes(nodes: Sequence[management_pb2.NodeInfo]) -> Table:
    metrics = ["metrics"] if any(node.metrics for node in nodes) else []
    columns = ("member", "node", "host", "address", *metrics, "pid")
    table = empty_table(*columns, right=["pid"], whole=["member", "node", "pid"])
    for node in sorted_nodes(nodes):
        where = [safe(node.host), safe(node.address), *(safe(node.metrics) for _ in metrics)]
        table.add_row(node.member, node.node_id, *where, str(node.process_id))
    return table
