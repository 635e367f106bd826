"""A step that reports what cannot be traced or lowered goes on with stand-ins, so that all such lines are found."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from traced_steps import trace_behind_linear

from cstorch._internal.lowering import lower
from cstorch._internal.tracing import move_module
from cstorch._internal.tracing.context import context
from cstorch._internal.tracing.device import registration
from cstorch.errors import CompileError, TraceError


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the lines that are reported, from the first of the step on."""
    found: list[int] = []
    monkeypatch.setattr(context, "on_refusal", lambda _, line: found.append(int(line.rpartition(":")[2])))
    return found


def several(y: torch.Tensor) -> torch.Tensor:
    mantissas, _ = torch.frexp(y)  # has no lowering
    spectrum = torch.fft.rfft(y).abs()  # makes complex numbers
    y = y + torch.bucketize(y, torch.zeros(3))  # a tensor of another device
    noise = torch.rand(3, generator=torch.Generator(), device=y.device)  # numbers of another generator
    counts = torch.histogram(y, 4).hist  # has no lowering
    return y.sum() + mantissas.max() + spectrum.sum() + noise.sum() + counts.sum()


def test_all_operations_are_reported(lines: list[int]) -> None:
    lower(trace_behind_linear(several))
    first = several.__code__.co_firstlineno
    assert {line - first for line in lines} == {1, 2, 3, 4, 5}


def test_all_lowerings_are_reported(lines: list[int]) -> None:
    def step(y: torch.Tensor) -> torch.Tensor:
        mantissas, _ = torch.frexp(y)
        counts = torch.histogram(y, 4).hist
        return y.sum() + mantissas.max() + counts.sum()

    lower(trace_behind_linear(step))
    assert {line - step.__code__.co_firstlineno for line in lines} == {1, 2}


@pytest.mark.parametrize(
    ("step", "way_out"),
    [
        (lambda y: y.to_sparse().to_dense().sum(), "needs a sparse tensor.*Keep it dense"),
        (lambda y: torch.ops.aten._sample_dirichlet(y.abs()).sum(), "_sample_dirichlet.*draw its numbers in"),
        (lambda y: torch.bincount(y.long().flatten(), minlength=4).sum(), r"size of the counts.*index_add\(0, x, "),
        (lambda y: nn.utils.clip_grad_norm_([y], 1.0, error_if_nonfinite=True), "Leave error_if_nonfinite out"),
        (lambda y: nn.utils.clip_grad_norm_([y], 1.0, 2.0, True), "Leave error_if_nonfinite out"),
        (
            lambda y: torch.amp.GradScaler("cpu").step(torch.optim.SGD([nn.Parameter(torch.ones(2))])),
            "Use cstorch.amp.GradScaler",
        ),
    ],
)
def test_the_first_line_says_what_to_change(step: Callable[[torch.Tensor], Any], way_out: str) -> None:
    with pytest.raises(TraceError, match=way_out):
        trace_behind_linear(step)


class Labelled(torch.Tensor):
    pass


INDICES: Any = [[0, 1], [1, 0]]
OTHER_KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "sparse by coordinates": (
        lambda y: torch.sparse.mm(torch.sparse_coo_tensor(y.new_tensor(INDICES).long(), y[0, :2], (3, 3)), y.T),
        "needs a sparse tensor.*Keep it dense",
    ),
    "sparse of constants": (
        lambda y: torch.sparse_coo_tensor(INDICES, [1.0, 2.0], (2, 2), device=y.device) @ y,
        "needs a sparse tensor",
    ),
    "sparse by rows": (
        lambda y: torch.sparse_csr_tensor(y.new_tensor([0, 1, 2]).long(), y.new_tensor([0, 1]).long(), y[0, :2]),
        "needs a sparse tensor",
    ),
    "sparse zeros": (
        lambda y: torch.zeros(2, 2, layout=torch.sparse_coo, device=y.device) @ y,
        "needs a sparse tensor",
    ),
    "sparse of the CPU": (lambda y: torch.eye(2).to_sparse() @ y, "needs a sparse tensor"),
    "jagged": (
        lambda y: torch.nested.as_nested_tensor([y[:1], y[1:]], layout=torch.jagged).sum(),
        "needs a nested tensor.*Pad the parts",
    ),
    "nested": (lambda y: torch.nested.as_nested_tensor([y[:1], y[1:]]).sum(), "needs a nested tensor.*Pad the parts"),
    "a subclass": (lambda y: y.as_subclass(Labelled).sum(), "test_refused_operations.py:.*Keep the tensor as it is"),
    "a subclass by its constructor": (lambda y: Labelled(y).sum(), "test_refused_operations.py:.*Keep the tensor"),
    "a subclass of the CPU": (lambda y: torch.tensor(2.0).as_subclass(Labelled) * y, "Keep the tensor as it is"),
}


@pytest.mark.filterwarnings("ignore:.*(Sparse|nested tensors):UserWarning")
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_tensors_of_other_kinds(kind: str) -> None:
    step, way_out = OTHER_KINDS[kind]
    with pytest.raises(TraceError, match=way_out):
        trace_behind_linear(step)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_sparse_buffer() -> None:
    for sparse in (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()):
        model = nn.Module()
        model.register_buffer("adjacent", sparse)
        with pytest.raises(TraceError, match=r"sparse tensor moves to the Cerebras device.*Keep it dense"):
            move_module(model)


def test_autocast_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    registration.warn_of_autocast.cache_clear()

    def step(y: torch.Tensor) -> torch.Tensor:
        for kind in (y.device.type, "cpu"):
            with torch.autocast(kind, dtype=torch.bfloat16):
                y = y * 2
        with torch.autocast(y.device.type, enabled=False):
            return y.sum()

    trace_behind_linear(step)
    (warning,) = caplog.messages
    assert "torch.autocast has no effect" in warning
    assert "test_refused_operations.py:" in warning
    assert "enable_mixed_precision" in warning


@pytest.mark.parametrize("kind", ["lazy", "cpu"])
def test_autocast_around_the_loop_is_warned_of_too(caplog: pytest.LogCaptureFixture, kind: str) -> None:
    registration.warn_of_autocast.cache_clear()
    with torch.autocast(kind, dtype=torch.bfloat16):
        for _ in range(2):
            trace_behind_linear(torch.sum)
    (warning,) = caplog.messages
    assert re.match(r"At \S+\.py:\d+ torch\.autocast has no effect", warning)


def test_operations_are_errors_without_a_report() -> None:
    with pytest.raises(TraceError, match="complex numbers"):
        trace_behind_linear(several)
    with pytest.raises(CompileError, match="frexp"):
        lower(trace_behind_linear(lambda y: torch.frexp(y).mantissa.sum()))
