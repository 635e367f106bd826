"""Whether later calls of the traced function would be the program of its first call, which is what runs."""

import hashlib
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cstorch import state
from cstorch.random_state import random_state_kept
from cstorch.session.execution.findings import Finding, findings, report
from cstorch.session.execution.loop_values import LoopValues
from cstorch.session.execution.python_state import Change, PythonState
from cstorch.tracing import Trace, random_counter, user_line

logger = logging.getLogger("cstorch.execution")

MOST_STEPS = 10
LEAST_SECONDS = 5.0
"""The check may take the time of ten steps, or these seconds: steps of small models are shorter than any trace."""

_CALLS_IN_ORDER = 4
_FAR_CALLS = (5, 6, 8, 10, 12, 16, 20, 32, 50, 64, 100, 128, 200, 256, 500, 512, 1000, 1024, 2000, 10_000)

TraceAgain = Callable[[], Trace]
CheckedProgram = tuple[Hashable, bytes]  # the code of a function, and the digest of its program


class ProgramCheck:
    """Traces the step again as its second call, drops the trace, and says what differs.

    Python state that the call changes, and generators of random numbers, are put back as they were. Where the call has
    changed Python values or drawn random numbers, the third and fourth call are traced as well, and then later ones,
    with integers that grow set ahead to what they will be: `if self.count < 100` is of the same kind.

    The check is made once in a session for each function and program, so that loops of many short executions do not
    pay for it each time.

    Args:
        function: the traced function.
        arguments: of its first call, by name.
        num_steps: of the execution.
        checked: the functions and programs that earlier executions of the session have checked; takes this one's.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], num_steps: int, checked: set[CheckedProgram]
    ) -> None:
        self._function = function
        self._checked = checked
        self._arguments = arguments
        self._num_steps = num_steps
        self._before: PythonState | None = PythonState(function, arguments)
        self._trace: Trace | None = None
        self._seconds = 0.0
        self._loop_values: LoopValues | None = None

    def traced(self, trace: Trace, seconds: float) -> None:
        """The first call has been traced, which took so long."""
        self._trace, self._seconds = trace, seconds
        self._loop_values = LoopValues(trace.optimizers)

    def check(self, call: int, text: str, step_seconds: float | None, trace_again: TraceAgain) -> None:
        """To be called before a later call returns.

        Args:
            call: its number, from 1.
            text: the program that runs.
            step_seconds: what a step takes; None if that is not known yet.
            trace_again: traces the function with the arguments of its first call; what it raises is a finding.

        Raises:
            TraceError: of a finding, where WAFERBOX_STRICT is 1.
        """
        assert self._loop_values is not None
        changes = self._loop_values.changes()
        if self._before is None and not changes:
            return
        is_cheap = self._seconds <= max(MOST_STEPS * (step_seconds or 0.0), LEAST_SECONDS)
        if not is_cheap and step_seconds is None and not changes:
            return  # when the first outputs are there it is known
        key = getattr(self._function, "__code__", id(self._function)), hashlib.sha256(text.encode()).digest()
        found: list[tuple[int, Finding]] = []
        before, self._before = self._before, None
        if not is_cheap:
            if before is not None:
                logger.info(
                    "The traced function is not called again to see whether it does the same: tracing it takes %.1f s, "
                    "which is more than %d steps",
                    self._seconds,
                    MOST_STEPS,
                )
        elif changes or key not in self._checked:
            self._checked.add(key)
            found = self._look_ahead(before, call, step_seconds or 0.0, trace_again)
            if not found:
                return
        self._report(found, changes, call)

    def _report(self, found: list[tuple[int, Finding]], changes: list[Change], call: int) -> None:
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
                ).message(number)
            )
        elif changes:
            first = changes[0]
            more_changed = f", and {len(changes) - 1} more changed" if len(changes) > 1 else ""
            report(loop_change(f"{first}{more_changed}", call))

    def _look_ahead(
        self, before: PythonState | None, call: int, step_seconds: float, trace_again: TraceAgain
    ) -> list[tuple[int, Finding]]:
        """Traces later calls, until one differs or there is no reason for another; the first finding and its call."""
        assert self._trace is not None
        kept = PythonState(self._function, self._arguments, keeps=True)
        start = before or kept
        traces = max(1, int(max(MOST_STEPS * step_seconds, LEAST_SECONDS) / max(self._seconds, 1e-3)))
        with random_state_kept(), random_counter.held(), _requirements_kept():
            try:
                now = kept
                for number in range(call, min(call + _CALLS_IN_ORDER - 1, self._num_steps + 1, call + traces)):
                    found = findings(self._trace, _traced(trace_again), start, now)
                    if found:
                        return [(number, found[0])]
                    last, now = now, PythonState(self._function, self._arguments, keeps=True)
                    if not any(change.certain for change in last.changes(now)) and not last.drawn(now):
                        return []
                steps = last.growth(now)
                ahead = [far for far in (*_FAR_CALLS, self._num_steps) if number < far <= self._num_steps]
                for far in sorted(set(ahead))[: max(traces - _CALLS_IN_ORDER, 0)] if steps else ():
                    now.set_ahead(steps, far - number - 1)
                    later = _traced(trace_again)
                    # An error may come of numbers that the script never sets so.
                    if isinstance(later, Trace) and (found := findings(self._trace, later, start, now)):
                        return [(far, found[0])]
            finally:
                kept.restore()
        return []


def loop_change(change: str, call: int) -> str:
    """The warning of a setting that the loop has changed."""
    return (
        f"at {user_line()}, before call {call} of the @cstorch.trace function, the script has changed a setting: "
        f"{change}. The function was traced in the first call, and every step runs with the settings of that time. A "
        "learning rate that changes is a schedule of cstorch.optim "
        "(`cstorch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: ...)`, with its step() in the traced function); "
        "other modes, and other layers that learn, take another DataExecutor"
    )


def _traced(trace_again: TraceAgain) -> Trace | Exception:
    try:
        return trace_again()
    except Exception as error:  # noqa: BLE001 - whatever the script raises is what its second call would
        return error


@contextmanager
def _requirements_kept() -> Iterator[None]:
    """Puts `requires_grad` of the parameters back."""
    models = state.registered("model")
    before = [(parameter, parameter.requires_grad) for model in models for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, requires_grad in before:
            parameter.requires_grad_(requires_grad)
