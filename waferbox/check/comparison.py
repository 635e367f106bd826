"""The comparison of a script's steps on the cluster with those of plain PyTorch, and with float64 as the judge."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file

from waferbox.checked_run.record import Event, StepValues

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
    """The result of a comparison.

    Attributes:
        steps: the steps that were compared.
        tensors: the outputs and states of the last of them.
        largest: the largest relative error of all tensors.
        differences: the tensors of the first step in which any differs, the largest error first.
        not_finite: the tensors of the cluster that are infinite or no numbers where PyTorch's are finite.
    """

    steps: int
    tensors: int
    largest: float
    differences: tuple[Difference, ...]
    not_finite: tuple[Difference, ...]


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
    largest, tensors = 0.0, 0
    differences: list[Difference] = []
    not_finite: list[Difference] = []
    keys = sorted(cluster.keys() & eager.keys())
    for execution, step in keys:
        ours, theirs = load_file(cluster[execution, step]), load_file(eager[execution, step])
        exact = load_file(judge[execution, step]) if (execution, step) in judge else {}
        tensors = len(ours.keys() & theirs.keys())
        for name in sorted(ours.keys() & theirs.keys()):
            if ours[name].shape != theirs[name].shape:
                continue
            error = _error(ours[name], theirs[name])
            largest = max(largest, error)
            rounding = _error(theirs[name], exact[name]) if name in exact else None
            difference = Difference(execution=execution, step=step, name=name, error=error, rounding=rounding)
            if not torch.isfinite(ours[name]).all() and torch.isfinite(theirs[name]).all():
                not_finite.append(difference)
            elif error > close and not (name in exact and _is_rounding(ours[name], theirs[name], exact[name])):
                differences.append(difference)
        if differences or not_finite:
            break
    return Comparison(
        steps=len(keys),
        tensors=tensors,
        largest=largest,
        differences=tuple(sorted(differences, key=lambda one: -one.error)),
        not_finite=tuple(not_finite),
    )


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
    error = float(difference.max() / scale) if float(scale) else float("inf")
    return error if error == error else float("inf")  # no number, where one of both is none


def _is_rounding(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether the cluster is about as near to float64 as PyTorch is."""
    return _error(ours, exact) <= _ROUNDING_FACTOR * _error(theirs, exact) + _ROUNDING_FLOOR
