"""A trace that reports reads of unknown values goes on, so that all lines with such reads are found."""

import re

import pytest
import torch
from traced_steps import trace_behind_linear

from cstorch._internal.tracing.context import context
from cstorch.errors import TraceError


@pytest.fixture
def refusals(monkeypatch):
    found: list[TraceError] = []
    monkeypatch.setattr(context, "on_refusal", lambda error, line: found.append(error))
    return found


def test_all_reads_are_reported(refusals):
    def step(y):
        if y.sum() > 0:
            y = -y
        kept = y[y > 0]
        chosen = torch.masked_select(y, y < 1)
        added = float(y.max())
        added += y.min().item()
        added += len(y.nonzero())
        return kept.sum() * chosen.mean() + added

    trace_behind_linear(step)
    first = step.__code__.co_firstlineno
    lines = {int(re.search(r"[Aa]t \S+\.py:(\d+)", str(refusal))[1]) - first for refusal in refusals}
    assert lines == {1, 3, 4, 5, 6, 7}


def test_reads_are_errors_without_a_report():
    with pytest.raises(TraceError, match="the value of a traced tensor is needed"):
        trace_behind_linear(lambda y: y * y.max().item())
