"""A trace that reports reads of unknown values goes on, so that all lines with such reads are found."""

import re

import pytest
import torch
from traced_steps import trace_behind_linear

from cstorch._internal.tracing.context import context
from cstorch.errors import TraceError


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[TraceError]:
    found: list[TraceError] = []
    monkeypatch.setattr(context, "on_refusal", lambda error, line: found.append(error))
    return found


def test_all_reads_are_reported(refusals: list[TraceError]) -> None:
    def step(y: torch.Tensor) -> torch.Tensor:
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
    places = [re.search(r"[Aa]t \S+\.py:(\d+)", str(refusal)) for refusal in refusals]
    lines = {place and int(place[1]) - first for place in places}
    assert lines == {1, 3, 4, 5, 6, 7}


def test_reads_are_errors_without_a_report() -> None:
    with pytest.raises(TraceError, match="the value of a traced tensor is needed"):
        trace_behind_linear(lambda y: y * y.max().item())


@pytest.mark.parametrize("writes", [False, True])
def test_a_number_of_the_step_as_an_index_has_its_own_way_out(writes: bool) -> None:
    def step(y: torch.Tensor) -> torch.Tensor:
        index = y.argmax()
        if writes:
            y = y.clone()
            y[index % 2] = 0.0
            return y
        return y[:, index % 2]

    with pytest.raises(TraceError, match=r"without dimensions is an index.*index_copy_") as caught:
        trace_behind_linear(step)
    assert "alpha" not in str(caught.value)
