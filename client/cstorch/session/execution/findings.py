"""What a step would do otherwise when it is called again: warnings, and errors where the user wants them to be."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from cstorch.errors import TraceError
from cstorch.session.execution.python_state import Change, PythonState
from cstorch.tracing import Trace
from cstorch.tracing.provenance import line_of
from cstorch.tracing.recording.comparison import compare

STRICT_VARIABLE = "WAFERBOX_STRICT"
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
    """A difference of a later call of the step from its first.

    line: of the script, as "train.py:53".
    what: the difference, to follow "a second call of the step".
    changes: Python values that have changed since the first call, and may be the cause.
    drawn: generators of random numbers that have moved on since then.
    """

    line: str
    what: str
    changes: Sequence[Change] = field(default=())
    drawn: Sequence[str] = field(default=())

    def message(self, call: int) -> str:
        """The finding as text; call: the number of the later call, from 1."""
        return f"at {self.line} call {call} of the step {self.what}. {self._cause()}. {WAY_OUT}"

    def _cause(self) -> str:
        certain = [change for change in self.changes if change.certain]
        said = (certain or self.changes)[:_MOST_CHANGES]
        if said:
            more = len(certain or self.changes) - len(said)
            return "Since the first call " + ", ".join(map(str, said)) + (f", and {more} more changed" if more else "")
        if self.drawn:
            return f"It draws random numbers from {' and '.join(self.drawn)}"
        return "No Python value was seen to change; time, a file, or an iterator may be the cause"


def findings(first: Trace, later: Trace | Exception, before: PythonState, now: PythonState) -> list[Finding]:
    """What a later call of the step does otherwise than the first.

    Args:
        first: the trace of the first call.
        later: that of the later call, or the error that it ended with.
        before: the Python state before the first call.
        now: that before the later one.
    """
    changes, drawn = before.changes(now), before.drawn(now)
    if isinstance(later, Exception):
        what = f"would end with {type(later).__name__}: {later}"
        return [Finding(line=line_of(later), what=what.rstrip("."), changes=changes, drawn=drawn)]
    difference = compare(first, later)
    if difference is None:
        return []
    source = difference.source
    line = f"{source.file}:{source.line}" if source.file else "an unknown line"
    return [Finding(line=line, what=difference.what, changes=changes, drawn=drawn)]


def report(message: str) -> None:
    """Warns; raises a TraceError where WAFERBOX_STRICT is 1."""
    if os.environ.get(STRICT_VARIABLE) == "1":
        raise TraceError(message)
    warnings.warn(message, stacklevel=2)
