"""Clusters and scripts as processes of their own, and a look at what they leave behind.

Whatever is started here has a mark in its environment, and so has all that it starts itself: processes are found by it.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import grpc
import psutil
import pytest
from forking_server import MARK, NO_MARK, ForkedProcess
from role_server import RoleServer
from script_server import ScriptServer

from benchmarks import by_hand
from benchmarks.network import HERE, Host, NoNetwork, hosts
from waferbox import settings
from waferbox.host.descriptors import readable
from waferbox.rpc.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2

SCRIPTS = Path(__file__).parent / "scripts"
# The limit for waits that depend on the load of the machine. A time that users are promised is tested as it is.
PATIENCE_SECONDS = 60.0


class Surroundings:
    """The environment of the processes of a test: a mark, and folders for temporary files and for artifacts."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(len(NO_MARK) // 2)
        self.sessions: set[int] = set()  # of processes that write over their environment
        self.temporary = folder / "temporary"
        self.temporary.mkdir(parents=True)
        self._cache = cache
        self._shared_before = _shared_memory()

    def variables(self, **more: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("WAFERBOX_")}
        own = {
            MARK: self.mark,
            settings.SECRET_FILE.name: os.environ[settings.SECRET_FILE.name],
            "TMPDIR": str(self.temporary),
            "WAFERBOX_CACHE": str(self._cache),
        }
        # torch would leave a folder among the temporary files.
        own["TORCHINDUCTOR_CACHE_DIR"] = str(self._cache / "torch")
        return {**inherited, "OMP_NUM_THREADS": "1", **own, **more}

    def processes(self) -> list[psutil.Process]:
        """Returns the live processes that have the mark, or are in one of the sessions."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                own = process.environ().get(MARK) == self.mark or os.getsid(process.pid) in self.sessions
                if own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def assert_nothing_left(self) -> None:
        """Fails unless all processes, shared memory and temporary files are gone within some time."""
        wait_for(lambda: not self.processes(), explain=lambda: f"still there: {self.processes()}")
        assert os.listdir(self.temporary) == []
        # Other tests run at the same time; their shared memory disappears too.
        wait_for(
            lambda: _shared_memory() <= self._shared_before,
            explain=lambda: f"in /dev/shm: {_shared_memory() - self._shared_before}",
        )


def _shared_memory() -> set[str]:
    # A process that is killed while it makes a semaphore leaves a temporary file, whose name says nothing of it.
    return {name for name in os.listdir("/dev/shm") if not re.fullmatch(r"sem\.\w{6}", name)}


def process_at(surroundings: Surroundings, address: str) -> psutil.Process:
    """Returns the process there that listens at an address."""
    port = int(address.rpartition(":")[2])
    for process in surroundings.processes():
        with contextlib.suppress(psutil.Error):
            connections = process.net_connections(kind="tcp")
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
                return process
    raise AssertionError(f"nobody listens at {address}")


class RunningCluster:
    """A process `python -m waferbox.cluster.embedded`, which ends when its standard input is closed."""

    def __init__(
        self,
        surroundings: Surroundings,
        *more: str,
        server: RoleServer | None = None,
        variables: dict[str, str] | None = None,
        **roles: int,
    ) -> None:
        """server: who forks it, instead of a Python of its own."""
        self.surroundings = surroundings
        options = [*more, *(word for role, count in roles.items() for word in (f"--{role}", str(count)))]
        self.log = surroundings.folder / "cluster.log"
        given, self._input = os.pipe()
        output, given_output = os.pipe()
        self._output = open(output, "rb")  # noqa: SIM115 - closed by stop
        module, environment = "waferbox.cluster.embedded", surroundings.variables(**(variables or {}))
        self.process: subprocess.Popen[bytes] | ForkedProcess
        with self.log.open("wb") as log:
            if server is not None:
                fds = {0: given, 1: given_output}
                self.process = server.start(module, options, environment, output=log.fileno(), fds=fds)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", module, *options],
                    stdin=given,
                    stdout=given_output,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
        os.close(given)
        os.close(given_output)
        try:
            assert readable([self._output], PATIENCE_SECONDS), self.log.read_text()
            line = self._output.readline()
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
        """Returns the jobs, the newest first."""
        return list(self._stub.ListJobs(management_pb2.ListJobsRequest(), timeout=5.0).jobs)

    def process_at(self, address: str) -> psutil.Process:
        """Returns the process of the cluster that listens at an address."""
        return process_at(self.surroundings, address)

    def stop(self) -> None:
        """Closes the standard input of the process, and waits for its end."""
        if hasattr(self, "_channel"):
            self._channel.close()
        os.close(self._input)
        self._output.close()
        try:
            self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise


@contextlib.contextmanager
def running_cluster(
    folder: Path,
    cache: Path,
    *options: str,
    server: RoleServer | None = None,
    variables: dict[str, str] | None = None,
    **roles: int,
) -> Iterator[RunningCluster]:
    """Runs a cluster with these numbers of nodes by role, and checks that nothing is left at its end."""
    surroundings = Surroundings(folder, cache)
    cluster = RunningCluster(surroundings, *options, server=server, variables=variables, **roles)
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
    surroundings: Surroundings,
    server: RoleServer,
    places: Sequence[tuple[str, Host]],
    *,
    host: Host = HERE,
    started: list[tuple[str, Host, ForkedProcess]] | None = None,
    **variables: str,
) -> Iterator[str]:
    """The management address of a cluster of which each process is started alone, and of which nothing is left.

    Args:
        surroundings: of all processes.
        server: forks them.
        places: the module and the host of each.
        host: of the management service.
        started: gets the module, the host and the process of each.
        **variables: more of them for its environment.
    """

    def start(
        place: Host, words: Sequence[str], variables: Mapping[str, str], output: int, fds: Sequence[int]
    ) -> ForkedProcess:
        module, *arguments = words
        given = {fd: fd for fd in fds}
        process = server.start(module, arguments, variables, output=output, fds=given, namespace=place.namespace)
        if started is not None:
            started.append((module, place, process))
        return process

    log = surroundings.folder / "roles.log"
    with by_hand.cluster_by_hand(host, places, surroundings.variables(**variables), log, start) as management:
        yield management
    surroundings.assert_nothing_left()


def forking(
    server: RoleServer,
) -> Callable[[Host, Sequence[str], Mapping[str, str], Mapping[int, int]], ForkedProcess]:
    """A Start of benchmarks.memory: the processes of a measurement are what `python -m` starts, without its imports."""

    def start(place: Host, words: Sequence[str], variables: Mapping[str, str], fds: Mapping[int, int]) -> ForkedProcess:
        module, *arguments = words
        marked = {**variables, MARK: NO_MARK}  # a forked fork server looks for a mark in its environment
        return server.start(module, arguments, marked, output=fds[2], fds=fds, namespace=place.namespace)

    return start


class Restarted:
    """A process by hand that is killed, and started anew at its address."""

    def __init__(self, surroundings: Surroundings, server: RoleServer, module: str, *arguments: object) -> None:
        self._surroundings = surroundings
        self._server = server
        self._module = module
        self._arguments = [str(argument) for argument in arguments]
        self._process: ForkedProcess | None = None

    def start(self, listen: str) -> None:
        arguments = [*self._arguments, "--listen", listen]
        with (self._surroundings.folder / "restarted.log").open("ab") as log:
            variables = self._surroundings.variables()
            self._process = self._server.start(self._module, arguments, variables, output=log.fileno())

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Without effect before the start."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)


class RunningScript:
    """A Python script of a user, on the cluster of a management address or with its own embedded cluster."""

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
        self.process: subprocess.Popen[bytes] | ForkedProcess
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            if server is not None:
                outputs = [output.fileno(), errors.fileno()]
                self.process = server.start(script, words, surroundings.folder, environment, outputs)
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
        """Waits until the script has printed a text."""
        wait_for(lambda: text in self.output or self.process.poll() is not None, explain=lambda: self.errors)
        assert text in self.output, self.errors

    def wait_for_error(self, text: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Waits until a text is on the script's terminal."""
        wait_for(lambda: text in self.errors, seconds, lambda: self.errors)

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Waits for the end of the script; returns its exit status."""
        return self.process.wait(seconds)

    def interrupt(self) -> None:
        """Acts as Ctrl-C on the script's terminal."""
        os.killpg(self.process.pid, signal.SIGINT)

    def close(self) -> None:
        """Ends the script, if the test has not."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


StartScript: TypeAlias = Callable[..., RunningScript]  # see the fixture start_script
StartCluster: TypeAlias = Callable[..., contextlib.AbstractContextManager[RunningCluster]]  # see start_cluster


def wait_for(
    condition: Callable[[], object], seconds: float = PATIENCE_SECONDS, explain: Callable[[], object] = lambda: ""
) -> None:
    """Polls a condition, which other processes make true, until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {explain()}"
        time.sleep(0.02)


@contextlib.contextmanager
def hosts_or_skip(count: int, rate: str, last_sends: str = "") -> Iterator[list[Host]]:
    """Yields the hosts of benchmarks.network.hosts; skips the test where there can be none."""
    try:
        with hosts(count, rate, last_sends) as made:
            yield made
    except NoNetwork as error:
        pytest.skip(str(error))
