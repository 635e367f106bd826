"""Commands for clusters of this machine: `waferbox up`, `run`, `down`, `token`."""

import dataclasses
import enum
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from waferbox import deadlines
from waferbox.cluster.cluster import Cluster
from waferbox.cluster.embedded_process import Embedded, start_embedded, stop_embedded
from waferbox.cluster.launcher import ClusterSettings, ForkingLauncher, Launcher
from waferbox.commands.cluster_size import warn_of_few_workers
from waferbox.commands.connection import (
    DEFAULT_LISTEN,
    DEFAULT_PAGE,
    ManagementOption,
    checked_address,
    connect,
)
from waferbox.commands.script_command import (
    STANDARD_INPUT,
    ModuleOption,
    NoScript,
    ScriptArgument,
    ScriptArguments,
    command_of,
)
from waferbox.commands.vendor_python import vendor_python
from waferbox.host.folders import cache_root, make_folder
from waferbox.host.memory import parse_size
from waferbox.launch.installation import user_environment
from waferbox.launch.local_clusters import (
    NAME,
    ClusterError,
    ClusterStopped,
    Starter,
    discard_log,
    for_everybody,
    forget_failure,
    local_clusters,
    name_of_script,
    recorded,
    runtime_folder,
    with_name,
)
from waferbox.launch.stop_signals import StopSignals
from waferbox.limits import MAX_NODES
from waferbox.output.console import Status, errors, fail, output, print_error, print_heading, print_text, warn
from waferbox.output.tables import cluster_table
from waferbox.output.working import working
from waferbox.roles import WORKER
from waferbox.rpc.address import is_loopback, split_address
from waferbox.security.tls import tls_folder
from waferbox.security.tokens import Kind, cluster_secret, fix_secret_file, own_clusters_token
from waferbox.settings import MANAGEMENT, RESTART, TLS_DIR, TOKEN
from wsc.v1 import management_pb2

if TYPE_CHECKING:
    from waferbox.ray_engine.settings import RaySettings

# --- The script of `waferbox run` -------------------------------------------------------------------------------------


FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FROM_KERNEL = 0x80  # si_code SI_KERNEL: the terminal has sent the signal to its foreground group, script included


def run_script(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a script, and forwards signals to it. Must be called by the only thread of the process.

    Args:
        command: that runs it.
        environment: variables that are added to those of this process.

    Returns:
        The exit status of the script; 128 + n if signal n ended it.
    """
    watched = {*FORWARDED, signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the end of the script is no signal
    process = subprocess.Popen(command, env={**user_environment(os.environ), **environment})
    # Blocked after the start of the script, which would inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        while process.poll() is None:
            # Without a timeout, after which Python 3.11 may return a signal that was not sent.
            received = signal.sigwaitinfo(watched)
            if received.si_signo != signal.SIGCHLD and received.si_code != _FROM_KERNEL:
                process.send_signal(received.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
    status = process.returncode
    assert status is not None
    return status if status >= 0 else 128 - status


# --- `waferbox token` -------------------------------------------------------------------------------------------------


def token(
    user: Annotated[str | None, typer.Option(metavar="NAME", help="For a user, who may run jobs.")] = None,
    view: Annotated[bool, typer.Option("--view", metavar="", help="For a viewer, who may change nothing.")] = False,
) -> None:
    """Print a token for WAFERBOX_TOKEN, which gives access to the clusters of this account. Default: the owner's."""
    if user is not None and view:
        raise typer.BadParameter("--user and --view are for different people")
    if user is not None and not user.strip():
        raise typer.BadParameter("--user: the name is empty")
    secret = cluster_secret()
    if user is not None:
        print_text(secret.token(Kind.USER, user))
    else:
        print_text(secret.token(Kind.VIEWER if view else Kind.ADMIN))


# --- `waferbox up`, `run` and `down` ----------------------------------------------------------------------------------


# Exit statuses of a script that was stopped on purpose.
STOPPED: Final = frozenset(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))


class Engine(enum.StrEnum):
    """The launcher of the role processes."""

    LOCAL = "local"
    RAY = "ray"


