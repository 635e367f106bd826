"""The states that a run which goes on from a checkpoint would lack."""

import re
from collections.abc import Iterable, Set
from itertools import groupby

from cstorch._internal import state
from cstorch._internal.check.run import CheckedRun
from waferbox.checked_run.record import Question

_KIND = re.compile(r"state\.([a-z_]+?)(?:_\d+)?(?:\.\d+)?\.")
# Metrics are computed anew in each evaluation.
_NOT_RESUMED = "metrics"
_MOST_NAMED = 3


def report_lost_states(run: CheckedRun, changed: Set[str]) -> None:
    """Reports states that change in steps, and that no state_dict or no checkpoint of the script has.

    Args:
        run: The checked run.
        changed: The names of the states that change.
    """
    lost = set(_lost_buffers(run, changed))
    if run.saved_states is None:
        return
    missing = sorted(changed - run.saved_states - lost, key=_kind)
    for kind, group in groupby(missing, key=_kind):
        names = list(group)
        if kind == _NOT_RESUMED:
            continue
        shown = ", ".join(name.removeprefix("state.") for name in names[:_MOST_NAMED])
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        word = kind.removesuffix("s").replace("_", " ")
        run.found(
            Question.RESUME,
            f"the checkpoint lacks {shown}{more}, which change in steps: a run that goes on from it begins with the "
            f"first values of the {word}. Save the state_dict() of the {word} too, and load it",
            run.saved_at,
        )


def _kind(name: str) -> str:
    found = _KIND.match(name)
    return found[1] if found else name


def _lost_buffers(run: CheckedRun, changed: Set[str]) -> Iterable[str]:
    """Reports buffers that are no part of state_dict(); yields the names of their states."""
    for model in state.registered("model"):
        kept = set(model.state_dict())
        for path, module in model.named_modules():
            for name in module._buffers:
                full = f"{path}.{name}".removeprefix(".")
                if full in kept or f"state.model.{full}" not in changed:
                    continue
                run.found(
                    Question.RESUME,
                    f"the buffer {full!r} changes in steps and is no part of model.state_dict(), as it was registered "
                    "with persistent=False: a run that goes on from a checkpoint begins with its first value. Register "
                    "it without that argument",
                    run.buffer_lines.get(module, {}).get(name, ""),
                )
                yield f"state.model.{full}"
