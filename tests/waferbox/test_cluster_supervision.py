"""What a cluster does about processes that end, with a launcher that starts none."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_management import FakeManagement, node
from typer.testing import CliRunner

from waferbox import deadlines
from waferbox.cluster import cluster as cluster_module
from waferbox.cluster import supervised_process
from waferbox.cluster.cluster import Cluster, Liveness
from waferbox.cluster.launcher import ClusterSettings
from waferbox.commands.cli import app
from waferbox.host.descriptors import readable
from waferbox.launch.local_clusters import ClusterError, Starter, recorded
from waferbox.launch.spawn import ForkServerLost
from wsc.v1 import node_pb2

WAIT_SECONDS = 30.0


class FakeProcess:
    host = ""

    def __init__(self, module: str, pid: int) -> None:
        self.module = module
        self.pid = pid
        self._status: int | None = None
        self._ended = os.eventfd(0)

    def end(self, status: int) -> None:
        self._status = status
        os.eventfd_write(self._ended, 1)

    def fileno(self) -> int:
        return self._ended

    def poll(self) -> int | None:
        return self._status

    def terminate(self) -> None:
        self.end(0)

    def close(self) -> int:
        os.close(self._ended)
        if self._status is None:
            self._status = -9
        return self._status


class FakeLauncher:
    """Notes what it is asked to start."""

    def __init__(self, management: str) -> None:
        self._management = management
        self._ended = os.eventfd(0)
        self._ready = os.eventfd(1)
        self._cause = ""
        self._changed = threading.Condition()
        self._announce = -1
        self.restarts = 0
        self.was_killed = False
        self.started: list[tuple[FakeProcess, Sequence[str]]] = []

    def start(self, module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> FakeProcess:
        if module == "appliance":
            self._close_announcement()
            self._announce = os.dup(fds[0])
            self.announce(management=self._management, page="http://127.0.0.1:77/", metrics="127.0.0.1:88")
        with self._changed:
            process = FakeProcess(module, 100 + len(self.started))
            self.started.append((process, arguments))
            self._changed.notify_all()
        return process

    def announce(self, **told: object) -> None:
        """What management says."""
        os.write(self._announce, json.dumps(told).encode() + b"\n")

    def wait_for(self, condition: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_SECONDS)

    def of(self, module: str) -> list[tuple[FakeProcess, Sequence[str]]]:
        return [(process, arguments) for process, arguments in self.started if process.module == module]

    def has_started(self, module: str, times: int) -> bool:
        return len(self.of(module)) == times

    def has_restarted(self, times: int) -> bool:
        return self.restarts == times

    def fail(self, cause: str) -> None:
        """As a fork server that dies, and with it all that it has started."""
        self._cause = cause
        for process, _ in self.started:
            if process.module != "appliance" and process.poll() is None:
                process.end(-9)
        os.eventfd_write(self._ended, 1)

    def listen(self, management_host: str) -> str:
        return f"{management_host}:0"

    def fileno(self) -> int:
        return self._ended

    def end(self) -> str:
        return self._cause

    def restart(self) -> int:
        with self._changed:
            self._cause = ""
            os.eventfd_read(self._ended)
            self.restarts += 1
            self._changed.notify_all()
        return self._ready

    def close(self) -> None:
        os.close(self._ended)
        os.close(self._ready)
        self._close_announcement()

    def _close_announcement(self) -> None:
        if self._announce >= 0:
            os.close(self._announce)
            self._announce = -1


@pytest.fixture
def management() -> Iterator[FakeManagement]:
    fake = FakeManagement()
    roles = (node_pb2.ROLE_MEMORYX, node_pb2.ROLE_SWARMX, node_pb2.ROLE_WAFER, node_pb2.ROLE_WORKER)
    fake.nodes = [node(index, role) for index, role in enumerate(roles)]
    server = fake.serve()
    yield fake
    server.stop(0).wait()


@pytest.fixture
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_process, "DELAY_SECONDS", 0.001)
    monkeypatch.setattr(deadlines, "END", replace(deadlines.END, jobs=0.01))


class Supervised:
    """A cluster that is supervised in a thread, as by `waferbox up`."""

    def __init__(self, launcher: FakeLauncher, told: list[str]) -> None:
        self.launcher = launcher
        self.told = told  # what the owner of the cluster says
        self.given_up = os.eventfd(0)
        self.error: ClusterError | None = None
        self._stop = os.eventfd(0)
        settings = ClusterSettings(swarmx=1, metrics=True, threads=3, page="127.0.0.1:0", listen="127.0.0.1:0")
        self._cluster = Cluster(settings, launcher, [self._stop])
        self._thread = threading.Thread(target=self._supervise)
        self._thread.start()

    def _supervise(self) -> None:
        with recorded(Starter.UP, "up", self._cluster.management) as note:

            def on_given_up(message: str) -> None:
                note(message)
                os.eventfd_write(self.given_up, 1)

            try:
                self._cluster.supervise(on_given_up)
            except ClusterError as error:
                self.error = error

    def wait(self) -> None:
        """Until it is not supervised any more."""
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self.wait()
        self._cluster.close()
        os.close(self._stop)
        os.close(self.given_up)


@pytest.fixture
def supervised(
    management: FakeManagement,
    short_delays: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Supervised]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    told: list[str] = []
    monkeypatch.setattr(cluster_module, "print_messages", told.extend)
    supervised = Supervised(FakeLauncher(management.address), told)
    yield supervised
    supervised.close()


def test_what_ends_is_started_again_with_the_same_arguments(supervised: Supervised) -> None:
    launcher = supervised.launcher
    for module in ("wafer", "workers", "memoryx", "swarmx"):
        ((first, arguments),) = launcher.of(module)
        first.end(-9)
        launcher.wait_for(partial(launcher.has_started, module, 2))
        again, same = launcher.of(module)[1]
        assert same == arguments
        assert again.poll() is None
    launcher.of("wafer")[1][0].end(1)
    launcher.wait_for(lambda: len(launcher.of("wafer")) == 3)
    assert len(launcher.of("appliance")) == 1
    (wafer, _), *_ = launcher.of("wafer")
    (second, _) = launcher.of("wafer")[1]
    assert f"wafer (pid {wafer.pid}) ended with status -9; started again as pid {second.pid}" in supervised.told


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released after each check for silent processes. Requested before `supervised`."""
    monkeypatch.setenv("WAFERBOX_HANG_SECONDS", "0.3")
    monkeypatch.setattr(cluster_module, "CHECK_SECONDS", 0.02)
    done = threading.Semaphore(0)
    look = Liveness.find_silent

    def noted(*arguments: Any) -> list[tuple[str, int]]:
        silent = look(*arguments)
        done.release()
        return silent

    monkeypatch.setattr(Liveness, "find_silent", noted)
    return done