Wafers = Annotated[int, typer.Option(min=1, max=MAX_NODES, help="Wafers.")]
MemoryX = Annotated[
    int | None, typer.Option(min=1, max=MAX_NODES, help=r"MemoryX shards.  \[default: 1; on Ray one for each host]")
]
Workers = Annotated[
    int | None, typer.Option(min=1, max=MAX_NODES, help=r"Input workers in total.  \[default: one for each wafer]")
]
SwarmX = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_NODES,
        help=r"SwarmX nodes.  \[default: a tree over several wafers; on Ray at least one for each host]",
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help=r"Threads of a wafer.  \[default: its share of the cores]")]
StateDir = Annotated[
    Path | None,
    typer.Option(
        help=r"Folder on a disk for weights and optimizer state.  \[default: they are in memory]",
        exists=True,
        file_okay=False,
        writable=True,
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory of each MemoryX shard, such as 8g; the rest is in --state-dir."),
]
VendorClient = Annotated[
    Path | None,
    typer.Option(
        metavar="PYTHON",
        help="Serve the vendor's own client too; PYTHON: the interpreter of its environment.",
        dir_okay=False,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help=r"With --engine ray: auto, HOST:PORT or ray://HOST:PORT.  \[default: auto]"),
]
Resource = Annotated[
    list[str] | None,
    typer.Option(metavar="ROLE.NAME=N", help="With --engine ray, a role's resource: wafer.GPU=1, memoryx.memory=64g."),
]
RuntimeEnv = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="With --engine ray: a runtime environment of Ray, as YAML.", dir_okay=False),
]
Page = Annotated[
    bool, typer.Option("--page", metavar="", help="Serve a status page on this machine, at port 9080 or the next free.")
]
CacheRoot = Annotated[Path | None, typer.Option(help=r"Folder for artifacts.  \[default: ~/.cache/waferbox]")]


def up(
    wafers: Wafers = 1,
    memoryx: MemoryX = None,
    workers: Workers = None,
    swarmx: SwarmX = None,
    threads: Threads = None,
    state_dir: StateDir = None,
    memory_limit: MemoryLimit = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="The cluster's name, which --management takes.")
    ] = Starter.UP,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=r"The address of management; port 0: any.  \[default: 127.0.0.1:9000, or the next free port]",
        ),
    ] = None,
    cache_root: CacheRoot = None,
    compile_root: Annotated[
        Path | None, typer.Option(help="Let scripts name folders for artifacts below this one, outside the cache.")
    ] = None,
    vendor_client: VendorClient = None,
    page: Page = False,
    metrics: Annotated[
        bool, typer.Option("--metrics", metavar="", help="Serve metrics for Prometheus, which finds them by the page.")
    ] = False,
    tls: Annotated[bool, typer.Option("--tls", metavar="", help="Encrypt, with new certificates.")] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", metavar="", help="Listen beyond this machine without --tls.")
    ] = False,
    background: Annotated[bool, typer.Option("--background", metavar="", help="Return when all nodes are up.")] = False,
    engine: Annotated[Engine, typer.Option(help="What starts the processes of the roles.")] = Engine.LOCAL,
    address: Address = None,
    resource: Resource = None,
    runtime_env: RuntimeEnv = None,
) -> None:
    """Start a cluster, which runs until Ctrl-C or `waferbox down`."""
    if engine is Engine.LOCAL and (address or resource or runtime_env):
        raise typer.BadParameter("--address, --resource and --runtime-env need --engine ray")
    if engine is Engine.RAY and background:
        raise typer.BadParameter("--engine ray stays in the foreground: run it under systemd, tmux or nohup")
    on_ray = _ray_settings(address or "auto", resource or (), runtime_env) if engine is Engine.RAY else None
    settings = _settings(wafers, memoryx, workers, swarmx, threads, state_dir, memory_limit, cache_root)
    settings = dataclasses.replace(
        settings,
        listen=DEFAULT_LISTEN if listen is None else checked_address(listen, any_port=True),
        page=DEFAULT_PAGE if page else None,
        next_free=listen is None,
        page_next_free=page,
        metrics=metrics,
    )
    if not NAME.fullmatch(name):
        raise typer.BadParameter(f"--name: {name!r} is no name; one has letters, digits, dots, dashes and underscores")
    if name != Starter.UP and with_name(local_clusters(), name):  # the default name gets a number
        fail(f"a cluster with the name {name} runs already: `waferbox get clusters` shows it")
    if vendor_client is not None:
        with working(f"looking for packages of {vendor_client}"):
            settings = dataclasses.replace(settings, vendor_python=vendor_python(vendor_client))
    if compile_root is not None:
        settings = dataclasses.replace(settings, compile_root=str(compile_root.absolute()))
    if tls:
        _use_tls()
    if not is_loopback(split_address(settings.listen, any_port=True)[0]) and tls_folder() is None:
        if not insecure:
            fail(f"{settings.listen} can be reached from other hosts: add --tls, or --insecure in a trusted network")
        warn("without TLS, everybody who can read the network can copy tokens and use the cluster")
    try:
        if background:
            _up_in_background(settings, name)
        else:
            _up_in_foreground(settings, name, on_ray)
    except (ClusterError, OSError) as error:
        fail(str(error))


