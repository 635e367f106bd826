"""The check of a script: runs it in several ways, and answers each question from the records."""

import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from appliance.compiler.core.target import Precision
from appliance.drawing.number_text import bytes_text, count_text, seconds_text
from waferbox.check.bisection import FirstDifference, first_difference
from waferbox.check.comparison import (
    CLOSE,
    CLOSE_IN_HALF,
    Comparison,
    Difference,
    Steps,
    compare,
    needs_judge,
    not_repeated,
    step_values,
)
from waferbox.check.compiles import Compiled, compile_for, largest_value
from waferbox.check.half import first_not_finite, half_answer, steps_before_skip
from waferbox.check.half_errors import HalfErrors, half_errors
from waferbox.check.runs import Run, ScriptProcess
from waferbox.check.verdict import Answer, Finding, State, Verdict
from waferbox.checked_run.record import (
    CheckpointSaved,
    ExecutionBegun,
    ExecutionEnded,
    Found,
    InputMeasured,
    Program,
    Question,
    RunFailed,
    RunSettings,
    StepObserved,
    Way,
)
from waferbox.cirh.dialect.source import Source
from waferbox.prediction.machines import Machine
from waferbox.prediction.prediction import predict_scales

EXECUTIONS: Final = 4
_JUDGES: Final = {Way.DOUBLE: "float64", Way.HALF: "half precision by PyTorch"}
# The numbers of wafers for which the time of a step is predicted, besides those that are checked.
_SCALES: Final = (1, 4, 16, 64, 256, 1024)
_MOST_NAMED: Final = 4
_SEEDS: Final = (
    "Give all of its random numbers a seed: those of torch, numpy and random, and of each generator of its own"
)
_SKIPPED: Final = "the first step overflows even with a loss scale of 1, and is skipped."
_RESCALED: Final = "This run began with a loss scale of 1, as the script's own skips the first step."
_MOST_LAYERS: Final = 32
# A loader is slow if this many workers for each wafer, together, keep it waiting, and a batch is longer on its way than
# the outputs of a step: steps of small models take microseconds, and no loader keeps up with them.
_MOST_WORKERS: Final = 16
_UNNOTICED_SECONDS: Final = 0.01

_E = TypeVar("_E")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """What a check is to do.

    Attributes:
        command: the command of the script.
        wafers: the numbers of wafers to compile for.
        steps: the most steps of each execution.
        full_size: whether the step is only traced and compiled, as its size needs another machine to run.
        machine: the machine that the step is planned for.
        folder: a new folder for the records.
        timeout_seconds: the longest that a run of the script may take.
    """

    command: Sequence[str]
    wafers: Sequence[int]
    steps: int
    full_size: bool
    machine: Machine
    folder: Path
    timeout_seconds: float


