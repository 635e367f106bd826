"""Clusters and scripts as processes of their own, and a look at what they leave behind.

Whatever is started here has a mark in its environment, and so has all that it starts itself: processes are found by it.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import grpc
import psutil
import pytest
from script_server import ForkedScript, ScriptServer

from benchmarks import by_hand
from benchmarks.network import HERE, Host, NoNetwork, hosts
from waferbox import settings
from waferbox.host.descriptors import readable
from waferbox.rpc.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2

SCRIPTS = Path(__file__).parent / "scripts"
MARK = "WAFERBOX_TEST_MARK"
# For what a busy machine may take its time for. What is promised to users within a time is tested with that time.
PATIENCE_SECONDS = 60.0


class Surroundings:
    """The environment of what a test starts: a mark, and folders for temporary files and for artifacts."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        self.sessions: set[int] = set()  # of processes that were forked, and have another's mark or none
        self.temporary = folder / "temporary"
        self.temporary.mkdir(parents=True)
        self._cache = cache
        self._shared_before = set(os.listdir("/dev/shm"))

    def variables(self, **more: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("WAFERBOX_")}
        own = {
            MARK: self.mark,
            settings.SECRET_FILE.name: os.environ[settings.SECRET_FILE.name],
            "TMPDIR": str(self.temporary),
            "WAFERBOX_CACHE": str(self._cache),
        }
        # torch makes a folder of its own among the temporary ones, which stays.
        own["TORCHINDUCTOR_CACHE_DIR"] = str(self._cache / "torch")
        return {**inherited, "OMP_NUM_THREADS": "1", **own, **more}

    def processes(self) -> list[psutil.Process]:
        """All that live and have the mark, or are in one of the sessions."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                own = process.environ().get(MARK) == self.mark or os.getsid(process.pid) in self.sessions
                if own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def assert_nothing_left(self) -> None:
        """No process, no shared memory, no temporary file; a process that is ending may take a moment."""
        wait_for(lambda: not self.processes(), explain=lambda: f"still there: {self.processes()}")
        assert os.listdir(self.temporary) == []
        # Other tests run at the same time, and what they have there goes again.
        wait_for(
            lambda: set(os.listdir("/dev/shm")) <= self._shared_before,
            explain=lambda: f"in /dev/shm: {set(os.listdir('/dev/shm')) - self._shared_before}",
        )


class RunningCluster:
    """`python -m waferbox.cluster.embedded`, which ends when its standard input is closed."""

    def __init__(
        self, surroundings: Surroundings, *more: str, variables: dict[str, str] | None = None, **roles: int
    ) -> None:
        self.surroundings = surroundings
        options = [*more, *(word for role, count in roles.items() for word in (f"--{role}", str(count)))]
        self.log = surroundings.folder / "cluster.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "waferbox.cluster.embedded", *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=surroundings.variables(**(variables or {})),
                start_new_session=True,
            )
        assert self.process.stdout is not None
        try:
            assert readable([self.process.stdout], PATIENCE_SECONDS), self.log.read_text()
            line = self.process.stdout.readline()
            assert line, self.log.read_text()
            announced = json.loads(line)
            self.management: str = announced["management"]
            self.page: str = announced["page"]
        except BaseException:
            self.stop()
            raise
        self._channel = make_channel(self.management)
        self._stub = management_pb2_grpc.ManagementStub(self._channel)

    def nodes(self, role: "node_pb2.Role.ValueType | None" = None) -> list[management_pb2.NodeInfo]:
        nodes = self._stub.ListNodes(management_pb2.ListNodesRequest(), timeout=5.0).nodes
        return [node for node in nodes if role in (None, node.role)]

    def jobs(self) -> list[management_pb2.JobInfo]:
        """The newest first."""
        return list(self._stub.ListJobs(management_pb2.ListJobsRequest(), timeout=5.0).jobs)

    def process_at(self, address: str) -> psutil.Process:
        """The process of the cluster that listens at an address."""
        port = int(address.rpartition(":")[2])
        for process in self.surroundings.processes():
            with contextlib.suppress(psutil.Error):
                connections = process.net_connections(kind="tcp")
                if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
                    return process
        raise AssertionError(f"nobody listens at {address}")

    def stop(self) -> None:
        """Closes its standard input, and waits for its end."""
        if hasattr(self, "_channel"):
            self._channel.close()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise


@contextlib.contextmanager
def running_cluster(
    folder: Path, cache: Path, *options: str, variables: dict[str, str] | None = None, **roles: int
) -> Iterator[RunningCluster]:
    """A cluster with so many of each role, of which nothing is left in the end."""
    surroundings = Surroundings(folder, cache)
    cluster = RunningCluster(surroundings, *options, variables=variables, **roles)
    try:
        yield cluster
    except grpc.RpcError as error:
        raise AssertionError(f"{error}\n{cluster.log.read_text()}") from error
    finally:
        cluster.stop()
    assert cluster.process.returncode == 0, cluster.log.read_text()
    surroundings.assert_nothing_left()


@contextlib.contextmanager
def cluster_by_hand(
    folder: Path, cache: Path, places: Sequence[tuple[str, Host]], *, host: Host = HERE
) -> Iterator[str]:
    """The management address of a cluster of which each process is started alone, and of which nothing is left."""
    surroundings = Surroundings(folder, cache)
    log = folder / "roles.log"
    with by_hand.cluster_by_hand(host, places, surroundings.variables(), log) as management:
        yield management
    surroundings.assert_nothing_left()


class RunningScript:
    """A Python script of a user; with a management address, or else with an embedded cluster of its own."""

    def __init__(
        self,
        surroundings: Surroundings,
        script: Path,
        arguments: Sequence[object],
        management: str | None,
        variables: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        server: ScriptServer | None = None,
        python: str = sys.executable,
    ) -> None:
        """prefix: the words before the command, of one that runs it somewhere else.

        server: who forks it, instead of a Python of its own.
        """
        self.surroundings = surroundings
        self._output = surroundings.folder / "output"
        self._errors = surroundings.folder / "errors"
        address = {} if management is None else {"WAFERBOX_MANAGEMENT": management}
        environment = surroundings.variables(**address, **(variables or {}))
        words = [str(argument) for argument in arguments]
        self.process: subprocess.Popen[bytes] | ForkedScript
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            if server is not None:
                outputs = [output.fileno(), errors.fileno()]
                self.process = server.start(script, words, surroundings.folder, environment, outputs)
                surroundings.sessions.add(self.process.pid)
                return
            self.process = subprocess.Popen(
                [*prefix, python, str(script), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                cwd=surroundings.folder,
                env=environment,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def wait_for_output(self, text: str) -> None:
        """Until the script has printed it."""
        wait_for(lambda: text in self.output or self.process.poll() is not None, explain=lambda: self.errors)
        assert text in self.output, self.errors

    def wait_for_error(self, text: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Until it is on the script's terminal."""
        wait_for(lambda: text in self.errors, seconds, lambda: self.errors)

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """The exit status."""
        return self.process.wait(seconds)

    def interrupt(self) -> None:
        """What Ctrl-C on its terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def close(self) -> None:
        """Ends it, if a test has not."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


StartScript: TypeAlias = Callable[..., RunningScript]  # see the fixture start_script


def wait_for(
    condition: Callable[[], object], seconds: float = PATIENCE_SECONDS, explain: Callable[[], str] = lambda: ""
) -> None:
    """Until the condition holds; looks again and again, for what happens in other processes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {explain()}"
        time.sleep(0.02)


@contextlib.contextmanager
def hosts_or_skip(count: int, rate: str, last_sends: str = "") -> Iterator[list[Host]]:
    """As benchmarks.network.hosts; where there can be none, the test is skipped."""
    try:
        with hosts(count, rate, last_sends) as made:
            yield made
    except NoNetwork as error:
        pytest.skip(str(error))
