"""`waferbox page`: the status page of a cluster, served by this command."""

import signal
import webbrowser
from typing import Annotated, Final

import grpc
import typer

from waferbox.commands.connection import DEFAULT_PAGE, Connection, ManagementOption, connect
from waferbox.host.descriptors import readable
from waferbox.host.folders import cache_root
from waferbox.launch.stop_signals import StopSignals
from waferbox.output.console import errors, fail, print_text
from waferbox.rpc.address import is_loopback, listen, split_address

CHECK_SECONDS: Final = 2.0  # between two checks that the cluster is up
MAX_FAILED_CHECKS: Final = 5


def page(
    management: ManagementOption = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help=r"0: any.  \[default: 9080, or the next free one]")
    ] = None,
    browser: Annotated[bool, typer.Option("--browser", metavar="", help="Open it in the browser.")] = False,
) -> None:
    """Serve the status page of a cluster on this machine, until Ctrl-C, or name the one that the cluster serves.

    It is for every cluster that commands reach: of `waferbox up` and `waferbox run`, of a script, or of another host.
    """
    # In the function: other commands need neither the management service nor a server.
    from appliance.finished_jobs import FinishedJobs
    from appliance.page.server import PageServer
    from appliance.page.source import PageSource, RemoteSource
    from appliance.page.stored_source import StoredSource

    host, default = DEFAULT_PAGE.split(":")
    with connect(management) as cluster:
        cluster.nodes()  # fails where there is no cluster
        if port is None and cluster.record is not None and cluster.record.page:
            _show(cluster.address, cluster.record.page, browser=browser)
            return
        try:
            server = listen(PageServer, f"{host}:{default if port is None else port}", next_free=port is None)
        except OSError as error:
            fail(str(error))
        signals = StopSignals(signal.SIGINT, signal.SIGTERM)
        try:
            source: PageSource = RemoteSource(cluster.address, cluster.token)
            if is_loopback(split_address(cluster.address)[0]):
                source = StoredSource(source, FinishedJobs(cache_root()))  # of this user's clusters on this machine
            server.start(source)
            _show(cluster.address, server.url, browser=browser)
            errors.print("Ctrl-C ends the page, and leaves the cluster as it is.")
            _watch(cluster, signals)
        finally:
            server.close()
            signals.close()


def _show(address: str, url: str, *, browser: bool) -> None:
    print_text(f"The cluster at {address}:  {url}")
    if browser:
        webbrowser.open(url)


def _watch(cluster: Connection, signals: StopSignals) -> None:
    """Returns after a signal. Raises grpc.RpcError if the cluster does not answer for a while."""
    failed = 0
    while not readable([signals.fileno()], CHECK_SECONDS):
        try:
            cluster.nodes()
            failed = 0
        except grpc.RpcError:  # management may be restarted
            failed += 1
            if failed == MAX_FAILED_CHECKS:
                raise