class Check:
    """A check of a script, made once by `verdict`. Used by one thread.

    Args:
        settings: What it is to do.
        progress: Called with what begins, for a line on the terminal.
    """

    def __init__(self, settings: CheckSettings, progress: Callable[[str], None]) -> None:
        self._settings = settings
        self._progress = progress

    def verdict(self) -> Verdict:
        """Runs the script, and answers all questions.

        Raises:
            TimeoutError: A run of the script takes too long.
        """
        began = time.monotonic()
        settings = self._settings
        first, eager = self._first_runs()
        programs = _of(first, Program)
        answers = [*trace_answers(first, eager, programs)]
        if programs:
            answers += self._values_answers(first, eager, programs)
            answers += self._compile_answers(programs, first, eager)
            answers.append(resume_answer(first, programs))
        return Verdict(command=tuple(settings.command), answers=tuple(answers), seconds=time.monotonic() - began)

    # --- Runs ---------------------------------------------------------------------------------------------------------

    def _first_runs(self) -> tuple[Run, Run | None]:
        if self._settings.full_size:
            self._progress("tracing the script's steps")
            return self._runs(Way.TRACE)[0], None
        self._progress("running the script on a cluster of one wafer, and by plain PyTorch beside it")
        cluster, eager = self._runs(Way.CLUSTER, Way.TORCH)
        return cluster, eager

    def _runs(self, *ways: Way, observed: Sequence[tuple[int, int]] = (), loss_scale: float | None = None) -> list[Run]:
        """Runs the script in these ways, at the same time."""
        settings = self._settings
        suffix = "-observed" if observed else "-scaled" if loss_scale else ""
        with ExitStack() as open_processes, ThreadPoolExecutor(len(ways)) as pool:
            processes = [
                ScriptProcess(
                    settings.command,
                    RunSettings(
                        way=way,
                        folder=str(settings.folder / f"{way}{suffix}"),
                        steps=settings.steps,
                        executions=EXECUTIONS,
                        observed=tuple(observed),
                        loss_scale=loss_scale,
                        parent=os.getpid(),
                    ),
                )
                for way in ways
            ]
            for process in processes:
                open_processes.callback(process.close)
            with _closed_on_error(processes):
                waits = [pool.submit(process.wait, settings.timeout_seconds) for process in processes]
                return [wait.result() for wait in waits]

    # --- Does it compute what PyTorch computes? -----------------------------------------------------------------------

    def _values_answers(self, cluster: Run, eager: Run | None, programs: Sequence[Program]) -> Iterator[Answer]:
        if eager is None:
            summary = "Not run: with --full-size steps are only traced and compiled."
            yield Answer(question=Question.VALUES, state=State.OPEN, summary=summary)
            return
        ours, theirs = step_values(cluster.folder, cluster.events), step_values(eager.folder, eager.events)
        half = next((program for program in programs if program.half), None)
        # PyTorch on the CPU has no loss scale, and skips no step.
        compared, note = steps_before_skip(ours), ""
        if len(compared) < len(ours) and not any(step for _, step in compared):
            self._progress("running the script on the cluster with a loss scale of 1, as its own skips the first step")
            (run,) = self._runs(Way.CLUSTER, loss_scale=1.0)
            compared, note = steps_before_skip(step_values(run.folder, run.events)), f" {_RESCALED}"
        answer = self._values_answer(cluster, eager, compared, theirs, programs, is_half=half is not None)
        yield replace(answer, summary=answer.summary + note)
        if half is not None:
            training = next((program for program in programs if program.half and program.trains), half)
            beyond = [each for each in _of(eager, Found) if each.question is Question.HALF]
            answer = half_answer(training, ours, theirs, beyond)
            if answer.state is State.FOUND:
                step = first_not_finite(training, ours, theirs) or 1
                answer = _with_errors(answer, training, self._half_errors(training, step))
            yield answer

    def _values_answer(
        self,
        cluster: Run,
        eager: Run,
        ours: Steps,
        theirs: Steps,
        programs: Sequence[Program],
        *,
        is_half: bool,
    ) -> Answer:
        question = Question.VALUES
        if not ours.keys() & theirs.keys():
            return Answer(question=question, state=State.OPEN, summary=f"Not compared: {_why_open(cluster, eager)}")
        close = CLOSE_IN_HALF if is_half else CLOSE
        judge: Steps = {}
        if needs_judge(ours, theirs, close):
            way = Way.HALF if is_half else Way.DOUBLE
            self._progress(f"running the script in {_JUDGES[way]}, to tell rounding from what is wrong")
            (run,) = self._runs(way)
            judge = step_values(run.folder, run.events)
            if name := not_repeated(theirs, judge):
                summary = f"Not compared: two runs of the script by PyTorch differ in {name}. {_SEEDS}"
                return Answer(question=question, state=State.OPEN, summary=summary)
        if is_half:
            # PyTorch in half precision is compared, and float32 is the judge.
            theirs, judge = (judge, theirs) if judge else (theirs, judge)
        comparison = compare(ours, theirs, judge, close)
        notes = [_finding(each) for each in _of(eager, Found) if each.question is question]
        # In half precision an overflow is the next answer, and other tensors of its step follow from it.
        is_overflow = is_half and bool(comparison.not_finite or comparison.overflowed)
        if (comparison.differences or comparison.not_finite) and not is_overflow:
            if notes:
                return Answer(
                    question=question,
                    state=State.OPEN,
                    summary=f"Not compared beyond chance: {notes[0].message}.",
                )
            first_line = self._first_in_half(programs, comparison) if is_half else self._first_line(cluster, comparison)
            return _different(comparison, judge, first_line)
        return _agreeing(comparison, close, is_half=is_half)

    def _first_line(self, cluster: Run, comparison: Comparison) -> Finding | None:
        """Returns the first operation that differs, found by a run that records the operations of the step."""
        first = comparison.first
        assert first is not None
        program = next((each for each in _of(cluster, Program) if each.execution == first.execution), None)
        if program is None:
            return None
        if not first.step:
            return None  # the states differ that the execution begins with
        self._progress("looking for the first operation that differs")
        steps = [(first.execution, step) for step in (first.step - 1, first.step) if step > 0]
        (run,) = self._runs(Way.TORCH, observed=steps)
        observed = {each.step: each for each in _of(run, StepObserved)}
        if first.step not in observed:
            return None
        text = Path(program.path).read_text(encoding="utf-8")
        found = first_difference(text, run.folder, observed[first.step], observed.get(first.step - 1))
        return None if found is None else difference_finding(found, cluster)

    def _first_in_half(self, programs: Sequence[Program], comparison: Comparison) -> Finding | None:
        """Returns the first operation of a step in half precision whose result is far from that in float32."""
        first = comparison.first
        assert first is not None
        program = next((each for each in programs if each.execution == first.execution), None)
        if program is None or not first.step:
            return None
        errors = self._half_errors(program, first.step)
        return None if errors is None else _first_finding(errors, program)

    def _half_errors(self, program: Program, step: int) -> HalfErrors | None:
        """Returns the errors of a step in half precision, by a run that keeps what the step begins with."""
        precision = Precision.of_options(program.half, program.optimization_level, program.half_gradients)
        if precision is None:
            return None
        self._progress("looking for the first value that is far from float32")
        (run,) = self._runs(Way.TORCH, observed=[(program.execution, step)])
        observed = next(iter(_of(run, StepObserved)), None)
        if observed is None:
            return None
        return half_errors(Path(program.path).read_text(encoding="utf-8"), precision, run.folder, observed)

    # --- For several wafers, in memory, and in time -------------------------------------------------------------------

    def _compile_answers(self, programs: Sequence[Program], first: Run, eager: Run | None) -> Iterator[Answer]:
        settings = self._settings
        distinct = list({Path(program.path).read_bytes(): program for program in reversed(programs)}.values())[::-1]
        asked = {program.num_csx for program in programs}
        counts = sorted({1, *settings.wafers, *asked})
        compiled: list[tuple[Program, list[Compiled]]] = []
        for program in distinct:
            each = []
            for count in counts:
                name = program.function.partition(" (")[0]
                self._progress(f"compiling {name} for {_counted(count, 'wafer')} of {settings.machine.name}")
                each.append(compile_for(program, count, settings.machine))
            compiled.append((program, each))
        yield _wafers_answer(compiled)
        yield _memory_answer(compiled, settings.machine)
        training = next((each for each in compiled if each[0].trains), compiled[0])
        yield _time_answer(training, settings.machine)
        yield _input_answer(training, first, eager, settings.machine)


