"""A table of the outcomes of many trials, by role and moment."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from chaos_trial import Outcome

COLUMNS = "{:14} {:16} {:>7} {:>9} {:>10} {:>8} {:>8} {:>7}"


def table(outcomes: Sequence[Outcome]) -> str:
    """One row for each role and moment of the first fault; of trials whose moments did not come, one for all."""
    rows: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        fault = outcome.faults[0]
        key = (fault.victim.rpartition("-")[0] or fault.victim, fault.moment) if outcome.injected else ("none", "")
        rows[key].append(outcome)
    lines = [COLUMNS.format("role", "moment", "trials", "survived", "identical", "median s", "most s", "left")]
    lines += [_row(*key, rows[key]) for key in sorted(rows)]
    return "\n".join([*lines, _row("all", "", outcomes)])


def _row(role: str, moment: str, outcomes: Sequence[Outcome]) -> str:
    seconds = [outcome.silence for outcome in outcomes if outcome.injected] or [0.0]
    return COLUMNS.format(
        role,
        moment,
        len(outcomes),
        sum(outcome.survived for outcome in outcomes),
        sum(outcome.identical for outcome in outcomes),
        f"{median(seconds):.1f}",
        f"{max(seconds):.1f}",
        sum(bool(outcome.left) for outcome in outcomes),
    )
