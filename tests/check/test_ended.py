"""What answers say of how scripts end, and of what a check has not seen; how a verdict ends."""

from pathlib import Path
from typing import Protocol

import pytest

from waferbox.check.bisection import FirstDifference
from waferbox.check.check import difference_finding, resume_answer, trace_answers
from waferbox.check.runs import Run
from waferbox.check.verdict import Answer, Finding, State, Verdict
from waferbox.checked_run.record import (
    CheckpointSaved,
    Event,
    ExecutionBegun,
    ExecutionEnded,
    Found,
    Program,
    Question,
    RunFailed,
    Way,
)

PROGRAM = Program(
    execution=1,
    path="cirh.mlir",
    function="training_step (train.py:40)",
    trains=True,
    half="",
    optimization_level=1,
    half_gradients=False,
    trace_seconds=0.1,
    num_csx=1,
    input_line="",
)
ERROR = RunFailed(
    type="ValueError",
    message="after training",
    line="train.py:60",
    traceback="",
    is_ours=False,
    executions=1,
    in_step=False,
)

TRACEBACK = "Traceback ...\nNameError: name 'get_ipython' is not defined\n"


class MakeRun(Protocol):
    def __call__(self, *, status: int = 0, failed: bool = False, way: Way = Way.CLUSTER, written: str = ...) -> Run: ...


@pytest.fixture
def run(tmp_path: Path) -> MakeRun:
    """Returns a function that returns a run that has ended."""

    def make(*, status: int = 0, failed: bool = False, way: Way = Way.CLUSTER, written: str = TRACEBACK) -> Run:
        (tmp_path / "log").write_text(written)
        return Run(way=way, folder=tmp_path, status=status, events=[ERROR] if failed else [])

    return make


def test_error_of_the_script_itself_is_said(run: MakeRun) -> None:
    for eager in (None, run(status=1, failed=True, way=Way.TORCH)):
        trace, program = trace_answers(run(status=1, failed=True), eager, [PROGRAM])
        assert (trace.state, program.state) == (State.GOOD, State.GOOD)
        assert trace.summary.endswith("Then the script ended at train.py:60 with ValueError: after training.")


def test_exit_status_is_said(run: MakeRun) -> None:
    trace, _ = trace_answers(run(status=3), None, [PROGRAM])
    assert trace.summary.endswith("Then the script ended with status 3.")


@pytest.mark.parametrize(
    ("number", "said"),
    [(9, "SIGKILL, perhaps for want of memory; it wrote last:\nTrace"), (11, "SIGSEGV; it"), (40, "signal 40; it")],
)
def test_signal_that_killed_the_script_is_a_finding(number: int, said: str, run: MakeRun) -> None:
    killed, ended = run(status=-number), run()
    traced = run(status=-number, way=Way.TRACE)
    torch = run(status=-number, way=Way.TORCH)
    for first, eager, began, goes_on in (
        (killed, torch, "the script was", False),
        (killed, run(way=Way.TORCH), "the script was", True),
        (ended, torch, "by plain PyTorch, the script was", False),
        (traced, None, "the script was", False),
    ):
        answers = list(trace_answers(first, eager, [PROGRAM]))
        (finding,) = answers[0].findings
        assert finding.message.startswith(f"{began} killed by {said}")
        assert finding.message.endswith("By plain PyTorch it goes on") is goes_on
        assert Verdict(command=(), answers=tuple(answers), seconds=1.0).status == 1
    (trace,) = trace_answers(killed, torch, [])
    assert (trace.state, f"was killed by {said}" in trace.summary) == (State.OPEN, True)


def test_error_on_the_cluster_alone_is_a_finding(run: MakeRun) -> None:
    trace, _ = trace_answers(run(status=1, failed=True), run(way=Way.TORCH), [PROGRAM])
    assert trace.state is State.FOUND
    (finding,) = trace.findings
    assert finding.line == "train.py:60"
    assert finding.message.endswith("after training. By plain PyTorch it goes on")


