"""The verdict of a check: an answer to each question, with findings at lines of the script."""

import dataclasses
import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from waferbox.checked_run.record import Question

TITLES: Final = {
    Question.TRACE: "Does it trace?",
    Question.PROGRAM: "Is it one program?",
    Question.VALUES: "Does it compute what PyTorch computes?",
    Question.HALF: "In half precision?",
    Question.WAFERS: "For several wafers?",
    Question.MEMORY: "Does it fit?",
    Question.TIME: "How long is a step?",
    Question.INPUT: "Is the input right, and fast enough?",
    Question.RESUME: "Will it resume?",
}


class State(enum.StrEnum):
    """The state of an answer."""

    GOOD = "good"
    FOUND = "found"  # something is wrong with the script
    OPEN = "open"  # the question could not be answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong, or that a user should know.

    Attributes:
        line: the script's line, such as "train.py:53"; empty: none is known.
        message: what is wrong, and the way out.
    """

    line: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a question.

    Attributes:
        question: the question.
        state: whether something was found.
        summary: the answer in a sentence.
        findings: what was found.
        table: figures, as rows of cells, the first of which is the heading; empty: none.
    """

    question: Question
    state: State
    summary: str
    findings: tuple[Finding, ...] = ()
    table: tuple[tuple[str, ...], ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict of a check.

    Attributes:
        command: the command that was checked.
        answers: the answers, in the order of the questions.
        seconds: the time of the check.
    """

    command: tuple[str, ...]
    answers: tuple[Answer, ...]
    seconds: float

    @property
    def findings(self) -> Sequence[Finding]:
        return [finding for answer in self.answers if answer.state is State.FOUND for finding in answer.findings]

    @property
    def status(self) -> int:
        """The exit status: 0: nothing was found, 1: something was, 2: the script could not be checked."""
        states = {answer.state for answer in self.answers}
        return 1 if State.FOUND in states else 0 if State.GOOD in states else 2

    @property
    def conclusion(self) -> str:
        """The verdict in a sentence."""
        if self.status == 2:
            return "The script could not be checked."
        states = [answer.state for answer in self.answers]
        count, asked, left = len(self.findings), len(states), states.count(State.OPEN)
        rest = f"; {left} {'is' if left == 1 else 'are'} not answered" if left else ""
        if self.status:
            listed = f"{count} finding{'' if count == 1 else 's'}"
            return f"No for {states.count(State.FOUND)} of {asked} questions, with {listed}{rest}."
        return f"Yes for {states.count(State.GOOD)} of {asked} questions{rest}."

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "status": self.status}, indent=1)
