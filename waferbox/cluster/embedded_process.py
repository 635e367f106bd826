"""Starting and ending `python -m waferbox.cluster.embedded`, a cluster in a process of its own."""

import contextlib
import json
import subprocess
from pathlib import Path
from typing import NamedTuple

from waferbox import deadlines
from waferbox.cluster.embedded import arguments
from waferbox.cluster.launcher import ClusterSettings
from waferbox.launch.installation import python_command
from waferbox.launch.local_clusters import ClusterError, Starter


class Embedded(NamedTuple):
    """The process of a cluster, and its addresses."""

    process: subprocess.Popen[bytes]
    management: str  # address of the management service
    page: str  # URL of its page; empty: there is none
    vendor_config: str  # path of a file for CSCONFIG_PATH of the vendor's client; empty: it is not served


def start_embedded(
    settings: ClusterSettings, starter: Starter, name: str, *, log_file: Path | None = None, owner: int = 0
) -> Embedded:
    """Starts a cluster, and waits until all nodes have registered.

    Args:
        settings: the processes of the cluster.
        starter: what starts it. One of `waferbox up` runs until it is shut down, others until their standard input is
            closed.
        name: by which commands find it.
        log_file: the file for its messages, which the cluster removes at its end; None: standard error.
        owner: the process with whose end the cluster ends, instead of with its standard input; 0: none.

    Raises:
        ClusterError: the cluster did not start.
    """
    extra = ["--starter", starter, "--name", name]
    extra += [] if log_file is None else ["--log", str(log_file)]
    extra += ["--owner", str(owner)] if owner else []
    with contextlib.nullcontext() if log_file is None else log_file.open("ab") as log:
        # In a session of its own, so that Ctrl-C on the terminal reaches the script only.
        process = subprocess.Popen(
            [*python_command("waferbox.cluster.embedded"), *arguments(settings), *extra],
            stdin=subprocess.DEVNULL if owner or starter is Starter.UP else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        with process.stdout as output:
            line = output.readline()  # without a timeout: the process has deadlines of its own
    except BaseException:
        process.terminate()
        process.wait(deadlines.END.launched)
        raise
    if not line:
        raise ClusterError(f"the cluster did not start (status {process.wait(deadlines.END.launched)})")
    described = json.loads(line)
    return Embedded(process, str(described["management"]), str(described["page"]), str(described["vendor_config"]))


def stop_embedded(process: subprocess.Popen[bytes]) -> None:
    """Ends the cluster and waits for its end."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(deadlines.END.launched)
    except subprocess.TimeoutExpired:
        process.kill()  # its fork server, and all that the server forked, die with it
        process.wait()
