"""Records of this user's clusters: each has a name of its own, and none is left of a cluster that has ended."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from waferbox.launch.local_clusters import (
    ClusterError,
    LocalCluster,
    Starter,
    cluster_at,
    for_everybody,
    forget_failure,
    given_up,
    last_failure,
    local_clusters,
    name_of_script,
    recorded,
    runtime_folder,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path / "waferbox"
    assert not (tmp_path / "waferbox").exists()


def names() -> list[tuple[str, Starter, str]]:
    return [(cluster.name, cluster.starter, cluster.management) for cluster in local_clusters()]


def test_clusters_that_want_a_name_get_it_with_a_number() -> None:
    with (
        recorded(Starter.UP, "up", "a:1", page="http://a:2/"),
        recorded(Starter.SCRIPT, "train", "b:1"),
        recorded(Starter.RUN, "train", "c:1"),
    ):
        found = {cluster.name: cluster for cluster in local_clusters()}
        assert {name: cluster.starter for name, cluster in found.items()} == {
            "up": Starter.UP,
            "train": Starter.SCRIPT,
            "train-2": Starter.RUN,
        }
        assert found["up"].page == "http://a:2/"
        assert found["train-2"].management == "c:1"
        assert [cluster.name for cluster in for_everybody(list(found.values()))] == ["up"]
        assert all(cluster.pid == os.getpid() for cluster in found.values())


def test_a_name_is_free_again_when_its_cluster_has_ended_or_was_killed(folder: Path) -> None:
    script = (
        "import os, signal; from waferbox.launch.local_clusters import *\n"
        "with recorded(Starter.SCRIPT, 'train', 'a:1'): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert [path.name for path in folder.iterdir()] == ["train.json"]
    with recorded(Starter.SCRIPT, "train", "b:1"):
        assert names() == [("train", Starter.SCRIPT, "b:1")]
    with recorded(Starter.SCRIPT, "train", "c:1"):
        assert names() == [("train", Starter.SCRIPT, "c:1")]


def test_the_record_of_a_cluster_that_was_killed_is_removed_by_who_looks(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "gone.json").write_text(
        '{"name": "gone", "starter": "up", "management": "a:1", "page": "", "pid": 1, "started": 9, "created": 1.0}'
    )
    (folder / "other.json").write_text("no record")
    gone = cluster_at("a:1")
    assert gone is not None
    assert not gone.runs()
    assert cluster_at("a:2") is None
    assert local_clusters() == []
    assert cluster_at("a:1") is None
    assert [path.name for path in folder.iterdir()] == ["other.json"]
    (folder / "other.json").unlink()
    folder.rmdir()


def test_the_records_of_a_container_that_shares_the_folder_are_left_alone(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "up.json").write_text(
        '{"name": "up", "starter": "up", "management": "a:1", "pid": 1, "started": 9, "created": 1.0, '
        '"namespace": "pid:[1]"}'
    )
    assert local_clusters() == []
    assert cluster_at("a:1") is None
    with recorded(Starter.UP, "up", "b:1"):
        assert names() == [("up-2", Starter.UP, "b:1")]
    assert [path.name for path in folder.iterdir()] == ["up.json"]
    (folder / "up.json").unlink()
    folder.rmdir()


def test_processes_that_are_given_up_are_in_the_record() -> None:
    with recorded(Starter.UP, "up", "a:1") as on_given_up:
        on_given_up("wafer: ended too often")
        assert given_up("a:1") == ["wafer: ended too often"]
        assert names() == [("up", Starter.UP, "a:1")]


@pytest.mark.parametrize("starter", Starter)
def test_the_failure_of_a_cluster_for_everybody_is_kept(starter: Starter) -> None:
    with pytest.raises(ClusterError, match="burst"), recorded(starter, "up", "a:1"):
        raise ClusterError("burst")
    failure = last_failure()
    assert (failure is not None and failure.cause == "burst") is (starter is Starter.UP)
    forget_failure() if failure else None


def test_a_script_runs_without_a_record_where_none_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "waferbox").symlink_to(tmp_path)
    with recorded(Starter.SCRIPT, "train", "a:1") as on_given_up:
        on_given_up("nobody asks")
    assert "belongs to another user" in capsys.readouterr().err
    with pytest.raises(PermissionError), recorded(Starter.UP, "up", "a:1"):
        pass
    with pytest.raises(PermissionError):
        runtime_folder()
    (tmp_path / "waferbox").unlink()


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("/home/ada/train.py", "train"),
        ("run my model.py", "run-my-model"),
        ("../../etc/.hidden", "hidden"),
        ("-c", "python"),
        ("", "python"),
        ("/usr/lib/ipykernel_launcher.py", "notebook"),
        ("x" * 100, "x" * 40),
    ],
)
def test_a_cluster_of_a_script_has_the_name_of_the_script(script: str, name: str) -> None:
    assert name_of_script(script) == name


def test_a_record_is_of_the_process_that_owns_it() -> None:
    with recorded(Starter.UP, "up", "a:1"):
        (cluster,) = local_clusters()
        assert cluster.runs()
        other = LocalCluster(name="x", starter=Starter.UP, management="a:1", pid=cluster.pid, started=1, created=1.0)
        assert not other.runs()


@pytest.mark.parametrize("base", ["missing", "a file", "of another user"])
def test_a_runtime_folder_that_is_not_the_users_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    """As after `su`, in a container, or in a job of cron."""
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/" if base == "of another user" else str(tmp_path / base))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    user = 4711 if base == "of another user" else os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user)
    assert runtime_folder(create=False) == tmp_path / "temporary" / f"waferbox-{user}"
    assert local_clusters() == []


def test_the_log_of_a_cluster_that_was_killed_goes_with_its_record(folder: Path) -> None:
    folder.mkdir()
    log = folder / "up.log"
    log.touch()
    script = (
        "import os, signal, sys; from pathlib import Path; from waferbox.launch.local_clusters import *\n"
        "with recorded(Starter.UP, 'up', 'a:1', log=Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(log)], check=False)
    assert log.exists()
    assert names() == []
    assert not log.exists()
