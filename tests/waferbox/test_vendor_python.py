"""The check of the interpreter that `waferbox up --vendor-client` names."""

import sys
import time
from pathlib import Path

import pytest
import typer

from waferbox.commands import vendor_python as checked
from waferbox.commands.vendor_python import vendor_python


def program(folder: Path, text: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


def test_a_python_with_the_packages_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checked, "_NEEDED", ("numpy", "torch"))
    program(tmp_path, f'exec {sys.executable} "$@"')
    assert vendor_python(Path("python")) == str(tmp_path / "python")


def test_a_python_without_a_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "_NEEDED", ("torch", "no_such_package", "nor_this"))
    with pytest.raises(typer.BadParameter, match="has no no_such_package and no nor_this: install"):
        vendor_python(Path(sys.executable))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("exit 1", r"starts \(status 1\)"),
        ("echo broken >&2; exit 3", r"starts \(status 3, broken\)"),
        ("echo hello", "starts"),
        ("echo 7", "starts"),
        ("exec /bin/echo $@", "starts"),
    ],
)
def test_another_program_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"is no Python that {reason}.*: name the Python") as caught:
        vendor_python(program(tmp_path, text))
    assert str(tmp_path / "python") in caught.value.message


def test_a_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("")
    with pytest.raises(typer.BadParameter, match="Permission denied"):
        vendor_python(tmp_path / "python")
    with pytest.raises(typer.BadParameter, match="No such file"):
        vendor_python(tmp_path / "other")


def test_a_program_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "_SECONDS", 0.2)
    began = time.monotonic()
    with pytest.raises(typer.BadParameter, match=r"within 0\.2 s"):
        vendor_python(program(tmp_path, "exec sleep 30"))
    assert time.monotonic() - began < 10