def test_what_lives_and_is_no_node_any_more_is_ended_and_started_again(
    looks: threading.Semaphore, supervised: Supervised, management: FakeManagement
) -> None:
    """As one whose interpreter hangs. One that has never been a node may still be on its way."""

    def wait_for_looks() -> None:
        for _ in range(20):
            assert looks.acquire(timeout=WAIT_SECONDS)

    launcher = supervised.launcher
    ((wafer, arguments),) = launcher.of("wafer")
    there = [launcher.of(module)[0][0].pid for module in ("memoryx", "swarmx", "wafer")]
    management.nodes = [node(pid - 100, node_pb2.ROLE_WAFER) for pid in there]
    wait_for_looks()
    assert len(launcher.started) == 5
    management.nodes = [each for each in management.nodes if each.process_id != wafer.pid]
    launcher.wait_for(lambda: len(launcher.of("wafer")) == 2)
    assert launcher.of("wafer")[1][1] == arguments
    wait_for_looks()
    assert len(launcher.started) == 6
    assert any(f"wafer (pid {wafer.pid}) ran unregistered for 0.1 s and was ended" in t for t in supervised.told)


def test_what_ends_again_and_again_is_given_up_and_the_status_says_so(
    supervised: Supervised, management: FakeManagement
) -> None:
    launcher = supervised.launcher
    for number in range(1, supervised_process.MAX_EARLY_EXITS + 1):
        launcher.wait_for(partial(launcher.has_started, "memoryx", number))
        launcher.of("memoryx")[-1][0].end(1)
    assert readable([supervised.given_up], WAIT_SECONDS)
    pid = launcher.of("memoryx")[-1][0].pid
    reason = f"memoryx (pid {pid}) ended with status 1, {supervised_process.MAX_EARLY_EXITS} times"
    assert reason in supervised.told[-1]
    shown = CliRunner().invoke(app, ["status", "--management", management.address])
    assert shown.exit_code == 0
    assert reason in shown.stderr
    # The others are still looked after.
    launcher.of("wafer")[0][0].end(-9)
    launcher.wait_for(lambda: len(launcher.of("wafer")) == 2)
    assert len(launcher.of("memoryx")) == supervised_process.MAX_EARLY_EXITS


def test_management_is_started_again_at_the_same_addresses(supervised: Supervised, management: FakeManagement) -> None:
    launcher = supervised.launcher
    ((first, arguments),) = launcher.of("appliance")
    assert list(arguments) == [
        *("--listen", "127.0.0.1:0", "--page", "127.0.0.1:0", "--metrics-port", "0", "--announce-fd", "3")
    ]
    for number in range(2, 4):
        launcher.of("appliance")[-1][0].end(-9)
        launcher.wait_for(partial(launcher.has_started, "appliance", number))
        assert list(launcher.of("appliance")[-1][1]) == [
            *("--listen", management.address, "--page", "127.0.0.1:77", "--metrics-port", "88", "--announce-fd", "3")
        ]
    assert first.poll() == -9
    assert len(launcher.started) == 4 + 3  # nothing else was


@pytest.mark.parametrize("exits", [False, True], ids=["ends", "has ended"])
def test_the_cluster_is_over_when_management_was_told_to_end(supervised: Supervised, *, exits: bool) -> None:
    launcher = supervised.launcher
    launcher.announce(ended=True)
    if exits:
        launcher.of("appliance")[0][0].end(0)
    supervised.wait()
    assert supervised.error is None
    assert len(launcher.of("appliance")) == 1