@contextmanager
def _closed_on_error(processes: Sequence[ScriptProcess]) -> Iterator[None]:
    """Context that ends the processes when it ends with an error, so that threads that wait for them end too."""
    try:
        yield
    except BaseException:
        for process in processes:
            process.close()
        raise


# --- Does it trace? Is it one program? --------------------------------------------------------------------------------


def trace_answers(run: Run, eager: Run | None, programs: Sequence[Program]) -> Iterator[Answer]:
    """Yields the answers to whether the script traces, and is one program.

    Args:
        run: the run on the cluster, or the one that only traces.
        eager: the run by plain PyTorch; None: there is none.
        programs: the steps that were traced.
    """
    findings = sorted((_finding(each) for each in _of(run, Found) if each.question is Question.TRACE), key=_by_line)
    failure = run.failure
    is_traced = bool(programs)
    if failure is not None and failure.is_ours and not _is_of_input(failure) and not findings:
        named = _LINE.search(failure.message)
        findings.append(Finding(line=named[1] if named else failure.line, message=failure.message))
    ends_here_alone = run.has_failed and eager is not None and not eager.has_failed
    if is_traced and ends_here_alone and not findings:
        line = "" if failure is None else failure.line
        message = f"{_why_open(run)}. By plain PyTorch it goes on"
        findings.append(Finding(line=line, message=message))
    if not is_traced and not findings:
        yield Answer(question=Question.TRACE, state=State.OPEN, summary=_why_open(run))
        return
    if findings:
        summary = f"No: {_counted(len(findings), 'line')} of the script cannot be traced or run."
    elif (killed := next((each for each in (run, eager) if each is not None and each.killed_by), None)) is not None:
        beside = "by plain PyTorch, " if killed is eager else ""
        findings.append(Finding(line="", message=f"{beside}{_why_open(killed)}"))
        summary = f"Not to the end: {_traced(programs)} Then the script was killed."
    else:
        ended = f" Then {_why_ended(run)}." if run.has_failed and not _is_of_input(failure) else ""
        summary = f"Yes: {_traced(programs)}{ended}"
    state = State.FOUND if findings else State.GOOD
    yield Answer(question=Question.TRACE, state=state, summary=summary, findings=tuple(findings))
    if not is_traced:
        return
    found = tuple(_finding(each) for each in _of(run, Found) if each.question is Question.PROGRAM)
    yield Answer(
        question=Question.PROGRAM,
        state=State.FOUND if found else State.GOOD,
        summary="No: the cluster would train otherwise than the script says."
        if found
        else f"Yes{_part(run)}: later calls of the step are the program of the first.",
        findings=found,
    )


