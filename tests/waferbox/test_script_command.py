"""The command that runs what a user names."""

import os
import shutil
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("name", "words"), [("train.ipynb", "nbconvert"), ("train.py", "there is no script train.py")])
def test_what_cannot_be_run_is_refused(name: str, words: str) -> None:
    with pytest.raises(NoScript, match=words):
        command_of(name, [])