def test_end_before_the_first_step(run: MakeRun) -> None:
    (trace,) = trace_answers(run(status=1), run(status=1, way=Way.TORCH), [])
    assert trace.state is State.OPEN
    assert "with status 1; it wrote last:\nTraceback" in trace.summary
    (trace,) = trace_answers(run(status=3, written=" \n"), None, [])
    assert trace.summary == "the script ended with status 3"
    (trace,) = trace_answers(run(), run(way=Way.TORCH), [])
    assert "ran no step on CSX" in trace.summary


def test_loop_that_is_left_before_its_step_is_called(tmp_path: Path) -> None:
    run = Run(way=Way.CLUSTER, folder=tmp_path, status=0, events=[ExecutionBegun(execution=1, steps=3, asked_steps=10)])
    (trace,) = trace_answers(run, None, [])
    assert trace.state is State.OPEN
    assert trace.summary.startswith("the script leaves its loop in the first step")


@pytest.mark.parametrize(
    ("asked", "part"),
    [([5], "Yes:"), ([5, 12, 8], "Yes, in the first 5 of 12 steps:"), ([5000], "Yes, in the first 5 of 5,000 steps:")],
)
def test_answers_name_the_steps_that_have_run(asked: list[int], part: str, tmp_path: Path) -> None:
    events: list[Event] = [
        ExecutionBegun(execution=number, steps=5, asked_steps=steps) for number, steps in enumerate(asked, 1)
    ]
    events.append(ExecutionEnded(execution=1, seconds=1.0))
    run = Run(way=Way.CLUSTER, folder=tmp_path, status=0, events=events)
    _, program = trace_answers(run, None, [PROGRAM])
    assert program.summary.startswith(part)
    assert resume_answer(run, [PROGRAM]).summary.startswith(part)


@pytest.mark.parametrize("has_saved", [False, True])
def test_script_that_saves_nothing(has_saved: bool, tmp_path: Path) -> None:
    events: list[Event] = [ExecutionEnded(execution=1, seconds=1.0)]
    if has_saved:
        events.append(CheckpointSaved(line="train.py:50"))
    answer = resume_answer(Run(way=Way.CLUSTER, folder=tmp_path, status=0, events=events), [PROGRAM])
    assert answer.state is State.GOOD
    assert ("no cstorch.save ran" in answer.summary) is not has_saved


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Found(question=Question.PROGRAM, line="train.py:9", message="another program"), "follows from the answer"),
        (Found(question=Question.RESUME, line="train.py:9", message="not saved"), "a defect of Waferbox"),
    ],
)
def test_difference_of_the_cluster_from_its_program(found: Found, said: str, tmp_path: Path) -> None:
    cluster = Run(way=Way.CLUSTER, folder=tmp_path, status=0, events=[found])
    assert said in difference_finding(FirstDifference(source=None), cluster).message


@pytest.mark.parametrize(
    ("states", "sentence"),
    [
        ((State.GOOD, State.GOOD), "Yes for 2 of 2 questions."),
        ((State.GOOD, State.OPEN, State.OPEN), "Yes for 1 of 3 questions; 2 are not answered."),
        ((State.GOOD, State.FOUND), "No for 1 of 2 questions, with 1 finding."),
        ((State.FOUND, State.FOUND, State.OPEN), "No for 2 of 3 questions, with 2 findings; 1 is not answered."),
        ((State.OPEN,), "The script could not be checked."),
    ],
)
def test_conclusion(states: tuple[State, ...], sentence: str) -> None:
    found = (Finding(line="", message=""),)
    answers = [
        Answer(question=Question.TRACE, state=state, summary="", findings=found if state is State.FOUND else ())
        for state in states
    ]
    assert Verdict(command=(), answers=tuple(answers), seconds=1.0).conclusion == sentence
