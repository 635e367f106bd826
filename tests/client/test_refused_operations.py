"""A step that reports what cannot be traced or lowered goes on with stand-ins, so that all such lines are found."""

import pytest
import torch
from traced_steps import trace_behind_linear

from cstorch._internal.lowering import lower
from cstorch._internal.tracing.context import context
from cstorch.errors import CompileError, TraceError


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the lines that are reported, from the first of the step on."""
    found: list[int] = []
    monkeypatch.setattr(context, "on_refusal", lambda _, line: found.append(int(line.rpartition(":")[2])))
    return found


def several(y: torch.Tensor) -> torch.Tensor:
    singular = torch.linalg.svdvals(y)  # has no lowering
    spectrum = torch.fft.rfft(y).abs()  # makes complex numbers
    y = y + torch.bucketize(y, torch.zeros(3))  # a tensor of another device
    noise = torch.rand(3, generator=torch.Generator(), device=y.device)  # numbers of another generator
    counts = torch.histc(y, 4)  # has no lowering
    return y.sum() + singular.max() + spectrum.sum() + noise.sum() + counts.sum()


def test_all_operations_are_reported(lines: list[int]) -> None:
    lower(trace_behind_linear(several))
    first = several.__code__.co_firstlineno
    assert {line - first for line in lines} == {1, 2, 3, 4, 5}


def test_all_lowerings_are_reported(lines: list[int]) -> None:
    def step(y: torch.Tensor) -> torch.Tensor:
        singular = torch.linalg.svdvals(y)
        counts = torch.histc(y, 4)
        return y.sum() + singular.max() + counts.sum()

    lower(trace_behind_linear(step))
    assert {line - step.__code__.co_firstlineno for line in lines} == {1, 2}


def test_operations_are_errors_without_a_report() -> None:
    with pytest.raises(TraceError, match="complex numbers"):
        trace_behind_linear(several)
    with pytest.raises(CompileError, match="svd"):
        lower(trace_behind_linear(lambda y: torch.linalg.svdvals(y).sum()))
