"""`waferbox check` finds the planted fault of each faulty script, at its line, and nothing in the right ones."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cluster

SCRIPTS = Path(__file__).parent / "scripts"
RIGHT = sorted((SCRIPTS / "right").glob("*.py"), key=lambda path: path.name)

# The question whose answer is the fault, and options of the check.
FAULTY = {
    "batch_not_divided": ("wafers", "--wafers", "1,2"),
    "dynamic_shape": ("trace",),
    "every_second_call": ("program",),
    "half_overflow": ("half",),
    "half_underflow": ("half",),
    "host_random": ("program",),
    "loop_changes_rate": ("program",),
    "loop_freezes": ("program",),
    "lost_buffer": ("resume",),
    "mixed_devices": ("trace",),
    "optimizer_not_saved": ("resume",),
    "partial_batch": ("input",),
    "python_argument": ("program",),
    "python_counter": ("program",),
    "same_samples": ("input",),
    "schedule_by_if": ("program",),
    "scheduler_not_saved": ("resume",),
    "slow_loader": ("input",),
    "tensor_kept": ("program",),
    "too_large": ("memory", "--full-size"),
    "unsupported_operation": ("trace",),
    "value_read": ("trace",),
}


def checked(script: Path, *options: str) -> Mapping[str, Any]:
    """Returns the verdict of a script, run in its folder."""
    command = [sys.executable, "-m", "waferbox", "check", "--json", "--steps", "3", "--wafers", "1", *options]
    done = subprocess.run([*command, script.name], cwd=script.parent, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1, 2), done.stderr
    verdict: Mapping[str, Any] = json.loads(done.stdout)
    assert verdict["status"] == done.returncode
    return verdict


def findings(verdict: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the lines of the findings, by question."""
    return {
        answer["question"]: [finding["line"] for finding in answer["findings"]]
        for answer in verdict["answers"]
        if answer["state"] == "found"
    }


def faults(script: Path) -> set[str]:
    """Returns the lines of a script that are marked as faults."""
    lines = script.read_text().splitlines()
    return {f"{script.name}:{number}" for number, line in enumerate(lines, 1) if "# fault" in line}


def test_every_script_is_named():
    assert {path.stem for path in (SCRIPTS / "faulty").glob("*.py")} == FAULTY.keys()


@pytest.mark.parametrize("name", FAULTY)
def test_fault_is_found(name):
    script = SCRIPTS / "faulty" / f"{name}.py"
    question, *options = FAULTY[name]
    verdict = checked(script, *options)
    assert verdict["status"] == 1
    found = findings(verdict)
    assert faults(script) <= set(found[question])
    # A step that is not what the script says computes other values too, and nothing else is wrong.
    assert found.keys() <= {question, "values"} if question == "program" else found.keys() == {question}


@pytest.mark.parametrize("script", RIGHT, ids=lambda path: path.stem)
def test_no_false_alarm(script):
    verdict = checked(script)
    assert findings(verdict) == {}
    assert verdict["status"] == 0
    assert [answer["question"] for answer in verdict["answers"] if answer["state"] == "open"] == []


def test_script_that_fails_before_its_first_step(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        'import cerebras.pytorch as cstorch\nbackend = cstorch.backend("CSX")\nraise ValueError("no data")\n'
    )
    verdict = checked(script)
    assert verdict["status"] == 2
    (answer,) = verdict["answers"]
    assert answer["summary"] == "the script ended at fails.py:3 with ValueError: no data"


def test_script_without_a_step(tmp_path):
    script = tmp_path / "empty.py"
    script.write_text("print(1)\n")
    verdict = checked(script)
    assert verdict["status"] == 2
    assert "ran no step on CSX" in verdict["answers"][0]["summary"]