# --- Parts of answers -------------------------------------------------------------------------------------------------


def _of(run: Run, kind: type[_E]) -> list[_E]:
    return [event for event in run.events if isinstance(event, kind)]


def _traced(programs: Sequence[Program]) -> str:
    """Names the functions that were traced, and the time that it takes."""
    seconds = max(program.trace_seconds for program in programs)
    functions = list(dict.fromkeys(program.function.partition(" (")[0] for program in programs))
    return f"{', '.join(functions)}; the trace takes {seconds_text(seconds)}."


def _part(run: Run) -> str:
    """Names the steps that have run of the longest execution that the check has cut; empty: it has cut none."""
    cut = [each for each in _of(run, ExecutionBegun) if each.steps < each.asked_steps]
    longest = max(cut, key=lambda each: each.asked_steps, default=None)
    return "" if longest is None else f", in the first {longest.steps:,} of {longest.asked_steps:,} steps"


def _finding(found: Found) -> Finding:
    return Finding(line=found.line, message=found.message)


def _by_line(finding: Finding) -> tuple[str, int]:
    file, _, line = finding.line.rpartition(":")
    return file, int(line) if line.isdecimal() else 0


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _why_open(*runs: Run) -> str:
    """Says why the script did not come to the end of a step. The first run is the one on the cluster."""
    for run in runs:
        if run.has_failed:
            if run.failure or not run.log_tail:
                return _why_ended(run)
            return f"{_why_ended(run)}; it wrote last:\n{run.log_tail}"
    if _of(runs[0], ExecutionBegun):
        return (
            "the script leaves its loop in the first step, so that there is no whole step. Let the loop go on to its "
            "second step, or give the DataExecutor num_steps=1"
        )
    return "the script ran no step on CSX: it iterates no DataExecutor, or its backend is the CPU"


def _first_finding(errors: HalfErrors, program: Program) -> Finding | None:
    if errors.first is None:
        return None
    message = (
        f"the first value that is far from float32 is that of {_operation_text(errors.first)}: in {program.half} it "
        f"{_error_text(errors.first_error)}"
    )
    return Finding(line=errors.first.place, message=message)


def _operation_text(source: Source) -> str:
    """An operation, with its pass and its layer."""
    layer = f" of {source.module}" if source.module else ""
    return f"{'the backward pass of ' if source.backward else ''}{source.op}{layer}"


def difference_finding(difference: FirstDifference, cluster: Run) -> Finding:
    """Returns what the first operation that differs says.

    Args:
        difference: The operation.
        cluster: The run on the cluster.
    """
    if difference.source is not None:
        message = f"the first value that differs is that of {_operation_text(difference.source)}"
        return Finding(line=difference.source.place, message=message)
    if any(found.question is Question.PROGRAM for found in _of(cluster, Found)):
        message = (
            "the difference follows from the answer above: the cluster runs the program of the first call, and PyTorch "
            "what the script says. Change what is named there, and check again"
        )
    else:
        message = (
            "the traced program computes what PyTorch does, and the cluster something else: this is a defect of "
            "Waferbox, please report it with the folder of --keep"
        )
    return Finding(line="", message=message)


