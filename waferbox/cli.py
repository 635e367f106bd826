"""The command `waferbox`: clusters of this machine, and scripts on them."""

import dataclasses
import os
import signal
import tempfile
from pathlib import Path
from typing import Annotated, Never

import grpc
import typer
from rich.console import Console
from rich.markup import escape

from interconnect.address import split_address
from interconnect.server import make_channel
from interconnect.version import __version__
from waferbox.cluster import Cluster, ClusterError, ClusterSettings
from waferbox.embedded import StopSignals, stay
from waferbox.embedded_process import start_embedded, stop_embedded
from waferbox.launcher import ForkingLauncher
from waferbox.records import Record, discard_log, recorded, records, runtime_folder
from waferbox.script import run_script
from waferbox.tables import cluster_table, jobs_table, nodes_table, passes_table
from waferbox.trace import trace
from wsc.v1 import management_pb2, management_pb2_grpc

MANAGEMENT_VARIABLE = "WAFERBOX_MANAGEMENT"
CALL_SECONDS = 4.0
DOWN_SECONDS = 15.0

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
output = Console()
errors = Console(stderr=True)

Wafers = Annotated[int, typer.Option(min=1, help="Wafers.")]
MemoryX = Annotated[int, typer.Option(min=1, help="MemoryX shards.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Input workers in all.  [default: one for each wafer]")]
SwarmX = Annotated[int | None, typer.Option(min=1, help="SwarmX nodes.  [default: what a tree over the wafers needs]")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of a wafer.  [default: its share of the cores]")]
CacheRoot = Annotated[Path | None, typer.Option(help="Folder of the compiled artifacts.  [default: ~/.cache/waferbox]")]
Management = Annotated[
    str | None,
    typer.Option(
        "--management",
        envvar=MANAGEMENT_VARIABLE,
        metavar="HOST:PORT",
        help="The management service.  [default: the cluster that `waferbox up` started]",
    ),
]


def _address(value: str, *, any_port: bool = False) -> str:
    try:
        split_address(value, any_port=any_port)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return value


def _fail(message: str) -> Never:
    errors.print(f"[bold red]waferbox:[/] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(1)


def _head(text: str) -> None:
    output.print(text, style="bold", highlight=False)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        output.print(f"waferbox {__version__}", highlight=False)
        raise typer.Exit


@app.command()
def up(
    wafers: Wafers = 1,
    memoryx: MemoryX = 1,
    workers: Workers = None,
    swarmx: SwarmX = None,
    threads: Threads = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where management listens; port 0: any.")
    ] = "127.0.0.1:0",
    cache_root: CacheRoot = None,
    page: Annotated[bool, typer.Option("--page", help="Serve a page to look at, on this machine.")] = False,
    background: Annotated[bool, typer.Option("--background", help="Return when the cluster is there.")] = False,
) -> None:
    """Start a cluster, which stays until Ctrl-C or `waferbox down`."""
    settings = _settings(wafers, memoryx, workers, swarmx, threads, _address(listen, any_port=True), cache_root)
    settings = dataclasses.replace(settings, page="127.0.0.1:0" if page else None)
    if split_address(listen, any_port=True)[0] not in ("127.0.0.1", "localhost", "[::1]"):
        errors.print("[yellow]waferbox: everybody who reaches this address can use the cluster[/]", highlight=False)
    try:
        if background:
            _up_in_background(settings)
        else:
            _up_in_foreground(settings)
    except (ClusterError, OSError) as error:
        _fail(str(error))


def _up_in_foreground(settings: ClusterSettings) -> None:
    signals = StopSignals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with errors.status("starting the cluster"):
        cluster = Cluster(settings, ForkingLauncher(), [signals.fileno()])
    with cluster, recorded(cluster.management, os.getpid()):
        _show(cluster.management, cluster.page, f"{sum(settings.roles.values())} nodes are up. Ctrl-C ends them.")
        stay(cluster, [signals.fileno()])
        errors.print("waferbox: ending the cluster", highlight=False)


def _up_in_background(settings: ClusterSettings) -> None:
    descriptor, name = tempfile.mkstemp(suffix=".log", dir=runtime_folder())
    os.close(descriptor)
    log = Path(name)
    try:
        with errors.status("starting the cluster"):
            cluster = start_embedded(settings, detached_log=log)
    except ClusterError as error:
        messages = log.read_text(errors="replace").strip()
        discard_log(log)
        raise ClusterError(f"{error}\n{messages}") from error
    _show(cluster.management, cluster.page, "The cluster is up in the background; `waferbox down` ends it.")


def _show(management: str, page: str, what: str) -> None:
    nodes, _ = _ask(management)
    _head(f"Cluster at {management}")
    output.print(cluster_table(nodes))
    output.print(what, highlight=False)
    output.print(f"To use it:  export {MANAGEMENT_VARIABLE}={management}", highlight=False)
    if page:
        output.print(f"To look at it:  {page}", highlight=False)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[Path, typer.Argument(help="A Python script.", exists=True, dir_okay=False, readable=True)],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script is given.")] = None,
    wafers: Wafers = 1,
    memoryx: MemoryX = 1,
    workers: Workers = None,
    swarmx: SwarmX = None,
    threads: Threads = None,
    cache_root: CacheRoot = None,
) -> None:
    """Run a script on a cluster that is there for it alone. Exits as the script does."""
    settings = _settings(wafers, memoryx, workers, swarmx, threads, "127.0.0.1:0", cache_root)
    try:
        process, management, _ = start_embedded(settings)
    except ClusterError as error:
        _fail(str(error))
    try:
        status = run_script(str(script), arguments or [], {MANAGEMENT_VARIABLE: management})
    finally:
        stop_embedded(process)
    raise typer.Exit(status)


