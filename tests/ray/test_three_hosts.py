"""A cluster on Ray over three hosts, in network namespaces: the results are those of the embedded cluster.

`make ray-test` says so by WAFERBOX_RAY_TEST: it takes minutes, so `make test` skips it.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_rig import SCRIPTS, RunningScript, Surroundings, running_cluster, wait_for

from benchmarks.network import Host, NoNetwork, hosts
from interconnect.security.own_tokens import own_clusters_token
from interconnect.security.tokens import Kind

pytest.importorskip("ray", reason="Ray is not installed: pip install 'waferbox[ray]'")

from ray_rig import VARIABLES, ray_cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif("WAFERBOX_RAY_TEST" not in os.environ, reason="takes minutes: make ray-test"),
]

PATIENCE_SECONDS = 240.0  # for roles to be there: each host imports torch for each of them, on two processors
TRAINING = ("--num-csx", "2", "--artifacts", "artifacts", "--steps", "60", "--stop", "0", "--pause")


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surroundings]:
    folder = tmp_path_factory.mktemp("hosts")
    made = Surroundings(folder / "ray", folder / "cache")
    yield made
    for left in made.temporary.glob("waferbox-ray-*"):  # of a host that was killed whole: its next actor would sweep
        shutil.rmtree(left)
    made.assert_nothing_left()


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[list[Host]]:
    try:
        with hosts(3, "1gbit") as made:
            yield made
    except NoNetwork as error:
        pytest.skip(str(error))


@pytest.fixture
def ray_address(surroundings: Surroundings, three_hosts: list[Host]) -> Iterator[str]:
    with ray_cluster(surroundings, three_hosts) as address:
        yield address


class UpOnRay:
    """`waferbox up --engine ray` on a host; a context manager."""

    def __init__(self, surroundings: Surroundings, host: Host, address: str, name: str) -> None:
        self.host = host
        self._log = surroundings.folder / f"{name}.log"
        folder = surroundings.folder / name
        folder.mkdir()
        options = ("--engine", "ray", "--address", address, "--listen", f"{host.address}:0", "--insecure")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                host.command(sys.executable, "-m", "waferbox", "up", *options, "--wafers", "2"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=surroundings.variables(**VARIABLES, XDG_RUNTIME_DIR=str(folder), COLUMNS="200"),
                start_new_session=True,
            )

    def __enter__(self) -> "UpOnRay":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 0, self.log()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def management(self) -> str:
        """Once all nodes are there."""
        wait_for(
            lambda: "export WAFERBOX_MANAGEMENT=" in self.log() or self.process.poll() is not None,
            PATIENCE_SECONDS,
            self.log,
        )
        assert self.process.poll() is None, self.log()
        return self.log().partition("export WAFERBOX_MANAGEMENT=")[2].split()[0]


def script(surroundings: Surroundings, up: UpOnRay | None, name: str, path: Path, *arguments: object) -> RunningScript:
    """On the host of the cluster, or, without one, with an embedded cluster."""
    folder = surroundings.folder / name
    own = Surroundings(folder, folder / "cache")
    prefix = [] if up is None else up.host.command()
    variables = {} if up is None else {"WAFERBOX_TOKEN": own_clusters_token(Kind.USER)}
    return RunningScript(own, path, arguments, None if up is None else up.management(), variables, prefix)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the embedded cluster gives."""
    folder = tmp_path_factory.mktemp("embedded")
    with running_cluster(folder / "cluster", folder / "cache", wafers=2) as cluster:
        own = Surroundings(folder / "script", folder / "cache")
        done = RunningScript(own, SCRIPTS / "recovering.py", [*TRAINING, "0"], cluster.management)
        assert done.wait(120) == 0, done.errors
        return done.output


def host_of(surroundings: Surroundings, up: UpOnRay, member: str) -> str:
    """The address of the host of a member of the job that is under way. Asked there: nobody can from here."""
    done = subprocess.run(
        up.host.command(sys.executable, "-m", "waferbox", "get", "nodes", "-o", "json"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=surroundings.variables(WAFERBOX_MANAGEMENT=up.management(), WAFERBOX_TOKEN=own_clusters_token(Kind.ADMIN)),
    )
    node = next(node for node in json.loads(done.stdout)["nodes"] if node.get("member") == member)
    return str(node["address"]).rpartition(":")[0]


def in_namespace(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


@contextlib.contextmanager
def killed(victim: Host) -> Iterator[None]:
    for pid in in_namespace(["ip", "netns", "pids", victim.namespace]).split():
        os.kill(int(pid), signal.SIGKILL)
    yield


@contextlib.contextmanager
def cut_off(victim: Host) -> Iterator[None]:
    victim.cut_off()
    try:
        yield
    finally:
        victim.reconnect()


@pytest.mark.parametrize("fault", [killed, cut_off])
def test_a_host_is_lost_and_the_job_goes_on(
    surroundings: Surroundings,
    three_hosts: list[Host],
    ray_address: str,
    undisturbed: str,
    fault: Callable[[Host], contextlib.AbstractContextManager[None]],
) -> None:
    """All processes of the host are killed, or nobody reaches it."""
    name = fault.__name__
    with UpOnRay(surroundings, three_hosts[0], ray_address, name) as up:
        running = script(surroundings, up, f"{name}-script", SCRIPTS / "recovering.py", *TRAINING, "0.25")
        running.wait_for_output("20 ")
        with fault(wafer_elsewhere(surroundings, up, three_hosts)):
            assert running.wait(240) == 0, f"{running.errors}\n{up.log()}"
    assert running.output == undisturbed


def test_two_clusters_are_on_one_ray_at_once(
    surroundings: Surroundings, three_hosts: list[Host], ray_address: str, undisturbed: str
) -> None:
    with (
        UpOnRay(surroundings, three_hosts[0], ray_address, "ada") as ada,
        UpOnRay(surroundings, three_hosts[1], ray_address, "bob") as bob,
    ):
        scripts = [
            script(surroundings, up, f"{name}-script", SCRIPTS / "recovering.py", *TRAINING, "0")
            for name, up in (("ada", ada), ("bob", bob))
        ]
        for each in scripts:
            assert each.wait(240) == 0, each.errors
            assert each.output == undisturbed


def wafer_elsewhere(surroundings: Surroundings, up: UpOnRay, made: list[Host]) -> Host:
    """A host that has a wafer of the job, is not that of management, and has no MemoryX."""
    kept = {up.host.address, host_of(surroundings, up, "memoryx-0")}
    addresses = [
        address for member in ("wafer-0", "wafer-1") if (address := host_of(surroundings, up, member)) not in kept
    ]
    assert addresses, f"both wafers are with what must stay: {kept}"
    return next(host for host in made if host.address == addresses[0])
