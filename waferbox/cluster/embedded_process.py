"""A cluster in a process of its own, `python -m waferbox.cluster.embedded`: for `waferbox run` and `up`."""

import contextlib
import json
import subprocess
from pathlib import Path
from typing import NamedTuple

from waferbox import deadlines
from waferbox.cluster.cluster import ClusterError
from waferbox.cluster.embedded import arguments
from waferbox.cluster.launcher import ClusterSettings
from waferbox.launch.installation import python_command


class Embedded(NamedTuple):
    """A cluster as its starter knows it."""

    process: subprocess.Popen[bytes]
    management: str  # the management service's address
    page: str  # its page's, as a URL; empty: there is none
    vendor_config: str  # a file for CSCONFIG_PATH of the vendor's client; empty: it is not served


def start_embedded(settings: ClusterSettings, *, detached_log: Path | None = None) -> Embedded:
    """The cluster, once all nodes are there.

    It ends when its standard input is closed. With detached_log, the file for its messages, it is detached: it does
    not, and is the caller's no more. Raises ClusterError.
    """
    detached = detached_log is not None
    extra = ["--detached", "--log", str(detached_log)] if detached else []
    with contextlib.nullcontext() if detached_log is None else detached_log.open("ab") as log:
        process = subprocess.Popen(
            [*python_command("waferbox.cluster.embedded"), *arguments(settings), *extra],
            stdin=subprocess.DEVNULL if detached else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        with process.stdout as output:
            line = output.readline()  # it says something, or ends, within its own deadline
    except BaseException:
        process.terminate()
        process.wait(deadlines.END.launched)
        raise
    if not line:
        raise ClusterError(f"the cluster did not start (status {process.wait(deadlines.END.launched)})")
    described = json.loads(line)
    return Embedded(process, str(described["management"]), str(described["page"]), str(described["vendor_config"]))


def stop_embedded(process: subprocess.Popen[bytes]) -> None:
    """End the cluster and wait for it."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(deadlines.END.launched)
    except subprocess.TimeoutExpired:
        process.kill()  # its fork server, and all that it forked, die with it
        process.wait()
