"""A step that reports what cannot be traced or lowered goes on with stand-ins, so that all such lines are found."""

import pytest
import torch
from torch import nn
from traced_steps import X, states_of, trace

from cstorch._internal.lowering import lower
from cstorch._internal.tracing import move_module
from cstorch._internal.tracing.context import context
from cstorch.errors import CompileError, TraceError


@pytest.fixture
def lines(monkeypatch):
    """Returns the lines that are reported, from the first of the step on."""
    found: list[int] = []
    monkeypatch.setattr(context, "on_refusal", lambda _, line: found.append(int(line.rpartition(":")[2])))
    return found


def traced(step):
    model = nn.Linear(4, 3)
    move_module(model)
    return trace(lambda x: step(model(x)), X, states_of(model=model), model)


def several(y):
    singular = torch.linalg.svdvals(y)  # has no lowering
    spectrum = torch.fft.rfft(y).abs()  # makes complex numbers
    y = y + torch.bucketize(y, torch.zeros(3))  # a tensor of another device
    noise = torch.rand(3, generator=torch.Generator(), device=y.device)  # numbers of another generator
    counts = torch.histc(y, 4)  # has no lowering
    return y.sum() + singular.max() + spectrum.sum() + noise.sum() + counts.sum()


def test_all_operations_are_reported(lines):
    lower(traced(several))
    first = several.__code__.co_firstlineno
    assert {line - first for line in lines} == {1, 2, 3, 4, 5}


def test_all_lowerings_are_reported(lines):
    def step(y):
        singular = torch.linalg.svdvals(y)
        counts = torch.histc(y, 4)
        return y.sum() + singular.max() + counts.sum()

    lower(traced(step))
    assert {line - step.__code__.co_firstlineno for line in lines} == {1, 2}


def test_operations_are_errors_without_a_report():
    with pytest.raises(TraceError, match="complex numbers"):
        traced(several)
    with pytest.raises(CompileError, match="svd"):
        lower(traced(lambda y: torch.linalg.svdvals(y).sum()))
