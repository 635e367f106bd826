"""Checks whether later calls of the traced function would be the program of its first call, which every step runs.

A difference is a warning, or an error if the user sets WAFERBOX_STRICT.
"""

import hashlib
import logging
import re
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from cstorch._internal import state
from cstorch._internal.batch_objects import ChangedObjects
from cstorch._internal.check.run import checked_run
from cstorch._internal.random_state import random_state_kept
from cstorch._internal.session.execution.python_state import Change, PythonState
from cstorch._internal.tracing import Trace, random_counter, user_line
from cstorch._internal.tracing.provenance import line_of, warn_user
from cstorch._internal.tracing.recording.comparison import compare
from cstorch.errors import TraceError
from waferbox import settings
from waferbox.checked_run.record import Question

# --- Differences, and their messages ----------------------------------------------------------------------------------

_MOST_CHANGES = 4

WAY_OUT = (
    "The @cstorch.trace function is traced once, and every step does what its first call did: Python does not run "
    "again. What changes from step to step must be a tensor of the batch; a state that was made before the step and is "
    "updated in it in place (`self.register_buffer('count', torch.zeros(()))` in __init__, `self.count.add_(1)` in the "
    "step, and torch.where(self.count < n, a, b) for `if`); or a schedule of cstorch.optim "
    "(`cstorch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 0.01, 1000)`, with its step() in the traced function)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A difference between a later call of the step and the first.

    line: The line of the script, such as "train.py:53".
    what: The difference, as the rest of a sentence after "call 2 of the step".
    changes: Python values that have changed since the first call, and may be the cause.
    drawn: Generators of random numbers that were used since then.
    """

    line: str
    what: str
    changes: Sequence[Change] = field(default=())
    drawn: Sequence[str] = field(default=())

    def message(self, call: int) -> str:
        """Returns the finding as text; `call` is the number of the later call, from 1."""
        return f"at {self.line} call {call} of the step {self.what}. {self._cause()}. {WAY_OUT}"

    def _cause(self) -> str:
        certain = [change for change in self.changes if change.certain]
        shown = (certain or self.changes)[:_MOST_CHANGES]
        if shown:
            more = len(certain or self.changes) - len(shown)
            return "Since the first call " + ", ".join(map(str, shown)) + (f", and {more} more changed" if more else "")
        if self.drawn:
            return f"It draws random numbers from {' and '.join(self.drawn)}"
        return "No Python value was seen to change; time, a file, or an iterator may be the cause"


def findings(first: Trace, later: Trace | Exception, before: PythonState, now: PythonState) -> list[Finding]:
    """Returns the differences between a later call of the step and the first.

    Args:
        first: The trace of the first call.
        later: The trace of the later call, or the error that it ended with.
        before: The Python state before the first call.
        now: The Python state before the later call.
    """
    changes, drawn = before.changes(now), before.drawn(now)
    if isinstance(later, Exception):
        what = f"would end with {type(later).__name__}: {later}"
        return [Finding(line=line_of(later), what=what.rstrip("."), changes=changes, drawn=drawn)]
    difference = compare(first, later)
    if difference is None:
        return []
    source = difference.source
    line = source.place or "an unknown line"
    return [Finding(line=line, what=difference.what, changes=changes, drawn=drawn)]


def report(message: str, line: str) -> None:
    """Warns; raises a TraceError instead if WAFERBOX_STRICT is 1. A checked run records it at the line."""
    if (run := checked_run()) is not None:
        run.found(Question.PROGRAM, message, line)
    elif settings.STRICT.get():
        raise TraceError(message)
    else:
        warn_user(message)


# --- Settings that the script's loop changes --------------------------------------------------------------------------

_PLAIN = (bool, int, float, str, type(None))
_MOST_VARIANTS = 4


class LoopValues:
    """Settings that the loop may change and a traced step does not see: of parameter groups, requires_grad, training.

    A comparison takes about a microsecond for each setting.

    Args:
        optimizers: The optimizers of the traced step.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        known: list[torch.optim.Optimizer] = [*state.registered("optimizer")]
        known += [optimizer for optimizer in optimizers if not any(optimizer is one for one in known)]
        self._groups = [
            (group, key, f"{type(optimizer).__name__}.param_groups[{number}][{key!r}]")
            for optimizer in known
            for number, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if _is_plain(value)
        ]
        models = state.registered("model")
        modules = {module: path for model in models for path, module in model.named_modules()}
        parameters = {parameter: name for model in models for name, parameter in model.named_parameters()}
        self._modules, self._paths = list(modules), list(modules.values())
        self._parameters, self._names = list(parameters), list(parameters.values())
        self._variants = [self._now()]

    def _now(self) -> tuple[list[Any], list[bool], list[bool]]:
        return (
            [group.get(key) for group, key, _ in self._groups],
            [module.training for module in self._modules],
            [parameter.requires_grad for parameter in self._parameters],
        )

    def changes(self) -> list[Change]:
        """Returns the differences from the traced step; nothing if the same settings were compared before."""
        if not self._variants:
            return []
        now = self._now()
        for variant in self._variants:
            if variant[1] == now[1] and variant[2] == now[2] and all(map(_same, variant[0], now[0])):
                return []
        first = self._variants[0]
        self._variants = [] if len(self._variants) == _MOST_VARIANTS else [*self._variants, now]
        names = (
            [name for _, _, name in self._groups],
            [f"model.{path}.training".replace("..", ".") for path in self._paths],
            [f"model.{name}.requires_grad" for name in self._names],
        )
        return [
            Change(name=name, before=repr(before), now=repr(value), certain=True)
            for kind in range(3)
            for name, before, value in zip(names[kind], first[kind], now[kind], strict=True)
            if not _same(before, value)
        ]

    def stop(self) -> None:
        """Ends the comparisons, after a change was reported."""
        self._variants = []


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) in (tuple, list) and all(type(item) in _PLAIN for item in value))


