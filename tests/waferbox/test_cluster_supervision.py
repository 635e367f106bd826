"""What a cluster does about processes that end, with a launcher that starts none."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from fake_management import FakeManagement, node
from typer.testing import CliRunner

from nodes.launch.descriptors import readable
from waferbox.cli import app
from waferbox.cluster import place
from waferbox.cluster.cluster import Cluster, ClusterSettings
from waferbox.cluster.local_clusters import recorded
from wsc.v1 import node_pb2

WAIT_SECONDS = 30.0


class FakeProcess:
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
        return self._status or 0


class FakeLauncher:
    """Notes what it is asked to start."""

    def __init__(self, management: str) -> None:
        self._management = management
        self._never = os.eventfd(0)
        self._announce = -1
        self._changed = threading.Condition()
        self.started: list[tuple[FakeProcess, Sequence[str]]] = []

    def start(self, module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> FakeProcess:
        if module == "appliance":
            self._announce = os.dup(fds[0])  # its end is that of management
            os.write(self._announce, json.dumps({"management": self._management, "page": ""}).encode() + b"\n")
        with self._changed:
            process = FakeProcess(module, 100 + len(self.started))
            self.started.append((process, arguments))
            self._changed.notify_all()
        return process

    def wait_for(self, condition: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_SECONDS)

    def of(self, module: str) -> list[tuple[FakeProcess, Sequence[str]]]:
        return [(process, arguments) for process, arguments in self.started if process.module == module]

    def fileno(self) -> int:
        return self._never

    def end(self) -> str:
        return ""

    def close(self) -> None:
        os.close(self._never)
        os.close(self._announce)


@pytest.fixture
def management() -> Iterator[FakeManagement]:
    fake = FakeManagement()
    roles = (node_pb2.ROLE_MEMORYX, node_pb2.ROLE_SWARMX, node_pb2.ROLE_WAFER, node_pb2.ROLE_WORKER)
    fake.nodes = [node(index, role) for index, role in enumerate(roles)]
    server = fake.serve()
    yield fake
    server.stop(0).wait()


@pytest.fixture
def supervised(
    management: FakeManagement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FakeLauncher, int]]:
    """A cluster that is supervised in a thread, as by `waferbox up`; and what is readable once a place is given up."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(place, "DELAY_SECONDS", 0.001)
    launcher = FakeLauncher(management.address)
    stop, given_up = os.eventfd(0), os.eventfd(0)
    cluster = Cluster(ClusterSettings(metrics=True, threads=3), launcher, [stop])
    with recorded(cluster.management, os.getpid()) as note:

        def on_given_up(message: str) -> None:
            note(message)
            os.eventfd_write(given_up, 1)

        thread = threading.Thread(target=cluster.supervise, args=(on_given_up,))
        thread.start()
        yield launcher, given_up
        os.eventfd_write(stop, 1)
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
        cluster.close()
    for descriptor in (stop, given_up):
        os.close(descriptor)


def test_what_ends_is_started_again_with_the_same_arguments(
    supervised: tuple[FakeLauncher, int], capfd: pytest.CaptureFixture[str]
) -> None:
    launcher, _ = supervised
    for module in ("wafer", "workers", "memoryx", "swarmx"):
        ((first, arguments),) = launcher.of(module)
        first.end(-9)
        launcher.wait_for(lambda module=module: len(launcher.of(module)) == 2)
        again, same = launcher.of(module)[1]
        assert same == arguments
        assert again.poll() is None
    launcher.of("wafer")[1][0].end(1)
    launcher.wait_for(lambda: len(launcher.of("wafer")) == 3)
    assert len(launcher.of("appliance")) == 1
    (wafer, _), *_ = launcher.of("wafer")
    (second, _) = launcher.of("wafer")[1]
    told = capfd.readouterr().err
    assert f"waferbox: wafer (pid {wafer.pid}) ended with status -9; started again as pid {second.pid}\n" in told


def test_what_ends_again_and_again_is_given_up_and_the_status_says_so(
    supervised: tuple[FakeLauncher, int], management: FakeManagement, capfd: pytest.CaptureFixture[str]
) -> None:
    launcher, given_up = supervised
    for number in range(1, place.MAX_SHORT_LIVES + 1):
        launcher.wait_for(lambda number=number: len(launcher.of("memoryx")) == number)
        launcher.of("memoryx")[-1][0].end(1)
    assert readable([given_up], WAIT_SECONDS)
    reason = f"memoryx (pid {launcher.of('memoryx')[-1][0].pid}) ended with status 1, {place.MAX_SHORT_LIVES} times"
    assert reason in capfd.readouterr().err
    shown = CliRunner().invoke(app, ["status", "--management", management.address])
    assert shown.exit_code == 0
    assert reason in shown.stderr
    # The others are still looked after.
    launcher.of("wafer")[0][0].end(-9)
    launcher.wait_for(lambda: len(launcher.of("wafer")) == 2)
    assert len(launcher.of("memoryx")) == place.MAX_SHORT_LIVES