@app.command()
def status(management: Management = None) -> None:
    """Show the nodes with their leases, and the jobs."""
    address, _ = _find(management)
    nodes, jobs = _ask(address)
    _head(f"Nodes of {address}")
    output.print(nodes_table(nodes))
    output.print()
    _head("Jobs")
    output.print(jobs_table(jobs))


app.command()(trace)


@app.command()
def down(management: Management = None) -> None:
    """End a cluster, and the jobs on it."""
    address, record = _find(management)
    with make_channel(address) as channel:
        try:
            management_pb2_grpc.ManagementStub(channel).Shutdown(management_pb2.ShutdownRequest(), timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            _unreachable(address, error)
    if record is not None and not record.wait(DOWN_SECONDS):
        _fail(f"the cluster at {address} (pid {record.pid}) is still there after {DOWN_SECONDS:g} s")
    output.print(f"The cluster at {address} is down.", highlight=False)


@app.command()
def opt(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A module in CIRH; - is standard input.")] = "-",
    passes: Annotated[str, typer.Option("--pass", metavar="A,B", help="What to run, in this order; see --list.")] = "",
    print_after_all: Annotated[
        bool, typer.Option("--print-after-all", help="Print the module after each of them, to standard error.")
    ] = False,
    num_csx: Annotated[int, typer.Option(min=1, help="Wafers over which the work is divided.")] = 1,
    out: Annotated[str, typer.Option("-o", metavar="OUT", help="Where the result goes; - is standard output.")] = "-",
    list_passes: Annotated[bool, typer.Option("--list", help="List the passes in the order of a compile.")] = False,
) -> None:
    """Run passes of the compiler on text. Exits with 1 if the text or a pass is refused."""
    # The compiler, and torch with it, are loaded for this command only.
    from appliance.compiler.opt import OptError, descriptions
    from waferbox.opt import optimise

    if list_passes:
        output.print(passes_table(descriptions()))
        return
    try:
        optimise(file, [name.strip() for name in passes.split(",") if name.strip()], num_csx, print_after_all, out)
    except OptError as error:
        _fail(str(error))


@app.command("compile-report")
def compile_report(
    artifact: Annotated[
        Path, typer.Argument(metavar="ARTIFACT", help="A .plan file, or a folder of them: the newest.", exists=True)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write it as a page of HTML.", dir_okay=False)
    ] = None,
) -> None:
    """Show what a compile told: layers, memory, the predicted step."""
    # The compiler, and torch with it, are loaded for this command only.
    from appliance.compiler.report_page import report_page
    from waferbox.compile_report import NoArtifact, read_report, report_tables

    try:
        report = read_report(artifact)
        if html is not None:
            html.write_text(report_page(report))
    except (NoArtifact, OSError) as error:
        _fail(str(error))
    if as_json:
        typer.echo(report.to_json())
    elif html is None:
        output.print(report_tables(report), highlight=False)
    else:
        output.print(f"The report is in {escape(str(html))}", highlight=False, soft_wrap=True)


def _settings(
    wafers: int,
    memoryx: int,
    workers: int | None,
    swarmx: int | None,
    threads: int | None,
    listen: str,
    cache_root: Path | None,
) -> ClusterSettings:
    return ClusterSettings(
        wafers=wafers,
        memoryx=memoryx,
        workers=workers,
        swarmx=swarmx,
        threads=threads,
        listen=listen,
        cache_root=None if cache_root is None else str(cache_root.absolute()),
    )


def _find(management: str | None) -> tuple[str, Record | None]:
    """The address of the cluster that is meant, and the note of it if it was started here."""
    known = records()
    if management is not None:
        address = _address(management)
        return address, next((record for record in known if record.management == address), None)
    if not known:
        _fail(
            "no cluster is up that `waferbox up` started here; start one, or name another with --management HOST:PORT "
            f"(or {MANAGEMENT_VARIABLE})"
        )
    if len(known) > 1:
        addresses = ", ".join(record.management for record in known)
        _fail(f"several clusters are up ({addresses}): say which with --management HOST:PORT")
    return known[0].management, known[0]


def _ask(address: str) -> tuple[list[management_pb2.NodeInfo], list[management_pb2.JobInfo]]:
    with make_channel(address) as channel:
        stub = management_pb2_grpc.ManagementStub(channel)
        try:
            nodes = stub.ListNodes(management_pb2.ListNodesRequest(), timeout=CALL_SECONDS).nodes
            jobs = stub.ListJobs(management_pb2.ListJobsRequest(), timeout=CALL_SECONDS).jobs
        except grpc.RpcError as error:
            _unreachable(address, error)
    return list(nodes), list(jobs)


def _unreachable(address: str, error: grpc.RpcError) -> Never:
    code = error.code() if isinstance(error, grpc.Call) else None
    if code == grpc.StatusCode.UNIMPLEMENTED:
        _fail(f"what answers at {address} is not a management service")
    _fail(f"no management service answers at {address}; is the cluster up, and is this its address?")


def main() -> None:
    app()
