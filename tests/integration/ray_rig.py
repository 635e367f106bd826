"""A Ray cluster for a test, one node on each host; what is left of it is found by the mark of the surroundings."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cluster_rig import PATIENCE_SECONDS, Surroundings, wait_for

from benchmarks.network import HERE, Host

VARIABLES = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    # Else a node that is told to end may wait for half a minute, though nothing of ours runs there any more.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}


CPUS = 4  # of each host, as Ray counts them


class RayNode:
    """`ray start --block` on a host."""

    def __init__(
        self,
        surroundings: Surroundings,
        host: Host,
        folder: Path,
        head: str,
        resources: Mapping[str, int],
        more: list[str],
    ) -> None:
        """head: where the first node is, as host:port, which is this one if its host is this. more: options of that."""
        self.host = host
        self._log = surroundings.folder / f"ray-{host.address}.log"
        is_head = head.startswith(f"{host.address}:")
        where = (
            ["--head", "--include-dashboard", "false", "--port", head.rpartition(":")[2], *more]
            if is_head
            else ["--address", head]
        )
        options = ["--num-cpus", str(CPUS), "--object-store-memory", "80000000", "--temp-dir", str(folder)]
        options += ["--resources", json.dumps(dict(resources))]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                host.command(
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where, *options),
                    *("--node-ip-address", host.address, "--disable-usage-stats"),
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=surroundings.variables(**VARIABLES),
                start_new_session=True,
            )
        surroundings.sessions.add(self.process.pid)  # Ray's agents write over their environment, with the mark in it

    def wait_until_started(self) -> None:
        wait_for(lambda: "forever" in self.log() or self.process.poll() is not None, explain=self.log)
        assert self.process.poll() is None, self.log()

    def log(self) -> str:
        return self._log.read_text(errors="replace")


@contextlib.contextmanager
def ray_cluster(
    surroundings: Surroundings,
    hosts: Sequence[Host] = (HERE,),
    resources: Sequence[Mapping[str, int]] = ({},),
    client_port: int | None = None,
) -> Iterator[str]:
    """Its address; of it and of what runs on it nothing is left.

    resources: of a site's own, of each host. client_port: for clients of Ray, on the first.
    """
    more = [] if client_port is None else ["--ray-client-server-port", str(client_port)]
    head = f"{hosts[0].address}:{free_port(hosts[0])}"
    folder = Path(tempfile.mkdtemp(prefix="wbray"))  # sockets have short names
    nodes = []
    try:
        for number, (host, own) in enumerate(zip(hosts, resources, strict=True)):
            nodes.append(RayNode(surroundings, host, folder / str(number), head, own, more))
            nodes[-1].wait_until_started()
        yield head
    finally:
        for node in reversed(nodes):
            node.process.send_signal(signal.SIGTERM)
        for node in nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(PATIENCE_SECONDS)
        for process in surroundings.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def free_port(host: Host) -> int:
    """Of a namespace that is there for the test all are free."""
    if host.namespace:
        return 6379
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
