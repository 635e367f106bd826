"""The comparison of a script's steps on the cluster with those of plain PyTorch, and with float64 as the judge."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file

from waferbox.checked_run.record import INPUT, Event, StepValues

# Relative errors that need no judge: those of a few roundings.
CLOSE: Final = 1e-5
CLOSE_IN_HALF: Final = 2e-2
# The cluster adds in another order than PyTorch, so that its errors may be larger, and grow as those of any rounding.
_ROUNDING_FACTOR: Final = 20.0
_ROUNDING_FLOOR: Final = 1e-6

_Key = tuple[int, int]  # execution, step
Steps = Mapping[_Key, Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A tensor that the cluster computes otherwise than PyTorch.

    Attributes:
        execution: number of the execution.
        step: number of the step.
        name: the output or state.
        error: the largest difference to PyTorch, divided by the largest value.
        rounding: the same of PyTorch's float32 to float64; None: there is no judge.
    """

    execution: int
    step: int
    name: str
    error: float
    rounding: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of a comparison, which ends with the first step in which a tensor differs or overflows.

    Attributes:
        steps: the steps in which none does.
        tensors: the outputs and states of the last of them.
        largest: the largest relative error in them.
        differences: the tensors of the first other step that differ, the largest error first.
        not_finite: its tensors that are infinite or no numbers on the cluster, where PyTorch's are finite.
        overflowed: the same by PyTorch too, and finite by the judge.
    """

    steps: int
    tensors: int
    largest: float
    differences: tuple[Difference, ...]
    not_finite: tuple[Difference, ...]
    overflowed: tuple[Difference, ...]

    @property
    def first(self) -> Difference | None:
        """The first tensor that differs or overflows."""
        return next(iter((*self.not_finite, *self.differences, *self.overflowed)), None)


def step_values(folder: Path, events: list[Event]) -> dict[_Key, Path]:
    """Returns the files of the steps of a record."""
    return {(event.execution, event.step): folder / event.path for event in events if isinstance(event, StepValues)}


def needs_judge(cluster: Steps, eager: Steps, close: float) -> bool:
    """Whether any tensor differs by more than a few roundings."""
    return any(
        _error(ours, theirs) > close
        for key in sorted(cluster.keys() & eager.keys())
        for ours, theirs in _pairs(load_file(cluster[key]), load_file(eager[key]))
    )


def compare(cluster: Steps, eager: Steps, judge: Steps, close: float) -> Comparison:
    """Compares the steps that both runs have.

    Args:
        cluster: the files of the run on the cluster.
        eager: those of the run by PyTorch.
        judge: those of the run in float64; empty: there is none.
        close: the relative error that needs no judge.
    """
    steps, largest, tensors = 0, 0.0, 0
    differences: list[Difference] = []
    not_finite: list[Difference] = []
    overflowed: list[Difference] = []
    for execution, step in sorted(cluster.keys() & eager.keys()):
        ours, theirs = load_file(cluster[execution, step]), load_file(eager[execution, step])
        exact = load_file(judge[execution, step]) if (execution, step) in judge else {}
        names = [name for name in sorted(ours.keys() & theirs.keys()) if ours[name].shape == theirs[name].shape]
        errors = {name: _error(ours[name], theirs[name]) for name in names}
        for name, error in errors.items():
            rounding = _error(theirs[name], exact[name]) if name in exact else None
            difference = Difference(execution=execution, step=step, name=name, error=error, rounding=rounding)
            if not _is_finite(ours[name]) and _is_finite(theirs[name]):
                not_finite.append(difference)
            elif not _is_finite(theirs[name]) and name in exact and _is_finite(exact[name]):
                overflowed.append(difference)
            elif error > close and not (name in exact and _is_rounding(ours[name], theirs[name], exact[name])):
                differences.append(difference)
        if differences or not_finite or overflowed:
            break
        steps, tensors, largest = steps + 1, len(names), max([largest, *errors.values()])
    return Comparison(
        steps=steps,
        tensors=tensors,
        largest=largest,
        differences=tuple(sorted(differences, key=lambda one: -one.error)),
        not_finite=tuple(not_finite),
        overflowed=tuple(overflowed),
    )


def not_repeated(eager: Steps, judge: Steps) -> str | None:
    """Returns a tensor of the first execution that differs between two runs by PyTorch, and should not; None: none is.

    These are the batches, and the states before the first step: the precision of a run does not change them.
    """
    for execution, step in sorted(eager.keys() & judge.keys()):
        one, other = load_file(eager[execution, step]), load_file(judge[execution, step])
        for name in sorted(one.keys() & other.keys()) if execution == 1 else ():
            if (step == 0 or name.startswith(INPUT)) and not _is_same(one[name], other[name]):
                return name
    return None


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _pairs(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (ours[name], theirs[name]) for name in ours.keys() & theirs.keys() if ours[name].shape == theirs[name].shape
    ]


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Returns the largest difference, divided by the largest value."""
    if not theirs.numel():
        return 0.0
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    if bool(same.all()):
        return 0.0
    difference = torch.where(same, 0.0, (ours - theirs).abs())
    scale = torch.where(theirs.isfinite(), theirs.abs(), 0.0).max()
    error = float(difference.max() / scale) if float(scale) else math.inf
    return math.inf if math.isnan(error) else error  # no number, where one of both is none


def _is_rounding(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether the cluster is about as near to float64 as PyTorch is, and both are finite where float64 is."""
    error = _error(ours, exact)
    return math.isfinite(error) and error <= _ROUNDING_FACTOR * _error(theirs, exact) + _ROUNDING_FLOOR
