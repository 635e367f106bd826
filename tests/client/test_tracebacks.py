"""Uncaught errors are shown with the script's frames alone."""

import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cstorch
from cstorch._internal.backend import tracebacks
from cstorch.errors import ConfigurationError, InternalError

# It ends by an error in each of the modes that it is given, each in a fork: to import torch for each takes seconds.
SCRIPT = """
import os
import sys
import torch
import cerebras.pytorch as cstorch

for mode in sys.argv[1:]:
    if (child := os.fork()) == 0:
        os.dup2(os.open(f"{mode}.stderr", os.O_WRONLY | os.O_CREAT), 2)
        os.environ["WAFERBOX_TRACEBACK"] = mode  # which a backend reads
        break
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
else:
    sys.exit()
backend = cstorch.backend("CSX", validate_only=True)
with backend.device:
    model = torch.nn.Linear(4, 3)
compiled = cstorch.compile(model, backend)

@cstorch.trace
def step(batch):
    features, labels = batch
    if mode == "own":
        return {}["nothing"]
    return torch.nn.functional.cross_entropy(compiled(features), labels)  # labels of a wrong type

batches = lambda: [(torch.ones(2, 4), torch.ones(2))]
for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(batches), num_steps=1):
    step(batch)
"""


def shown(folder: Path, modes: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The files in the traceback of the script in each of these modes, and its last line."""
    (folder / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    done = subprocess.run(
        [sys.executable, "train.py", *modes], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = []
    for mode in modes:
        lines = (folder / f"{mode}.stderr").read_text().splitlines()
        files = [line.split('"')[1] for line in lines if line.startswith("  File ")]
        found.append([*(Path(file).name for file in files), lines[-1]])
    return found


@pytest.mark.cluster  # it starts a process
def test_a_script_is_shown_its_own_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (*files, message), own, (*all_files, _) = shown(tmp_path, ["labels", "own", "full"], monkeypatch)
    assert files == ["train.py", "train.py"]
    assert message == "gather(): Expected dtype int32/int64 for index, but got torch.float32"
    assert own == ["train.py", "train.py", "KeyError: 'nothing'"]
    assert {"train.py", "recorder.py", "functional.py"} <= set(all_files)


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


def test_an_interrupt_while_a_package_is_imported_is_shown_without_the_package() -> None:
    namespace: dict[str, Any] = {}
    file = Path(sysconfig.get_path("purelib")) / "package" / "__init__.py"
    exec(compile("def imported(error):\n    raise error", file, "exec"), namespace)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        cstorch.trace(namespace["imported"])(KeyboardInterrupt())
    tracebacks.shorten(interrupt.value)
    assert files_of(interrupt.value) == {Path(__file__).name}
    error = caught(cstorch.trace(namespace["imported"]), ValueError())
    tracebacks.shorten(error)
    assert files_of(error) == {Path(__file__).name, file.name}  # a package may have raised it for the script


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
        compile=SimpleNamespace(format_code_name=lambda file: None),
        set_custom_exc=lambda kinds, handler: kept.append((kinds, handler)),
        showtraceback=lambda given, tb_offset: kept.append(files_of(given[1])),
    )
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(tracebacks, "_is_shortened", False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    tracebacks.shorten_tracebacks()
    ((kinds, handler),) = kept
    error = caught(cstorch.backends.csx.precision.__setattr__, "optimization_level", 17)
    assert isinstance(error, ConfigurationError)
    assert all(issubclass(kind, kinds) for kind in (ConfigurationError, FileExistsError, KeyboardInterrupt))
    handler(shell, type(error), error, error.__traceback__)
    assert kept[1] == {Path(__file__).name}
