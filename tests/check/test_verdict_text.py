"""The text of a verdict: shown whole on every terminal."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
from waferbox.check.tables import verdict_text
from waferbox.check.verdict import Answer, Finding, State, Verdict
from waferbox.checked_run.record import Question
from waferbox.output.console import output

finding = Finding(line="tränen.py:53", message="a finding")
answers = (
    Answer(question=Question.TRACE, state=State.GOOD, summary="Yes."),
    Answer(question=Question.PROGRAM, state=State.FOUND, summary="No.", findings=(finding,)),
)
output.print(verdict_text(Verdict(command=("train.py",), answers=answers, seconds=3.2)))
"""


@pytest.mark.parametrize(
    ("encoding", "marks", "name"), [("utf-8", "✓✗", "tränen"), ("latin-1", "+x", "tränen"), ("ascii", "+x", "tr?nen")]
)
def test_a_terminal_shows_the_verdict_in_its_encoding(encoding: str, marks: str, name: str) -> None:
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONIOENCODING": encoding}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    shown = run.stdout.decode(encoding)
    assert all(any(line.startswith(f"{mark} ") for line in shown.splitlines()) for mark in marks), shown
    assert f"{name}.py:53: a finding" in shown
