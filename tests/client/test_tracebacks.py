"""Uncaught errors are shown with the script's frames alone."""

import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cstorch
from cstorch._internal.backend import tracebacks
from cstorch.errors import ConfigurationError, InternalError

SCRIPT = """
import sys
import torch
import cerebras.pytorch as cstorch

backend = cstorch.backend("CSX", validate_only=True)
with backend.device:
    model = torch.nn.Linear(4, 3)
compiled = cstorch.compile(model, backend)

@cstorch.trace
def step(batch):
    features, labels = batch
    if sys.argv[1] == "own":
        return {}["nothing"]
    return torch.nn.functional.cross_entropy(compiled(features), labels)  # labels of a wrong type

batches = lambda: [(torch.ones(2, 4), torch.ones(2))]
for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(batches), num_steps=1):
    step(batch)
"""


def shown(folder: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files in the traceback of the script, and its last line."""
    (folder / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    done = subprocess.run([sys.executable, "train.py", mode], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    files = [line.split('"')[1] for line in lines if line.startswith("  File ")]
    return [*(Path(file).name for file in files), lines[-1]]


@pytest.mark.cluster  # it starts a process
def test_a_script_is_shown_its_own_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *files, message = shown(tmp_path, "labels", monkeypatch)
    assert files == ["train.py", "train.py"]
    assert message == "RuntimeError: gather(): Expected dtype int32/int64 for index, but got torch.float32"
    *files, message = shown(tmp_path, "own", monkeypatch)
    assert (files, message) == (["train.py", "train.py"], "KeyError: 'nothing'")
    monkeypatch.setenv("WAFERBOX_TRACEBACK", "full")
    *files, message = shown(tmp_path, "labels", monkeypatch)
    assert {"train.py", "recorder.py", "functional.py"} <= set(files)


def caught(function: Any, *arguments: Any) -> BaseException:
    with pytest.raises((TypeError, ValueError, OSError)) as info:
        function(*arguments)
    return info.value


def files_of(error: BaseException) -> set[str]:
    return {Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)}


def test_errors_before_an_error_are_shortened_too() -> None:
    def again() -> None:
        try:
            cstorch.utils.data.DataLoader("no function")  # type: ignore[arg-type]
        except TypeError as error:
            raise ValueError("later") from error

    error = caught(again)
    assert error.__cause__ is not None
    assert len(files_of(error.__cause__)) > 1
    tracebacks.shorten(error)
    assert files_of(error) == files_of(error.__cause__) == {Path(__file__).name}


def test_errors_of_others_and_defects_stay_as_they_are() -> None:
    for error in (caught(Path("/nothing/at/all").read_text), InternalError("a defect")):
        before = files_of(error)
        tracebacks.shorten(error)
        assert files_of(error) == before


def test_an_error_without_a_frame_of_the_script_keeps_its_frames() -> None:
    error = caught(cstorch.utils.data.DataLoader, "no function")
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next.tb_next if error.__traceback__.tb_next else None
    before = files_of(error)
    tracebacks.shorten(error)
    assert files_of(error) == before


def test_a_notebook_shows_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    shell = SimpleNamespace(
        set_custom_exc=lambda kinds, handler: kept.append((kinds, handler)),
        showtraceback=lambda given, tb_offset: kept.append(files_of(given[1])),
    )
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(tracebacks, "_is_shortened", False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    tracebacks.shorten_tracebacks()
    ((kinds, handler),) = kept
    error = caught(cstorch.backends.csx.precision.__setattr__, "optimization_level", 17)
    assert isinstance(error, kinds)
    assert isinstance(error, ConfigurationError)
    handler(shell, type(error), error, error.__traceback__)
    assert kept[1] == {Path(__file__).name}