def _use_tls() -> None:
    """Makes certificates, for this process and those that it starts."""
    from waferbox.security.authority import issue

    folder = tls_folder() or cache_root() / "tls"
    try:
        issue(folder)
    except OSError as error:
        fail(f"certificates cannot be written to {folder}: {error.strerror}")
    os.environ[TLS_DIR.name] = str(folder)


def _ray_settings(address: str, resources: Sequence[str], runtime_env: Path | None) -> "RaySettings":
    """The settings of --engine ray. Raises typer.BadParameter."""
    from waferbox.ray_engine.settings import RaySettings, parse_resources, read_runtime_env

    try:
        return RaySettings(
            address=address,
            resources=parse_resources(resources),
            runtime_env=None if runtime_env is None else read_runtime_env(runtime_env),
        )
    except ValueError as error:
        raise typer.BadParameter(f"--resource or --runtime-env: {error}") from error
    except OSError as error:
        raise typer.BadParameter(f"--runtime-env: {runtime_env} cannot be read: {error.strerror}") from error


def _up_in_foreground(settings: ClusterSettings, name: str, on_ray: "RaySettings | None") -> None:
    fix_secret_file()
    signals = StopSignals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    launcher: Launcher
    with working("starting the cluster"):
        if on_ray is None:
            launcher = ForkingLauncher()
        else:
            try:
                from waferbox.ray_engine.launcher import RayLauncher
            except ModuleNotFoundError as error:
                fail(f"--engine ray needs Ray ({error}): pip install 'waferbox[ray]'")
            if settings.threads is None:
                settings = dataclasses.replace(settings, threads=on_ray.wafer_threads)
            launcher = RayLauncher(on_ray)
            settings = settings.over_hosts(launcher.num_hosts)
            launcher.reserve(settings.roles, [signals.fileno()])
        try:
            cluster = Cluster(settings, launcher, [signals.fileno()])
        except ClusterStopped as stopped:
            print_error(str(stopped))
            raise typer.Exit(128 + signals.wait()) from None  # as a shell reports a command that the signal ended
    record = recorded(
        Starter.UP,
        name,
        cluster.management,
        cluster.page,
        wafers=settings.wafers,
        workers=settings.roles[WORKER.module],
    )
    with cluster, record as on_given_up:
        _show(cluster, f"{sum(settings.roles.values())} nodes are up. Ctrl-C ends them.")
        cluster.supervise(on_given_up)
        errors.print("waferbox: ending the cluster")


def _up_in_background(settings: ClusterSettings, name: str) -> None:
    descriptor, path = tempfile.mkstemp(suffix=".log", dir=runtime_folder())
    os.close(descriptor)
    log = Path(path)
    try:
        with working("starting the cluster"):
            cluster = start_embedded(settings, Starter.UP, name, log_file=log)
    except ClusterError as error:
        messages = log.read_text(errors="replace").strip()
        discard_log(log)
        raise ClusterError(f"{messages}\n{error}" if messages else str(error)) from error
    _show(cluster, "The cluster is up in the background; `waferbox down` ends it.")


def _show(cluster: Cluster | Embedded, remark: str) -> None:
    """Prints the nodes of a cluster, a remark, and the variables for its users."""
    management = cluster.management
    with connect(management) as connection:
        nodes = connection.nodes()
    print_heading(f"Cluster at {management}")
    output.print(cluster_table(nodes))
    print_text(remark)
    folder = tls_folder()
    tls = "" if folder is None else f" {TLS_DIR.name}={folder}"
    print_text(f"To use it:  export {MANAGEMENT.name}={management}{tls}")
    if cluster.vendor_config:
        print_text(f"To use it with the vendor's client:  export CSCONFIG_PATH={cluster.vendor_config}")
    if cluster.page:
        print_text(f"To look at it:  {cluster.page}")