def test_a_cluster_whose_management_does_not_stay_ends(supervised: Supervised) -> None:
    launcher = supervised.launcher
    for number in range(1, supervised_process.MAX_EARLY_EXITS + 1):
        launcher.wait_for(partial(launcher.has_started, "appliance", number))
        launcher.of("appliance")[-1][0].end(1)
    supervised.wait()
    assert "ended with status 1, 5 times in a row" in str(supervised.error)


class DyingLauncher(FakeLauncher):
    """It is killed as it starts a process, this many times."""

    def __init__(self, management: str, deaths: int) -> None:
        super().__init__(management)
        self._deaths = deaths

    def start(self, module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> FakeProcess:
        if module == "wafer" and self.restarts < self._deaths:
            self.was_killed = True
            if not self.end():
                self.fail("the fork server (pid 7) was killed by SIGKILL")
            raise ForkServerLost("the fork server does not answer")
        return super().start(module, arguments, fds)


@pytest.mark.usefixtures("short_delays")
@pytest.mark.parametrize("deaths", [1, 3])
def test_a_cluster_starts_although_its_fork_server_is_killed(management: FakeManagement, deaths: int) -> None:
    launcher = DyingLauncher(management.address, deaths)
    with Cluster(ClusterSettings(swarmx=1, listen="127.0.0.1:0"), launcher):
        assert launcher.restarts == deaths
        for module in ("appliance", "memoryx", "swarmx", "wafer", "workers"):
            assert launcher.of(module)[-1][0].poll() is None


class FailingLauncher(FakeLauncher):
    """Its management service ends before it has said where it is."""

    def start(self, module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> FakeProcess:
        process = FakeProcess(module, 100)
        process.end(1)
        return process


def test_nobody_waits_for_a_management_service_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "END", replace(deadlines.END, jobs=2 * WAIT_SECONDS))
    begin = time.monotonic()
    with pytest.raises(ClusterError, match=r"did not start at 127\.0\.0\.1:77"):
        Cluster(ClusterSettings(listen="127.0.0.1:77"), FailingLauncher(""))
    assert time.monotonic() - begin < WAIT_SECONDS


class KillingLauncher(FakeLauncher):
    """The first processes of one module are killed as soon as they are started; then the nodes register."""

    def __init__(self, management: FakeManagement, module: str, kills: int) -> None:
        super().__init__(management.address)
        self._nodes, management.nodes = management.nodes, []
        self._registry = management
        self._module = module
        self._kills = kills

    def start(self, module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> FakeProcess:
        if module == self._module and len(self.of(module)) == self._kills:
            self._registry.nodes = self._nodes
        if module != self._module or len(self.of(module)) >= self._kills:
            return super().start(module, arguments, fds)
        process = FakeProcess(module, 100 + len(self.started))
        process.end(-9)
        self.started.append((process, arguments))
        return process


def _start(management: FakeManagement, module: str, kills: int) -> KillingLauncher:
    """Starts and ends a cluster of which this many processes of the module are killed."""
    launcher = KillingLauncher(management, module, kills)
    with Cluster(ClusterSettings(swarmx=1, listen="127.0.0.1:0"), launcher):
        return launcher


@pytest.mark.usefixtures("short_delays")
@pytest.mark.parametrize("kills", [1, 3])
@pytest.mark.parametrize("module", ["appliance", "wafer"])
def test_a_process_that_is_killed_while_the_cluster_starts_is_started_again(
    management: FakeManagement, module: str, kills: int
) -> None:
    launcher = _start(management, module, kills)
    started = launcher.of(module)
    assert len(started) == kills + 1
    assert len({tuple(arguments) for _, arguments in started}) == 1


@pytest.mark.usefixtures("short_delays")
@pytest.mark.parametrize("module", ["appliance", "wafer"])
def test_a_cluster_does_not_start_whose_process_is_killed_again_and_again(
    management: FakeManagement, module: str
) -> None:
    with pytest.raises(ClusterError, match="ended with status -9, 5 times in a row"):
        _start(management, module, 1_000_000)


def test_what_died_with_the_fork_server_is_started_by_another(supervised: Supervised) -> None:
    launcher = supervised.launcher
    launcher.fail("the fork server (pid 7) was killed by SIGKILL")
    launcher.wait_for(lambda: launcher.restarts == 1)
    launcher.wait_for(lambda: all(len(launcher.of(m)) == 2 for m in ("wafer", "workers", "memoryx", "swarmx")))
    assert len(launcher.of("appliance")) == 1
    cause = "the fork server (pid 7) was killed by SIGKILL"
    assert f"{cause}, and all nodes with it; another is started, and starts them again" in supervised.told


def test_a_cluster_whose_fork_server_does_not_stay_ends(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = supervised.launcher
    for number in range(supervised_process.MAX_EARLY_EXITS):
        launcher.wait_for(partial(launcher.has_restarted, number))
        launcher.fail("the fork server has ended")
    supervised.wait()
    assert str(supervised.error).startswith("the fork server has ended, 5 times in a row")
