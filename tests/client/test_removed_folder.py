"""A script whose current folder has been removed."""

import os
from pathlib import Path

import pytest
import torch
from fake_cluster import StartCluster
from user_script import Script, step_of_cluster

import cstorch
from cstorch._internal.check.private_files import PrivateFiles
from cstorch._internal.session import embedded
from cstorch._internal.session.command_line import command_line
from cstorch._internal.session.embedded import EmbeddedCluster
from cstorch._internal.session.execution.input import prepared_input
from cstorch._internal.tracing.provenance import line_of_function
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import ConfigurationError


def enter_removed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()


@pytest.fixture
def _in_removed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_removed_folder(tmp_path, monkeypatch)


def test_training_goes_on(tmp_path: Path, start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(tmp_path / "artifacts", start_cluster(step_of_cluster))
    losses: list[float] = []
    report = cstorch.step_closure(lambda loss: losses.append(loss.item()))
    script.loop(lambda batch: report(script.step(batch)))
    enter_removed_folder(tmp_path, monkeypatch)
    script.loop(lambda batch: report(script.step(batch)))
    assert len(losses) == 2


@pytest.mark.usefixtures("_in_removed_folder")
def test_a_line_keeps_its_file() -> None:
    names: dict[str, object] = {}
    exec(compile("\ndef step(): pass", "/home/ada/removed_folder.py", "exec"), names)
    step = names["step"]
    assert callable(step)
    assert line_of_function(step) == "/home/ada/removed_folder.py:2"


@pytest.mark.usefixtures("_in_removed_folder")
def test_the_command_line_keeps_the_path_of_the_script() -> None:
    assert command_line(["train.py", "--lr"]) == ("train.py", "--lr")


@pytest.mark.usefixtures("_in_removed_folder")
def test_workers_get_no_folder_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("")
    request = prepared_input(b"", ClusterConfig(python_paths=["/opt/models"]), tmp_path)
    assert request.working_directory == b""
    assert b"" not in request.python_paths
    assert request.python_paths[0] == b"/opt/models"


@pytest.mark.usefixtures("_in_removed_folder")
def test_a_relative_python_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has been removed.*'models'.*name absolute paths"):
        prepared_input(b"", ClusterConfig(python_paths=["models"]), tmp_path)


@pytest.mark.usefixtures("_in_removed_folder")
@pytest.mark.parametrize("kind", ["CSX", "CPU"])
def test_a_relative_artifact_dir_is_an_error(kind: str) -> None:
    def loop() -> None:
        cstorch.backend(kind, artifact_dir="artifacts")
        list(cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(lambda: [torch.ones(2)])))

    with pytest.raises(ConfigurationError, match=r"folder artifacts.* for the files of executions.*artifact_dir="):
        loop()


@pytest.mark.usefixtures("_in_removed_folder")
def test_the_embedded_cluster_starts_beside_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("FAKE_EMBEDDED", "works")
    monkeypatch.setattr(embedded, "MODULE", "fake_embedded")
    cluster = EmbeddedCluster(ClusterConfig(), tmp_path / "logs" / "cluster.log")
    cluster.management()
    assert os.readlink(f"/proc/{cluster.process_id}/cwd") == str(tmp_path / "logs")
    cluster.stop()


@pytest.mark.usefixtures("_in_removed_folder")
def test_a_checked_script_sees_that_the_folder_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PrivateFiles(tmp_path / "own").getcwd()
