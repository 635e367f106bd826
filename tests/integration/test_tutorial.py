"""docs/tutorial.md: its script is written, its commands run in their order, and they print what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def commands() -> list[tuple[str, list[str]]]:
    """The commands after a prompt, each with the lines that it prints."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```text\n(.*?)```", TUTORIAL, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return found


def without_figures(line: str) -> str:
    """A line without its numbers, its units, the name of the job, and the widths of columns."""
    line = re.sub(r"job-[0-9a-f]{8}", "JOB", line)
    line = re.sub(r"\d[\d.,e-]*( (µs|ms|s|min)\b)?", "0", line)
    return " ".join(line.split())


def test_the_tutorial(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WAFERBOX_")}
    (tmp_path / "records").mkdir(mode=0o700)
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "120",
        "LOGNAME": "ada",
        "WAFERBOX_CACHE": str(tmp_path / "cache"),
        "XDG_RUNTIME_DIR": str(tmp_path / "records"),
    }

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=inherited | own,
            shell=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=180,
        )

    try:
        for command, shown in commands():
            ended = run(command)
            assert ended.returncode == 0, f"`{command}`:\n{ended.stdout}"
            lines = iter([without_figures(line) for line in ended.stdout.splitlines()])
            for line in shown:
                found = line == "..." or without_figures(line) in lines
                assert found, f"`{command}` does not print {line!r}:\n{ended.stdout}"
    finally:
        run("waferbox down")  # fails if the tutorial has done it