def _same(first: Any, now: Any) -> bool:
    """Whether two settings are equal, or the new one is a tensor, which a schedule of cstorch has written."""
    return first is now or not _is_plain(now) or bool(first == now)


# --- The check --------------------------------------------------------------------------------------------------------

logger = logging.getLogger("cstorch.execution")

# The check may take the time of ten steps, or five seconds: steps of small models are shorter than any trace.
MOST_STEPS = 10
LEAST_SECONDS = 5.0
_MOST_OF_RUN = 0.02  # of the time of all steps; more only up to the limits above and below
_LEAST_LAST_SECONDS = 1.0  # for the last call, if only values have changed whose change made no difference before
CHECKED_SECONDS = 300.0  # in a checked run, for which nobody waits in vain

_CALLS_IN_ORDER = 3  # from the second on
_CALLS_WITH_DRAWS = 20  # the same, if calls draw random numbers: a branch may be rare
_FAR_CALLS = (5, 6, 8, 10, 12, 16, 20, 32, 50, 64, 100, 128, 200, 256, 500, 512, 1000, 1024, 2000, 10_000)

TraceAgain = Callable[[], Trace]
# By the code of a function and the digest of its program: names of Python values whose change made no difference to it.
CheckedPrograms = dict[tuple[Hashable, bytes], set[str]]