def _error_text(error: float) -> str:
    return "is not finite" if math.isinf(error) else f"is off by {error:.0%} of its largest element"


def _with_errors(answer: Answer, program: Program, errors: HalfErrors | None) -> Answer:
    """The answer with the first value that is far from float32, and the largest error of each layer."""
    if errors is None:
        return answer
    first = _first_finding(errors, program)
    rows = [
        (name, *("not finite" if math.isinf(error) else f"{error:.1%}" for error in both))
        for name, both in errors.layers.items()
    ]
    table = (("layer", "forward", "backward"), *rows[:_MOST_LAYERS])
    return replace(answer, findings=answer.findings if first is None else (*answer.findings, first), table=table)


def _why_ended(run: Run) -> str:
    """Says how the script ended, other than with exit status 0."""
    if (failure := run.failure) is not None:
        return f"the script ended at {failure.line} with {failure.type}: {failure.message}"
    if run.killed_by:
        memory = ", perhaps for want of memory" if run.killed_by == signal.SIGKILL.name else ""
        return f"the script was killed by {run.killed_by}{memory}"
    return f"the script ended with status {run.status}"


def _agreeing(comparison: Comparison, close: float, *, is_half: bool) -> Answer:
    """The answer for steps that agree, up to one whose values overflow in the precision of the script."""
    end = comparison.first
    overflow = ""
    if end is not None:
        overflowed = comparison.not_finite or comparison.overflowed
        judge = "float32" if is_half else "float64"
        where = f"After step {end.step}{_of_execution(end)} {_names(overflowed)} are not finite"
        if is_half:
            overflow = f"{where} in half precision, and in {judge} they are; the next answer says more."
        else:
            overflow = f"{where} by PyTorch itself, and in {judge} they are."
    if not comparison.steps:
        summary = f"Not compared: {overflow[:1].lower()}{overflow[1:]}" if overflow else f"Not compared: {_SKIPPED}"
        return Answer(question=Question.VALUES, state=State.OPEN, summary=summary)
    rounding = f"the largest relative difference is {comparison.largest:.1g}"
    if comparison.largest > close:
        judged = "half precision is as far from float32" if is_half else "float32 is as far from float64"
        rounding += f", which is rounding: PyTorch in {judged}"
    summary = f"Yes: {_counted(comparison.steps, 'step')}, {_counted(comparison.tensors, 'tensor')} each; {rounding}."
    return Answer(question=Question.VALUES, state=State.GOOD, summary=f"{summary} {overflow}".rstrip())


