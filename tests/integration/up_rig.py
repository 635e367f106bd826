"""`waferbox up` as a process of its own, and the other commands."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator

from cluster_rig import Surroundings


@contextlib.contextmanager
def up(surroundings: Surroundings, *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The process, and the management service's address, once all nodes are there; it is ended with the context."""
    process = subprocess.Popen(
        [sys.executable, "-m", "waferbox", "up", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=surroundings.variables(XDG_RUNTIME_DIR=str(surroundings.folder), COLUMNS="200"),
        start_new_session=True,
    )
    with process:
        try:
            yield process, _management(process)
        finally:
            process.terminate()


def _management(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"export WAFERBOX_MANAGEMENT=(\S+)", line):
            return found[1]
    raise AssertionError(process.communicate()[1])


def waferbox(surroundings: Surroundings, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "waferbox", *arguments],
        env=surroundings.variables(XDG_RUNTIME_DIR=str(surroundings.folder), COLUMNS="200"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
