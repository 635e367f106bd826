"""`waferbox up` on a Ray of one host or of three, and scripts there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_rig import SCRIPTS, RunningCluster, RunningScript, Surroundings, wait_for
from ray_rig import VARIABLES

from benchmarks.network import Host
from waferbox.security.tokens import Kind, own_clusters_token

MARKS = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif("WAFERBOX_RAY_TEST" not in os.environ, reason="takes minutes: make ray-test"),
]
TRAINING = SCRIPTS / "recovering.py"
TRAINING_ARGUMENTS = ("--num-csx", "2", "--artifacts", "artifacts", "--steps", "60", "--stop", "20")  # for a file `go`
SECONDS = 240.0  # for a script
PATIENCE_SECONDS = 240.0  # for roles to be there: each host imports torch for each of them, on two processors
# Resources of a site's own, by which the first of three hosts keeps what a job cannot do without, and the others have
# its wafers.
SITE = ({"keeps": 8}, {"computes": 8}, {"computes": 8})
PLACED = ("wafer.computes=1", "memoryx.keeps=1", "swarmx.keeps=1")
ON_SITE = [word for placed in PLACED for word in ("--resource", placed)]


def on_one_host(embedded: RunningCluster, folder: Path, path: Path, *arguments: str) -> RunningScript:
    """A script that is done, on the embedded cluster."""
    own = Surroundings(folder / path.stem, folder / "cache")
    (own.folder / "go").touch()
    done = RunningScript(own, path, arguments, embedded.management)
    assert done.wait(SECONDS) == 0, done.errors
    return done


class UpOnRay:
    """`waferbox up --engine ray` on a host; a context manager."""

    def __init__(
        self, surroundings: Surroundings, host: Host, address: str, name: str, *options: str, **variables: str
    ) -> None:
        """variables: of the command alone."""
        self.host = host
        self.folder = surroundings.folder / name
        self.folder.mkdir()
        self._surroundings = surroundings
        self._log = self.folder / "log"
        words = ("--engine", "ray", "--address", address, "--listen", f"{host.address}:0", "--wafers", "2", *options)
        variables = {**VARIABLES, "XDG_RUNTIME_DIR": str(self.folder), "COLUMNS": "200", **variables}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                host.command(sys.executable, "-m", "waferbox", "up", *words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=surroundings.variables(**variables),
                start_new_session=True,
            )

    def __enter__(self) -> "UpOnRay":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.terminate()
        assert self.process.wait(60) == 0, self.log()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def variables(self) -> dict[str, str]:
        """For who uses it, as the command has printed them, once all nodes are there."""
        marker = "To use it:  export "
        wait_for(lambda: marker in self.log() or self.process.poll() is not None, PATIENCE_SECONDS, self.log)
        assert self.process.poll() is None, self.log()
        line = self.log().partition(marker)[2].partition("\n")[0]
        return dict(word.split("=", 1) for word in line.split())

    def script(self, path: Path, *arguments: object) -> RunningScript:
        """On the host of the command."""
        own = Surroundings(self.folder / path.stem, self.folder / "cache")
        variables = {**self.variables(), "WAFERBOX_TOKEN": own_clusters_token(Kind.USER)}
        return RunningScript(own, path, arguments, None, variables, self.host.command())

    def hosts_of_wafers(self) -> set[str]:
        """Their addresses."""
        return {str(node["address"]).rpartition(":")[0] for node in self._wafers()}

    def wafer(self) -> int:
        """The process id of one of them."""
        return int(self._wafers()[0]["process_id"])

    def _wafers(self) -> list[dict[str, Any]]:
        """Asked on its host: nobody can from here."""
        done = subprocess.run(
            self.host.command(sys.executable, "-m", "waferbox", "get", "nodes", "-o", "json"),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=self._surroundings.variables(**self.variables(), WAFERBOX_TOKEN=own_clusters_token(Kind.ADMIN)),
        )
        return [node for node in json.loads(done.stdout)["nodes"] if node["role"] == "ROLE_WAFER"]