def run(
    script: ScriptArgument,
    arguments: ScriptArguments = None,
    module: ModuleOption = False,
    wafers: Wafers = 1,
    memoryx: MemoryX = None,
    workers: Workers = None,
    swarmx: SwarmX = None,
    threads: Threads = None,
    state_dir: StateDir = None,
    memory_limit: MemoryLimit = None,
    cache_root: CacheRoot = None,
    page: Page = False,
    restarts: Annotated[int, typer.Option(min=0, help="How often a script that dies or fails is started again.")] = 0,
) -> None:
    """Run a script on a cluster of its own. The exit status is that of the script.

    With --restarts a script that was killed, or ended with an error, is started again. WAFERBOX_RESTART has the number
    of the restart, 0 at first. A script continues from its last checkpoint if it loads that.
    """
    if restarts and script == STANDARD_INPUT:
        raise typer.BadParameter("--restarts: standard input can be read once: write the script to a file")
    try:
        command = command_of(script, arguments or [], is_module=module)
    except NoScript as error:
        fail(str(error), Status.USAGE)
    settings = _settings(wafers, memoryx, workers, swarmx, threads, state_dir, memory_limit, cache_root)
    settings = dataclasses.replace(settings, page=DEFAULT_PAGE if page else None, page_next_free=page)
    try:
        with working("starting the cluster"):
            process, management, url, _ = start_embedded(settings, Starter.RUN, name_of_script(script))
    except ClusterError as error:
        fail(str(error))
    try:
        if url:
            print_text(f"To look at it:  {url}")
        token = own_clusters_token(Kind.USER)
        for restart in range(restarts + 1):
            variables = {MANAGEMENT.name: management, TOKEN.name: token, RESTART.name: str(restart)}
            status = run_script(command, variables)
            if status == 0 or status in STOPPED:
                break
            if restart < restarts:
                if process.poll() is not None:
                    print_error(f"{script} is not started again: its cluster has ended")
                    break
                warn(f"{script} ended with status {status}: starting it again ({restart + 1} of {restarts})")
    finally:
        with working("ending the cluster"):
            stop_embedded(process)
    raise typer.Exit(status)


def down(management: ManagementOption = None) -> None:
    """End a cluster and its jobs."""
    with working("ending the cluster"):
        try:
            with connect(management, for_everybody) as cluster:
                address, own = cluster.address, cluster.record
                cluster.management.Shutdown(management_pb2.ShutdownRequest(), timeout=deadlines.QUERIES.command)
        finally:
            forget_failure()  # if no cluster runs, the error has shown the failure
        has_ended = own is None or own.wait(deadlines.END.down)
    if own is not None and not has_ended:
        fail(f"the cluster at {address} (pid {own.pid}) still runs after {deadlines.END.down:g} s")
    print_text(f"The cluster at {address} is down.")


def _make_cache_root(folder: Path) -> None:
    """Makes the folder, if there is none. Raises typer.BadParameter: it cannot be made or written."""
    try:
        make_folder(folder, 0o700)
        with tempfile.TemporaryFile(dir=folder):  # of some folders, such as /proc, only this says that they take none
            pass
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise typer.BadParameter(f"--cache-root: {folder} must be a folder that can be written: {reason}") from error


def _settings(
    wafers: int,
    memoryx: int | None,
    workers: int | None,
    swarmx: int | None,
    threads: int | None,
    state_dir: Path | None,
    memory_limit: str | None,
    cache_root: Path | None,
) -> ClusterSettings:
    if memory_limit is not None:
        if state_dir is None:
            raise typer.BadParameter("--memory-limit needs --state-dir: a folder on a disk, for the rest of the states")
        try:
            parse_size(memory_limit)
        except ValueError as error:
            raise typer.BadParameter(f"--memory-limit: {error}") from error
    if cache_root is not None:
        _make_cache_root(cache_root)
    if workers is not None:
        warn_of_few_workers(wafers, workers, "--workers ")
    return ClusterSettings(
        wafers=wafers,
        memoryx=memoryx,
        workers=workers,
        swarmx=swarmx,
        threads=threads,
        state_dir=None if state_dir is None else str(state_dir.absolute()),
        memory_limit=memory_limit,
        cache_root=None if cache_root is None else str(cache_root.absolute()),
    )
