"""`waferbox up` as a process of its own, and the other commands: as a user's, or forked by a server."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO, Protocol

from cluster_rig import Surroundings
from role_server import RoleServer

COMMAND = [sys.executable, "-m", "waferbox"]
COMMAND_SECONDS = 60.0


class Command(Protocol):
    """A command that runs: a subprocess.Popen, or Forked."""

    @property
    def stderr(self) -> IO[str] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: signal.Signals) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Forked:
    """A `python -m MODULE` with pipes, which the server forks: its imports take longer than what it does."""

    def __init__(self, server: RoleServer, environment: Mapping[str, str], module: str, *arguments: str) -> None:
        given, self._input = os.pipe()
        (self.stdout, output), (self.stderr, errors) = _text_pipe(), _text_pipe()
        try:
            fds = {0: given, 1: output, 2: errors}
            process = server.start(module, arguments, environment, output=errors, fds=fds)
        finally:
            for fd in (given, output, errors):
                os.close(fd)
        self.poll, self.wait = process.poll, process.wait
        self.send_signal, self.terminate, self.kill = process.send_signal, process.terminate, process.kill

    def end_input(self) -> None:
        if self._input >= 0:
            os.close(self._input)
            self._input = -1

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        """As a Popen's: closes its pipes, and waits for its end."""
        self.end_input()
        with self.stdout, self.stderr:
            self.wait(COMMAND_SECONDS)


def _text_pipe() -> tuple[IO[str], int]:
    reader, writer = os.pipe()
    return open(reader, encoding="utf-8"), writer


@contextlib.contextmanager
def up(surroundings: Surroundings, *arguments: str, server: RoleServer | None = None) -> Iterator[tuple[Command, str]]:
    """The process, and the management service's address, once all nodes are there; it is ended with the context.

    server: who forks it, instead of a Python of its own.
    """
    variables = _variables(surroundings)
    with (
        Forked(server, variables, "waferbox", "up", *arguments)
        if server is not None
        else subprocess.Popen(
            [*COMMAND, "up", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
            start_new_session=True,
        )
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            yield process, _management(process.stdout, process.stderr)
        finally:
            process.terminate()


def _management(output: IO[str], errors: IO[str]) -> str:
    for line in output:
        if found := re.search(r"export WAFERBOX_MANAGEMENT=(\S+)", line):
            return found[1]
    raise AssertionError(errors.read())


def waferbox(
    surroundings: Surroundings, *arguments: str, server: RoleServer | None = None
) -> "subprocess.CompletedProcess[str]":
    """A command, once it has ended. server: who forks it, instead of a Python of its own."""
    variables = _variables(surroundings)
    if server is not None:
        return forked_waferbox(server, variables, *arguments)
    return subprocess.run(
        [*COMMAND, *arguments], env=variables, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )


def forked_waferbox(
    server: RoleServer, variables: Mapping[str, str], *arguments: str
) -> "subprocess.CompletedProcess[str]":
    """A command that a server has forked, once it has ended."""
    with (
        open(os.devnull, "rb") as nothing,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
    ):
        fds = {0: nothing.fileno(), 1: output.fileno(), 2: errors.fileno()}
        process = server.start("waferbox", arguments, variables, output=errors.fileno(), fds=fds)
        try:
            status = process.wait(COMMAND_SECONDS)
        finally:
            process.kill()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(arguments, status, output.read(), errors.read())


def _variables(surroundings: Surroundings) -> dict[str, str]:
    return surroundings.variables(XDG_RUNTIME_DIR=str(surroundings.folder), COLUMNS="200")
