"""The runs of a checked script: child processes, each with a record."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from waferbox import settings
from waferbox.checked_run import record
from waferbox.checked_run.record import Event, RunFailed, RunSettings, Way
from waferbox.launch.installation import user_environment
from waferbox.launch.local_clusters import EMBEDDED
from waferbox.launch.stop_signals import signal_name

LOG: Final = "log"
_TAIL_BYTES: Final = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that has ended.

    Attributes:
        way: how the steps ran.
        folder: the folder of its record, with the log of the script.
        status: the exit status; negative: the signal that ended it.
        events: the record.
    """

    way: Way
    folder: Path
    status: int
    events: list[Event]

    @property
    def failure(self) -> RunFailed | None:
        """The error that ended the script."""
        return next((event for event in self.events if isinstance(event, RunFailed)), None)

    @property
    def has_failed(self) -> bool:
        """Whether the script ended with an error, or with an exit status other than 0."""
        return self.failure is not None or self.status != 0

    @property
    def killed_by(self) -> str:
        """The name of the signal that ended the script, such as "SIGKILL"; empty: none did."""
        return signal_name(-self.status) if self.status < 0 else ""

    @property
    def log_tail(self) -> str:
        """The end of what the script has written."""
        return (self.folder / LOG).read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()


def start_script(command: Sequence[str], environment: Mapping[str, str], log: int) -> "subprocess.Popen[bytes]":
    """Starts a script as a group of processes of its own, whose output is written to the descriptor `log`."""
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )


class ScriptProcess:
    """A script that runs for a check. Its processes are a group of their own, and end with `close`."""

    def __init__(self, command: Sequence[str], run: RunSettings) -> None:
        folder = Path(run.folder)
        folder.mkdir(parents=True)
        self._way = run.way
        self._folder = folder
        environment = user_environment(os.environ)
        # The check has a cluster of its own, whatever cluster the script would take.
        environment |= {
            settings.MANAGEMENT.name: EMBEDDED,
            settings.CHECK.name: run.to_json(),
            "PYTHONUNBUFFERED": "1",
        }
        environment.setdefault("PYTHONHASHSEED", "0")  # sets have the same order in all runs
        with (folder / LOG).open("wb") as log:
            self._process = start_script(command, environment, log.fileno())

    def wait(self, seconds: float) -> Run:
        """Waits for the end of the script. Raises TimeoutError: it runs longer."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the script did not end within {seconds:g} s") from None
        return Run(way=self._way, folder=self._folder, status=status, events=list(record.read(self._folder)))

    def close(self) -> None:
        """Ends the script, if it runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
