"""The embedded cluster's process, with a stand-in for the cluster."""

import errno
import itertools
import logging
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cstorch._internal.session import embedded
from cstorch._internal.session.embedded import EmbeddedCluster, shards_for
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import ClusterError, ConfigurationError
from waferbox import deadlines
from waferbox.host.descriptors import readable


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(embedded, "MODULE", "fake_embedded")


def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, behaviour: str) -> EmbeddedCluster:
    monkeypatch.setenv("FAKE_EMBEDDED", behaviour)
    return EmbeddedCluster(ClusterConfig(num_csx=2, num_workers_per_csx=2), tmp_path / "logs" / "cluster.log")


def is_running(process_id: int) -> bool:
    return Path(f"/proc/{process_id}").exists()


def test_it_says_its_address_and_ends_with_its_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = start(monkeypatch, tmp_path, "works")
    assert cluster.management() == "127.0.0.1:4711"
    assert cluster.management() == "127.0.0.1:4711"
    assert os.getsid(cluster.process_id) == cluster.process_id  # Ctrl-C is not for it
    cluster.stop()
    assert not is_running(cluster.process_id)
    cluster.stop()


def test_one_that_dies_shows_the_end_of_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = start(monkeypatch, tmp_path, "dies")
    with pytest.raises(ClusterError, match=r"ended while it started(?s:.*)no memory left"):
        cluster.management()
    cluster.stop()


def test_one_that_is_killed_names_the_signal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = start(monkeypatch, tmp_path, "silent")
    os.kill(cluster.process_id, signal.SIGABRT)
    with pytest.raises(ClusterError, match="ended while it started, by SIGABRT; its log"):
        cluster.management()
    cluster.stop()


def test_one_that_cannot_be_started_names_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    with pytest.raises(ClusterError, match=r"could not be started: no more threads .*`ulimit -u`.*pids\.max"):
        start(monkeypatch, tmp_path, "works")


def test_the_end_of_the_log_is_that_of_this_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for _ in range(2):
        cluster = start(monkeypatch, tmp_path, "dies")
        with pytest.raises(ClusterError, match="no memory left") as caught:
            cluster.management()
        assert str(caught.value).count("no memory left") == 1
        cluster.stop()


def test_one_that_has_ended_since_shows_the_end_of_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = start(monkeypatch, tmp_path, "fails")
    pidfd = os.pidfd_open(cluster.process_id)  # before anybody can have noticed its end
    assert cluster.management() == "127.0.0.1:4711"
    assert readable([pidfd], 20)
    os.close(pidfd)
    with pytest.raises(ClusterError, match=r"has ended(?s:.*)the fork server was killed"):
        cluster.management()
    cluster.stop()


def test_one_that_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deadlines, "START", replace(deadlines.START, embedded=0.2))
    cluster = start(monkeypatch, tmp_path, "silent")
    with pytest.raises(ClusterError, match="did not start within"):
        cluster.management()
    cluster.stop()


def test_one_that_says_something_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = start(monkeypatch, tmp_path, "babbles")
    with pytest.raises(ClusterError, match="printed no address"):
        cluster.management()
    cluster.stop()


def test_one_that_does_not_end_is_killed_without_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deadlines, "END", replace(deadlines.END, embedded=0.5))
    cluster = start(monkeypatch, tmp_path, "stubborn")
    cluster.management()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        cluster.stop()
    assert not is_running(cluster.process_id)
    assert caplog.messages == []


def test_who_waits_for_the_address_hears_of_the_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = start(monkeypatch, tmp_path, "silent")
    heard: list[str] = []

    def wait() -> None:
        try:
            cluster.management()
        except ClusterError as error:
            heard.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    cluster.stop()
    thread.join(5)
    assert "ended while it started" in heard[0]


@pytest.mark.parametrize(
    ("limit", "num_cores", "shards"),
    [(0, 64, 1), (1, 64, 1), (2, 1, 2), (24, 1, 2), (24, 2, 2), (24, 8, 4), (24, 128, 24)],
)
def test_max_wgt_servers_is_a_limit(limit: int, num_cores: int, shards: int) -> None:
    assert shards_for(limit, num_cores) == shards


def test_more_workers_than_a_machine_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ask for 262144 input workers, .* at most 1024"):
        EmbeddedCluster(ClusterConfig(num_csx=1024, num_workers_per_csx=256), tmp_path / "log")


def test_the_process_is_asked_for_so_many_shards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAKE_EMBEDDED", "works")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process_id: {0, 1})
    cluster = EmbeddedCluster(ClusterConfig(num_csx=3, num_workers_per_csx=2, max_wgt_servers=24), tmp_path / "log")
    cluster.management()  # the kernel shows the arguments a moment after Popen returns
    words = Path(f"/proc/{cluster.process_id}/cmdline").read_text().split("\0")
    cluster.stop()
    given = dict(itertools.pairwise(words))
    assert (given["--wafers"], given["--memoryx"], given["--workers"]) == ("3", "2", "6")
