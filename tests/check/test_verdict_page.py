"""The page of a verdict: whole, with every answer, and nothing that a script or a name could add."""

import re

from waferbox.check.page import verdict_page
from waferbox.check.verdict import Answer, Finding, State, Verdict
from waferbox.checked_run.record import Question

HOSTILE = "</style><script>alert(1)</script>"
ESCAPED = "&lt;/style&gt;&lt;script&gt;alert(1)&lt;/script&gt;"


def test_every_answer_is_there_and_escaped() -> None:
    finding = Finding(line="train.py:53", message=HOSTILE)
    answers = (
        Answer(question=Question.TRACE, state=State.GOOD, summary="Yes."),
        Answer(question=Question.PROGRAM, state=State.FOUND, summary=HOSTILE, findings=(finding,)),
        Answer(
            question=Question.TIME, state=State.OPEN, summary="", table=(("wafers", "step", "by"), ("1", "2 ms", "x"))
        ),
    )
    command = ("/bin/python", "train.py", HOSTILE)
    page = verdict_page(Verdict(command=command, answers=answers, seconds=3.2))
    assert page.startswith("<!DOCTYPE html>")
    assert "<script" not in page
    assert not re.search(r"https?:|url\(|@import|(src|href)=", page)
    assert page.count(ESCAPED) == 4  # the command twice, the summary, and the finding
    assert '<p class="verdict found">No for 1 of 3 questions, with 1 finding; 1 is not answered.</p>' in page
    assert "<b>train.py:53</b>" in page
    assert '<th scope="row">1</th><td class="number">2 ms</td><td>x</td>' in page
    assert re.findall(r'<section class="answer (\w+)">', page) == ["good", "found", "open"]
