"""The command that runs what a user names."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from waferbox.commands.cli import app
from waferbox.commands.script_command import NoScript, command_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_is_run_by_this_python(folder: Path) -> None:
    (folder / "train.py").touch()
    assert command_of("train.py", ["--lr", "1"]) == [sys.executable, "train.py", "--lr", "1"]


def test_a_module_is_run_by_this_python() -> None:
    assert command_of("package.train", ["--lr", "1"], is_module=True) == [
        sys.executable,
        "-m",
        "package.train",
        "--lr",
        "1",
    ]


@pytest.mark.parametrize("program", ["python3", sys.executable])
def test_a_program_runs_itself(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert command_of(program, ["train.py"]) == [shutil.which(program), "train.py"]


def test_a_script_beside_a_program_of_its_name_is_the_script(folder: Path) -> None:
    (folder / "python3").write_text("print(1)")
    assert command_of("python3", []) == [sys.executable, "python3"]


def test_a_folder_with_a_main_module_is_run_by_this_python(folder: Path) -> None:
    (folder / "package").mkdir()
    with pytest.raises(NoScript, match=r"package is a folder without __main__\.py, the script that runs it"):
        command_of("package", [])
    (folder / "package" / "__main__.py").touch()
    assert command_of("package", ["--lr", "1"]) == [sys.executable, "package", "--lr", "1"]
    assert command_of("package/", []) == [sys.executable, "package/"]


def test_a_program_with_the_name_of_a_folder_is_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "python3").mkdir()
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert command_of("python3", []) == [shutil.which("python3")]


def test_standard_input_is_run_by_this_python() -> None:
    assert command_of("-", ["--lr", "1"]) == [sys.executable, "-", "--lr", "1"]


def test_standard_input_is_not_read_twice() -> None:
    for command in (["run", "--restarts", "1", "-"], ["check", "-"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2
        assert "standard input" in done.stderr


@pytest.mark.parametrize(("name", "words"), [("train.ipynb", "nbconvert"), ("train.py", "there is no script train.py")])
def test_what_cannot_be_run_is_refused(name: str, words: str) -> None:
    with pytest.raises(NoScript, match=words):
        command_of(name, [])
