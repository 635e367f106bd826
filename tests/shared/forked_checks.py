"""Runs pieces of code, each as the script of a fresh process that has imported torch and nothing of Waferbox.

`run(checks)` starts one process, which forks for each piece: an interpreter and torch for each would take seconds.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

SECONDS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The exit status and the standard error of a piece of code."""

    status: int
    stderr: str


def run(checks: Mapping[str, str]) -> dict[str, Outcome]:
    """Runs each of `checks`; returns the outcomes by name."""
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(checks), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return {name: Outcome(status=status, stderr=said) for name, (status, said) in json.loads(done.stdout).items()}


def _run_in_fork(code: str) -> tuple[int, str]:
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 2)
            status = 1
            try:
                exec(compile(code, "<check>", "exec"), {"__name__": "__main__"})
                status = 0
            finally:
                if status:
                    sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return status, said.read().decode()


if __name__ == "__main__":
    import torch  # noqa: F401

    # Python puts the folder of this file first, whose modules must not take the place of others with their names.
    sys.path.pop(0)
    print(json.dumps({name: _run_in_fork(code) for name, code in json.load(sys.stdin).items()}))
