"""`waferbox check` finds the planted fault of each faulty script, at its line, and nothing in the right ones."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from waferbox.check.check import Check, CheckSettings
from waferbox.check.verdict import State, Verdict
from waferbox.checked_run.record import Question
from waferbox.commands.script_command import command_of
from waferbox.prediction.machines import CS3

pytestmark = pytest.mark.cluster

SCRIPTS = Path(__file__).parent / "scripts"
RIGHT = sorted((SCRIPTS / "right").glob("*.py"), key=lambda path: path.name)

# Questions that need no run on a cluster, nor one by PyTorch.
TRACED = {Question.TRACE, Question.PROGRAM, Question.WAFERS, Question.MEMORY, Question.INPUT}
TRACED_TOO = {"lost_buffer"}
NOT_TRACED = {"state_without_checkpoint"}
# The question whose answer is the fault.
FAULTY = {
    "batch_not_divided": Question.WAFERS,
    "changed_in_loop": Question.TRACE,
    "every_second_call": Question.PROGRAM,
    "half_overflow": Question.HALF,
    "half_underflow": Question.HALF,
    "host_random": Question.PROGRAM,
    "loop_changes_rate": Question.PROGRAM,
    "loop_freezes": Question.PROGRAM,
    "loop_left": Question.RESUME,
    "lost_buffer": Question.RESUME,
    "not_traceable": Question.TRACE,
    "optimizer_not_saved": Question.RESUME,
    "partial_batch": Question.INPUT,
    "python_argument": Question.PROGRAM,
    "python_counter": Question.PROGRAM,
    "same_samples": Question.INPUT,
    "schedule_by_if": Question.PROGRAM,
    "scheduler_not_saved": Question.RESUME,
    "slow_loader": Question.INPUT,
    "state_without_checkpoint": Question.TRACE,
    "tensor_kept": Question.PROGRAM,
    "too_large": Question.MEMORY,
}


class CheckScript(Protocol):
    def __call__(self, script: Path, *, wafers: Sequence[int] = (1,), full_size: bool = False) -> Verdict: ...


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_scripts: None) -> CheckScript:
    """Returns a function that returns the verdict of a script, which runs in its folder."""

    def check(script: Path, *, wafers: Sequence[int] = (1,), full_size: bool = False) -> Verdict:
        monkeypatch.chdir(script.parent)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        settings = CheckSettings(
            command=command_of(script.name, []),
            wafers=wafers,
            steps=3,
            full_size=full_size,
            machine=CS3,
            folder=tmp_path / "check",
            timeout_seconds=100,
        )
        return Check(settings, lambda what: None).verdict()

    return check


def printed(folder: Path, *script: str) -> tuple[int, Mapping[str, Any]]:
    """Returns the exit status of the command for a script in a folder, and what it prints as JSON."""
    command = [sys.executable, "-m", "waferbox", "check", "--json", "--steps", "3", "--wafers", "1", *script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout)


def findings(verdict: Verdict) -> dict[Question, list[str]]:
    """Returns the lines of the findings, by question."""
    found = [answer for answer in verdict.answers if answer.state is State.FOUND]
    return {answer.question: [finding.line for finding in answer.findings] for answer in found}


def faults(script: Path) -> set[str]:
    """Returns the lines of a script that are marked as faults."""
    lines = script.read_text().splitlines()
    return {f"{script.name}:{number}" for number, line in enumerate(lines, 1) if "# fault" in line}


def test_every_script_is_named() -> None:
    assert {path.stem for path in (SCRIPTS / "faulty").glob("*.py")} == FAULTY.keys()


@pytest.mark.parametrize("name", FAULTY)
def test_fault_is_found(name: str, checked: CheckScript) -> None:
    script = SCRIPTS / "faulty" / f"{name}.py"
    question = FAULTY[name]
    is_traced = name in TRACED_TOO or (question in TRACED and name not in NOT_TRACED)
    verdict = checked(script, wafers=(1, 2) if question is Question.WAFERS else (1,), full_size=is_traced)
    assert verdict.status == 1
    found = findings(verdict)
    assert faults(script) <= set(found[question])
    assert found.keys() == {question}  # nothing else is wrong


def test_loop_that_is_left_in_its_first_step_has_no_step_to_compare(checked: CheckScript, tmp_path: Path) -> None:
    script = tmp_path / "left.py"
    script.write_text(
        (SCRIPTS / "faulty" / "loop_left.py").read_text().replace("if losses and losses[-1] < 10.0:", "if True:")
    )
    verdict = checked(script)
    (answer,) = [each for each in verdict.answers if each.question is Question.VALUES]
    assert answer.state is State.OPEN
    assert answer.summary.startswith("Not compared: the script leaves its loop in the first step")
    (answer,) = [each for each in verdict.answers if each.question is Question.INPUT]
    assert answer.summary == "Not measured: the loop ended before its second batch."


@pytest.mark.parametrize("full_size", [False, True])
def test_input_of_a_loop_that_is_left_later_is_measured(full_size: bool, checked: CheckScript, tmp_path: Path) -> None:
    script = tmp_path / "left.py"
    text = (SCRIPTS / "faulty" / "loop_left.py").read_text()
    script.write_text(text.replace("if losses and losses[-1] < 10.0:", "if executor.user_iteration == 2:"))
    verdict = checked(script, full_size=full_size)
    (answer,) = [each for each in verdict.answers if each.question is Question.INPUT]
    assert answer.summary.startswith("One worker makes ")


def test_other_program_computes_other_values(checked: CheckScript) -> None:
    verdict = checked(SCRIPTS / "faulty" / "every_second_call.py")
    assert findings(verdict).keys() == {Question.PROGRAM, Question.VALUES}
    messages = [finding.message for finding in verdict.findings]
    assert not any("defect of Waferbox" in message for message in messages)
    assert any("follows from the answer above" in message for message in messages)


@pytest.mark.parametrize("script", RIGHT, ids=lambda path: path.stem)
def test_no_false_alarm(script: Path, checked: CheckScript) -> None:
    verdict = checked(script)
    assert findings(verdict) == {}
    assert verdict.status == 0
    summaries = [(answer.state, answer.summary) for answer in verdict.answers]
    assert [each for each in summaries if State.OPEN in each or "the script ended" in each[1]] == []
    if "cstorch.save(" in script.read_text():
        assert not any("no cstorch.save" in summary for _, summary in summaries)
    # The check has changed no file.
    assert {path.suffix for path in script.parent.iterdir()} <= {".py", ""}
    assert not (script.parent / "out").exists()


def test_command_starts_a_cluster_and_processes_of_its_own() -> None:
    status, verdict = printed(SCRIPTS / "right", "mlp.py")
    assert status == verdict["status"] == 0
    assert {answer["state"] for answer in verdict["answers"]} == {"good"}


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_a_check_that_is_ended_leaves_no_process(number: signal.Signals, status: int, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import time, cerebras.pytorch\nprint('waits')\ntime.sleep(300)  # longer than the test\n")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "waferbox", "check", script.name]
    variables = {**os.environ, "TMPDIR": str(temporary)}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # A check ignores what these tests ignore, as under nohup or in the background of a shell.
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGHUP, signal.SIGINT)}
    check = subprocess.Popen(command, cwd=tmp_path, env=variables, text=True, **output)  # type: ignore[call-overload]
    for each, handler in before.items():
        signal.signal(each, handler)
    deadline = time.monotonic() + 60
    while [log.read_text() for log in temporary.glob("*/*/log")] != ["waits\n"] * 2:  # on a cluster, and by PyTorch
        assert time.monotonic() < deadline
        time.sleep(0.05)
    scripts = [int(pid) for pid in Path(f"/proc/{check.pid}/task/{check.pid}/children").read_text().split()]
    assert len(scripts) == 2
    check.send_signal(number)
    check.send_signal(number)  # as timeout(1) does, and an impatient user
    printed, _ = check.communicate(timeout=60)
    assert check.returncode == status
    assert "Traceback" not in printed
    while any(Path(f"/proc/{pid}").exists() for pid in scripts):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert number is signal.SIGKILL or not os.listdir(temporary)


def test_script_that_a_signal_kills_after_its_first_steps(checked: CheckScript, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    text = (SCRIPTS / "right" / "mlp.py").read_text()
    call = "    report(training_step(batch))\n"
    assert call in text
    kill = "    batches.append(0)\n    if len(batches) == 3:\n        os.kill(os.getpid(), 9)\n"
    script.write_text(f"import os\nbatches = []\n{text.replace(call, call + kill)}")
    verdict = checked(script)
    assert verdict.status == 1
    (finding,) = verdict.findings
    assert finding.message.startswith("the script was killed by SIGKILL, perhaps for want of memory")


def test_script_that_fails_before_its_first_step(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    lines = (
        "import cerebras.pytorch as cstorch",
        'backend = cstorch.backend("CSX")',
        'raise ValueError("no data") from OSError("no disk")',
    )
    script.write_text("\n".join(lines))
    status, verdict = printed(tmp_path, script.name)
    assert status == verdict["status"] == 2
    (answer,) = verdict["answers"]
    assert answer["summary"] == (
        "the script ended at fails.py:3 with ValueError: no data; its cause is OSError: no disk"
    )


def test_script_without_a_step(tmp_path: Path) -> None:
    module = tmp_path / "package" / "empty.py"
    module.parent.mkdir()
    lines = (
        "import argparse, sys",
        "parser = argparse.ArgumentParser()",
        'parser.add_argument("--steps", type=int)',
        'parser.add_argument("--json", action="store_true")',
        "options = parser.parse_args()",
        "sys.exit(0 if options.steps == 7 and options.json else 9)",
    )
    module.write_text("\n".join(lines))
    status, verdict = printed(tmp_path, "-m", "package.empty", "--steps", "7", "--json")
    assert status == verdict["status"] == 2
    assert "ran no step on CSX" in verdict["answers"][0]["summary"]