def _names(differences: Sequence[Difference]) -> str:
    more = len(differences) - _MOST_NAMED
    return ", ".join(each.name for each in differences[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _of_execution(difference: Difference) -> str:
    return f" of execution {difference.execution}" if difference.execution > 1 else ""


def _different(comparison: Comparison, judge: Steps, first_line: Finding | None) -> Answer:
    first = comparison.first
    assert first is not None
    execution = _of_execution(first)
    findings = [] if first_line is None else [first_line]
    if comparison.not_finite:
        message = f"after step {first.step}{execution} {_names(comparison.not_finite)} have values that are not finite"
        findings.append(Finding(line="", message=message))
    for each in comparison.differences[:_MOST_NAMED]:
        rounding = "" if each.rounding is None else f"; rounding of float32 explains {each.rounding:.1g}"
        findings.append(
            Finding(line="", message=f"{each.name} differs by {each.error:.1g} of its largest value{rounding}")
        )
    more = len(comparison.differences) - _MOST_NAMED
    is_judged = (first.execution, first.step) in judge
    judged = "" if is_judged else " There is no run in float64 to judge by: the script does not run in it."
    count = len(comparison.differences) or len(comparison.not_finite)
    since = f"from step {first.step} on" if first.step else "before the first step"
    summary = (
        f"No: {_counted(count, 'tensor')} differ from plain PyTorch, "
        f"{since}{execution}{f' ({more} more than are shown)' if more > 0 else ''}.{judged}"
    )
    return Answer(question=Question.VALUES, state=State.FOUND, summary=summary, findings=tuple(findings))


# The line that a message names, as in "At train.py:53 ..." or "train.py:53: ...".
_LINE: Final = re.compile(r"(?:\b[Aa]t |\bline |^)([^\s:,]+\.py:\d+)")


def _wafers_answer(compiled: Sequence[tuple[Program, Sequence[Compiled]]]) -> Answer:
    findings = []
    for program, each in compiled:
        for one in each:
            if one.refusal and not one.is_memory:
                found = _LINE.search(one.refusal)
                name = program.function.partition(" (")[0]
                message = f"{name} for {_counted(one.wafers, 'wafer')}: {one.refusal}"
                line = program.input_line if one.is_batch else found[1] if found else ""
                findings.append(Finding(line=line, message=message))
    counts = ", ".join(str(one.wafers) for one in compiled[0][1])
    if findings:
        verb = "is" if len(findings) == 1 else "are"
        summary = f"No: {_counted(len(findings), 'compile')} of those for {counts} wafers {verb} refused."
        return Answer(question=Question.WAFERS, state=State.FOUND, summary=summary, findings=tuple(findings))
    summary = f"Yes: compiled for {counts} wafer{'' if counts == '1' else 's'}."
    table = _gathers(compiled)
    if len(table) > 1:
        summary += " Rows of the whole batch are gathered where samples are mixed, which costs what the table says."
    return Answer(question=Question.WAFERS, state=State.GOOD, summary=summary, table=table)


def _gathers(compiled: Sequence[tuple[Program, Sequence[Compiled]]]) -> tuple[tuple[str, ...], ...]:
    table = [("wafers", "bytes a step", "of the step", "line")]
    for _, each in compiled:
        for one in each:
            if one.report is not None:
                share = f"{one.report.gathering.time_share:.0%}"
                table += [
                    (str(one.wafers), bytes_text(line.nbytes), share, f"{line.source}: {line.reason}")
                    for line in one.report.gathering.lines
                ]
    return tuple(table)


def _memory_answer(compiled: Sequence[tuple[Program, Sequence[Compiled]]], machine: Machine) -> Answer:
    table = [("step", "wafers", "wafer needs", "micro-batches", "MemoryX", "rows")]
    findings = []
    for program, each in compiled:
        name = program.function.partition(" (")[0]
        for one in each:
            if one.is_memory:
                line, largest = largest_value(program)
                message = (
                    f"{name} for {_counted(one.wafers, 'wafer')}: {one.refusal}. The largest value of the step has "
                    f"{bytes_text(largest)}"
                )
                findings.append(Finding(line=line, message=message))
            if one.report is not None:
                keeps = sum(shard.weight_bytes + shard.other_bytes for shard in one.report.shards)
                table.append(
                    (
                        name,
                        str(one.wafers),
                        bytes_text(one.report.memory.needed_bytes),
                        str(one.report.micro_batches),
                        bytes_text(keeps),
                        f"{one.report.batch_rows:,}",
                    )
                )
    capacity = f"{machine.wafer_memory_bytes / 1e9:.0f} GB of a {machine.name} wafer"
    if findings:
        summary = f"No, not in the {capacity}."
        return Answer(
            question=Question.MEMORY, state=State.FOUND, summary=summary, findings=tuple(findings), table=tuple(table)
        )
    return Answer(question=Question.MEMORY, state=State.GOOD, summary=f"Yes, in the {capacity}.", table=tuple(table))


def _time_answer(training: tuple[Program, Sequence[Compiled]], machine: Machine) -> Answer:
    program, each = training
    done = [one for one in each if one.plan is not None]
    if not done:
        return Answer(question=Question.TIME, state=State.OPEN, summary="Not predicted: there is no plan.")
    table = [("wafers", "rows", "step", "rows/s", "limited by")]
    # Beyond the wafers of the compiles the batch grows: each wafer has as many rows as with the most of them.
    last = done[-1]
    assert last.plan is not None
    predictions = [one.prediction for one in done if one.prediction is not None]
    predictions += predict_scales(last.plan, [count for count in _SCALES if count > last.wafers], machine.rates)
    for prediction in predictions:
        table.append(
            (
                f"{prediction.wafers:,}",
                f"{prediction.rows:,}",
                seconds_text(prediction.step_seconds),
                count_text(prediction.rows_per_second),
                prediction.limit,
            )
        )
    first = predictions[0]
    name = program.function.partition(" (")[0]
    summary = (
        f"{name}: {seconds_text(first.step_seconds)} on {_counted(first.wafers, 'wafer')} of {machine.name} "
        f"({machine.source})."
    )
    return Answer(question=Question.TIME, state=State.GOOD, summary=summary, table=tuple(table))


def _input_answer(
    training: tuple[Program, Sequence[Compiled]], first: Run, eager: Run | None, machine: Machine
) -> Answer:
    question = Question.INPUT
    program, each = training
    runs = [first] if eager is None else [first, eager]
    findings = [_finding(one) for run in runs for one in _of(run, Found) if one.question is question]
    if first.failure is not None and _is_of_input(first.failure) and not findings:
        findings.append(Finding(line=program.input_line, message=first.failure.message))
    measured = [one for run in runs for one in _of(run, InputMeasured) if one.execution == program.execution]
    if not measured or not measured[0].batches:
        why = "there was no second batch" if measured else "the loop ended before its second batch"
        summary = f"Not measured: {why}."
        state = State.FOUND if findings else State.OPEN
        return Answer(question=question, state=state, summary=summary, findings=tuple(findings))
    one = measured[0]
    seconds = max(one.seconds, 1e-9) / one.batches
    summary = f"One worker makes {count_text(one.rows / seconds)} rows/s"
    prediction = next((done.prediction for done in each if done.prediction is not None), None)
    if prediction is not None:
        workers = max(1, math.ceil(seconds / prediction.step_seconds))
        needed = count_text(prediction.rows_per_second / prediction.wafers)
        summary += f"; a wafer of {machine.name} takes {needed}: {_counted(workers, 'worker')} for each"
        if workers > _MOST_WORKERS and seconds > _MOST_WORKERS * _UNNOTICED_SECONDS:
            message = (
                f"a batch takes {seconds_text(seconds)}, and a step {seconds_text(prediction.step_seconds)}: "
                f"{_MOST_WORKERS} workers for each wafer would not keep up. Prepare the samples before, or in several "
                "processes of the loader (num_workers)"
            )
            findings.append(Finding(line=one.line or program.input_line, message=message))
    resumed = "" if one.is_restartable else " The loader cannot go back to a position, so a recovery skips its batches."
    state = State.FOUND if findings else State.GOOD
    return Answer(question=question, state=state, summary=f"{summary}.{resumed}", findings=tuple(findings))


def _is_of_input(failure: RunFailed | None) -> bool:
    """Whether there is an error, of the input_fn or its loader."""
    return failure is not None and failure.type == "InputError"


def resume_answer(run: Run, programs: Sequence[Program]) -> Answer:
    """Returns the answer to whether the script will resume.

    Args:
        run: the run on the cluster, or the one that only traces.
        programs: the steps that were traced.
    """
    question = Question.RESUME
    # An error that ends the script leaves its loop too.
    found = [each for each in _of(run, Found) if each.question is question and not (each.is_error and run.failure)]
    if found:
        num_left = sum(each.is_error for each in found)  # loops
        what = [f"a checkpoint lacks {_counted(len(found) - num_left, 'state')}"] if num_left < len(found) else []
        what += ["a loop is left before its last step"] if num_left else []
        summary, findings = f"No: {', and '.join(what)}.", tuple(map(_finding, found))
        return Answer(question=question, state=State.FOUND, summary=summary, findings=findings)
    if run.way is Way.TRACE:
        return Answer(question=question, state=State.OPEN, summary="Not known: with --full-size nothing is saved.")
    if not _of(run, ExecutionEnded) or not any(program.trains for program in programs):
        return Answer(question=question, state=State.OPEN, summary="Not known: no training has ended.")
    summary = f"Yes{_part(run)}: every state that changes is in a state_dict."
    if not _of(run, CheckpointSaved):
        summary += " But the script saved no checkpoint: no cstorch.save ran in the check."
    return Answer(question=question, state=State.GOOD, summary=summary)