class ProgramCheck:
    """A check that traces the step once more, as its second call, and reports the differences.

    It restores the Python state and the generators of random numbers that the call changes. If the call has changed
    Python values, the third and fourth call are traced as well, and then some later ones, for which growing integers
    are set ahead: so `if self.count < 100` is found. If it has drawn random numbers, the next twenty are. The time of
    all is that of the processor, so that a busy machine finds the same.

    A session does this once for each function and program, so that it does not slow down many short executions. Later,
    after twice as many calls each time and in the last one, the step is traced again if a Python value that it can
    reach has changed: what the script's loop has set is found at the latest then, unless it was set back. A value whose
    change made no difference, as a counter's, is a reason in the last call alone.

    Args:
        function: The traced function.
        arguments: The arguments of its first call, by name.
        num_steps: The number of steps of the execution.
        checked: What executions of the session have checked; this one is added.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], num_steps: int, checked: CheckedPrograms
    ) -> None:
        self._function = function
        self._checked = checked
        self._arguments = arguments
        self._num_steps = num_steps
        self._before: PythonState | None = PythonState(function, arguments)
        self._compared: PythonState | None = None  # when the step was last traced; None: it is not traced again
        self._next_look = 0  # the call in which Python values are compared with those
        self._harmless: set[str] = set()  # names of values whose change made no difference
        self._is_first = True  # whether no execution of the session has checked the program before
        self._spent = 0.0  # seconds of a processor, since the first check
        self._trace: Trace | None = None
        self._seconds = 0.0
        self._loop_values: LoopValues | None = None

    def traced(self, trace: Trace, seconds: float) -> None:
        """Takes the trace of the first call, and the seconds of a processor that it took."""
        self._trace, self._seconds = trace, seconds
        self._loop_values = LoopValues(trace.optimizers)

    def check(self, call: int, text: str, step_seconds: float | None, trace_again: TraceAgain) -> None:
        """Checks a later call before it returns, and reports the differences.

        Args:
            call: The number of the call, from 1.
            text: The program that runs.
            step_seconds: The time of a step; None if it is not known yet.
            trace_again: Traces the function with the arguments of its first call; an error of it is a finding.

        Raises:
            TraceError: There is a difference, and WAFERBOX_STRICT is 1.
        """
        assert self._loop_values is not None
        changes = self._loop_values.changes()
        if self._before is None and not changes:
            self._look_again(call, step_seconds, trace_again)
            return
        is_cheap = self._seconds <= _budget(step_seconds)
        if not is_cheap and step_seconds is None and not changes:
            return  # the time of a step is known when the first outputs have arrived
        key = getattr(self._function, "__code__", id(self._function)), hashlib.sha256(text.encode()).digest()
        found: list[tuple[int, Finding]] = []
        before, self._before = self._before, None
        if before is not None:
            self._compared, self._next_look = before, 2 * call
            self._is_first = key not in self._checked
            self._harmless = self._checked.get(key, self._harmless)
        if not is_cheap:
            if before is not None:
                logger.info(
                    "The traced function is not called again to see whether it does the same: tracing it takes %.1f s, "
                    "which is more than %d steps",
                    self._seconds,
                    MOST_STEPS,
                )
        elif changes or key not in self._checked:
            self._checked[key] = self._harmless
            self._compared = PythonState(self._function, self._arguments)
            found = self._look_ahead(before, call, step_seconds or 0.0, trace_again)
            if not found:
                return
        self._report(found, changes, call)

    def _look_again(self, call: int, step_seconds: float | None, trace_again: TraceAgain) -> None:
        """Traces the step once more if a Python value has changed since it was last traced; reports a difference."""
        if self._compared is None or call not in (self._next_look, self._num_steps):
            return
        self._next_look = 2 * call
        began = time.thread_time()
        now = PythonState(self._function, self._arguments)
        changed = {_kind(change.name) for change in self._compared.changes(now) if change.certain}
        found: list[Finding] = []
        if changed and self._spent + self._seconds <= self._seconds_for(changed, call, step_seconds):
            assert self._trace is not None
            with self._restored():
                found = findings(self._trace, _traced(trace_again), self._compared, now)
            self._compared = now
            self._harmless |= changed
        self._spent += time.thread_time() - began
        self._report([(call, finding) for finding in found], [], call)

    def _seconds_for(self, changed: Collection[str], call: int, step_seconds: float | None) -> float:
        """Returns the seconds that all such traces together may take, if these values have changed."""
        of_run = _MOST_OF_RUN * call * (step_seconds or 0.0)
        if not self._harmless.issuperset(changed):
            return max(of_run, _budget(step_seconds))
        if call < self._num_steps:
            return 0.0
        return max(of_run, _LEAST_LAST_SECONDS) if self._is_first else of_run

    def check_objects(self, objects: ChangedObjects, trace_with: TraceAgain, trace_again: TraceAgain) -> bool:
        """Reports that a later batch's strings or other objects make another program of the step; returns whether.

        Args:
            objects: Those that differ.
            trace_with: Traces the function with them.
            trace_again: Traces it with the arguments of its first call.

        Raises:
            TraceError: They do, and WAFERBOX_STRICT is 1.
        """
        if self._trace is None or self._seconds > _budget(None):
            return False
        with self._restored() as kept:
            found = findings(self._trace, _traced(trace_with), kept, kept)
            # What differs with the first batch's objects as well has another cause.
            if not found or findings(self._trace, _traced(trace_again), kept, kept):
                return False
        message = (
            f"at {found[0].line} the step of batch {objects.number} {found[0].what}, as the batch has other objects "
            f"than the first, which are no tensors: {objects}. The @cstorch.trace function is traced once, with those "
            "of the first batch. What changes the step must be a tensor of the batch, with one row for each sample, "
            "and torch.where for `if`"
        )
        report(message, found[0].line)
        return True

    def _report(self, found: list[tuple[int, Finding]], changes: list[Change], call: int) -> None:
        if found:
            self._compared = None
        if changes:
            assert self._loop_values is not None
            self._loop_values.stop()
        if found:
            number, finding = found[0]
            named = [change.name.rpartition(".")[2] for change in finding.changes]
            more = [change for change in changes if change.name.rpartition(".")[2] not in named]
            report(
                Finding(
                    line=finding.line, what=finding.what, changes=[*more, *finding.changes], drawn=finding.drawn
                ).message(number),
                finding.line,
            )
        elif changes:
            first = changes[0]
            more_changed = f", and {len(changes) - 1} more changed" if len(changes) > 1 else ""
            report(loop_change(f"{first}{more_changed}", call), user_line())

    def _look_ahead(
        self, before: PythonState | None, call: int, step_seconds: float, trace_again: TraceAgain
    ) -> list[tuple[int, Finding]]:
        """Traces later calls until one differs, or none can be expected to; returns the first finding and its call."""
        assert self._trace is not None
        with self._restored() as kept:
            start = before or kept
            end = time.thread_time() + _budget(step_seconds)
            now, number = kept, call
            while True:
                found = findings(self._trace, _traced(trace_again), start, now)
                if found:
                    return [(number, found[0])]
                last, now = now, PythonState(self._function, self._arguments, keeps=True)
                drawn = last.drawn(now)
                if not any(change.certain for change in last.changes(now)) and not drawn:
                    return []
                if number >= min(self._num_steps, call + (_CALLS_WITH_DRAWS if drawn else _CALLS_IN_ORDER) - 1):
                    break
                number += 1
                if _is_over(end, number):
                    return []
            steps = last.growth(now)
            ahead = [far for far in (*_FAR_CALLS, self._num_steps) if number < far <= self._num_steps]
            for far in sorted(set(ahead)) if steps else ():
                if _is_over(end, far):
                    return []
                now.set_ahead(steps, far - number - 1)
                later = _traced(trace_again)
                # An error is no finding here: the script itself may never reach these numbers.
                if isinstance(later, Trace) and (found := findings(self._trace, later, start, now)):
                    return [(far, found[0])]
        return []

    @contextmanager
    def _restored(self) -> Iterator[PythonState]:
        """Context in which the step is called once more; it restores all that the call changes. Yields what is kept."""
        kept = PythonState(self._function, self._arguments, keeps=True)
        with random_state_kept(), random_counter.held(), _requirements_kept():
            try:
                yield kept
            finally:
                kept.restore()


def _kind(name: str) -> str:
    """Returns the name of a Python value without its place in a container: a list that grows has one."""
    return re.sub(r"\[[^\]]*\]", "[]", name)


def _budget(step_seconds: float | None) -> float:
    """Returns the seconds that a check may take."""
    least = LEAST_SECONDS if checked_run() is None else CHECKED_SECONDS
    return max(MOST_STEPS * (step_seconds or 0.0), least)


def _is_over(end: float, call: int) -> bool:
    """Returns whether the time of a check is over before this call."""
    if time.thread_time() < end:
        return False
    logger.info(
        "Whether the traced function does the same in call %d and later is not checked: it takes too long", call
    )
    return True


def loop_change(change: str, call: int) -> str:
    """Returns the warning of a setting that the loop has changed."""
    return (
        f"at {user_line()}, before call {call} of the @cstorch.trace function, the script has changed a setting: "
        f"{change}. The function was traced in the first call, and every step runs with the settings of that time. A "
        "learning rate that changes is a schedule of cstorch.optim "
        "(`cstorch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 0.01, 1000)`, with its step() in the traced function); "
        "other modes, and other layers that learn, take another DataExecutor"
    )


def _traced(trace_again: TraceAgain) -> Trace | Exception:
    try:
        return trace_again()
    except Exception as error:  # noqa: BLE001 - whatever the script raises is what its second call would
        return error


@contextmanager
def _requirements_kept() -> Iterator[None]:
    """Restores `requires_grad` of the parameters."""
    models = state.registered("model")
    before = [(parameter, parameter.requires_grad) for model in models for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, requires_grad in before:
            parameter.requires_grad_(requires_grad)
