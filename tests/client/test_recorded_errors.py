"""The error with which the script of a checked run ends, as the record has it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cstorch._internal.check.run import CheckedRun
from cstorch.errors import InputError
from waferbox.checked_run.record import RunFailed, read


def raises_from(cause: Exception) -> None:
    try:
        raise cause
    except type(cause) as error:
        raise RuntimeError("in a callback") from error


def raises_while_handling(cause: Exception) -> None:
    try:
        raise cause
    except type(cause):
        raise RuntimeError("in a callback")  # noqa: B904 - the subject


def recorded(folder: Path, script: Callable[[], None]) -> RunFailed:
    """Returns what a run records of an error that nothing catches."""
    run = CheckedRun.__new__(CheckedRun)  # without the hooks that it installs in the process
    run.folder, run.in_step, run._ended, run._show_error = folder, False, 0, lambda *error: None
    try:
        script()
    except RuntimeError:
        run._failed(*sys.exc_info())
    (event,) = read(folder)
    assert isinstance(event, RunFailed)
    return event


@pytest.mark.parametrize("script", [raises_from, raises_while_handling])
def test_the_cause_of_an_error_is_told(tmp_path: Path, script: Callable[[Exception], None]) -> None:
    failure = recorded(tmp_path, lambda: script(OSError("no disk")))
    assert failure.message == "in a callback; its cause is OSError: no disk"
    assert (failure.type, failure.is_ours) == ("RuntimeError", False)


def test_an_error_of_the_library_stays_one_within_the_script_s(tmp_path: Path) -> None:
    failure = recorded(tmp_path, lambda: raises_from(InputError("no label")))
    assert (failure.type, failure.message, failure.is_ours) == ("InputError", "no label", True)
    assert "in a callback" in failure.traceback
