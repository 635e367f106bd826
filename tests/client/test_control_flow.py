"""Operators of torch that take functions, such as torch.cond, in a step: which are traced, and which refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import cond as imported_cond
from torch import nn
from torch._higher_order_ops import associative_scan, scan
from torch._higher_order_ops.strict_mode import strict_mode
from torch.nn.attention.flex_attention import flex_attention
from traced_steps import Runner, X, linear, states_of, trace, trace_behind_linear

from cstorch._internal.tracing import move_module
from cstorch._internal.tracing.device.dispatch import device_scope
from cstorch.errors import TraceError

Function = Callable[[torch.Tensor], Any]
strict: Any = strict_mode
untyped: Any = torch  # torch has no types of some of them


def squared(y: torch.Tensor) -> torch.Tensor:
    return y.pow(2)


def halved(y: torch.Tensor) -> torch.Tensor:
    return y / 2


def summed(function: Callable[..., Any], start: torch.Tensor, rows: torch.Tensor, **settings: Any) -> Any:
    """torch's scan, in Python."""
    dim, reverse = settings.get("dim", 0), settings.get("reverse", False)
    carry, results = start, []
    for row in reversed(rows.unbind(dim)) if reverse else rows.unbind(dim):
        carry, result = function(carry, row)
        results.append(result)
    return carry, torch.stack(results[::-1] if reverse else results, dim)


def decayed(carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return carry * 0.5 + row, carry + row


# Each with the same in plain torch.
TRACED: dict[str, tuple[Function, Function]] = {
    "cond that is true": (lambda y: torch.cond(y.sum() < 1e3, squared, halved, (y,)), squared),
    "cond that is false": (lambda y: torch.cond(y.sum() > 1e3, squared, halved, (y,)), halved),
    "a predicate of one element": (lambda y: torch.cond(y.sum().reshape(1) > 1e3, squared, halved, (y,)), halved),
    "a Python predicate": (lambda y: torch.cond(len(y) == 2, squared, halved, (y,)), squared),
    "a known predicate": (lambda y: torch.cond(torch.zeros(1, device=y.device) > 0, squared, halved, (y,)), halved),
    "cond by its own name": (lambda y: imported_cond(y.sum() > 1e3, squared, halved, (y,)), halved),
    "cond without operands": (lambda y: torch.cond(y.sum() > 1e3, lambda: y + 1, lambda: y - 1), lambda y: y - 1),
    "several results": (
        lambda y: torch.cond(y.sum() > 1e3, lambda y: [y, (y * 2, 3)], lambda y: [-y, (y * 3, 3)], (y,))[1][0],
        lambda y: y * 3,
    ),
    "cond in cond": (
        lambda y: torch.cond(
            y.sum() > 1e3, squared, lambda y: torch.cond(y.sum() < 1e3, halved, squared, (y,)).exp(), (y,)
        ),
        lambda y: halved(y).exp(),
    ),
    "in place on its own": (
        lambda y: torch.cond(y.sum() > 1e3, squared, lambda y: y.clone().mul_(2).view(6).add_(1).view(2, 3), (y,)),
        lambda y: y * 2 + 1,
    ),
    "a mask in a branch": (
        lambda y: torch.cond(y.sum() > 1e3, squared, assigned, (y,)),
        lambda y: torch.where(y > 0, 1.0, y),
    ),
    "scan": (
        lambda y: scan(decayed, torch.zeros(2, device=y.device), y.T.contiguous())[1],
        lambda y: summed(decayed, torch.zeros(2), y.T)[1],
    ),
    "scan from the end": (
        lambda y: scan(decayed, torch.zeros(2, device=y.device), y, dim=1, reverse=True)[1],
        lambda y: summed(decayed, torch.zeros(2), y, dim=1, reverse=True)[1],
    ),
    "the end of a scan of trees": (
        lambda y: scan(
            lambda carry, row: ({"s": carry["s"] + row[0]}, (carry["s"] * 2, row[1].exp())),
            {"s": torch.zeros(2, device=y.device)},
            (y.T, y.T * 2),
        )[0]["s"],
        lambda y: y.sum(1),
    ),
    "an associative scan": (
        lambda y: associative_scan(torch.add, y, 1, combine_mode="generic"),
        lambda y: y.cumsum(1),
    ),
    "map": (
        lambda y: untyped._higher_order_ops.map(lambda row, a: row.sum() * a, y, y[0]),
        lambda y: y.sum(1)[:, None] * y[0],
    ),
    "while_loop that counts": (
        lambda y: untyped.while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, x * 0.9), (torch.zeros((), device=y.device), y)
        )[1],
        lambda y: y * 0.9 * 0.9 * 0.9,
    ),
}


def assigned(y: torch.Tensor) -> torch.Tensor:
    changed = y.clone()
    changed[y > 0] = 1
    return changed


@pytest.mark.parametrize("name", TRACED)
def test_it_is_traced_with_its_gradient(name: str, recwarn: pytest.WarningsRecorder) -> None:
    function, plain = TRACED[name]
    model, reference = linear()

    def step(x: torch.Tensor, model: nn.Linear, function: Function) -> list[torch.Tensor]:
        made = function(model(x))
        loss = (made * torch.linspace(0.5, 2, made.numel(), device=x.device).reshape(made.shape)).sum()
        return [made, *torch.autograd.grad(loss, list(model.parameters()))]

    traced = trace(lambda x: step(x, model, function), X, states_of(model=model), model)
    assert not [str(warning.message) for warning in recwarn]
    for result, expected in zip(Runner(traced).step(X), step(X, reference, plain), strict=True):
        torch.testing.assert_close(result, expected)


def test_batch_norm_in_the_branch_of_a_known_predicate() -> None:
    model = nn.BatchNorm1d(4)
    move_module(model)
    traced = trace(lambda x: torch.cond(True, model, halved, (x,)), X, states_of(model=model), model)
    assert {state.name for state in traced.states if state.changed} >= {"state.model.running_mean"}


REFUSED: dict[str, tuple[Function, str]] = {
    "other shapes": (
        lambda y: torch.cond(y.sum() > 0, lambda y: y[0], halved, (y,)),
        r"different kinds.*\(3,\).*\(2, 3\)",
    ),
    "other structures": (lambda y: torch.cond(y.sum() > 0, lambda y: (y, y), halved, (y,)), "different kinds"),
    "other numbers": (lambda y: torch.cond(y.sum() > 0, lambda: 1, lambda: 2), "different kinds of results: 1 if"),
    "a write": (
        lambda y: torch.cond(y.sum() > 0, lambda y: y.detach()[0].mul_(2), lambda y: y[0], (y,)),
        "in place, at",
    ),
    "a written list": (
        lambda y: torch.cond(y.sum() > 0, lambda y: torch._foreach_mul_([y.detach()], 2), lambda y: None, (y,)),
        "in place, at .*test_control_flow",
    ),
    "batch norm": (
        lambda y: torch.cond(y.sum() > 0, nn.BatchNorm1d(3).to(y.device), halved, (y,)),
        "batch norm in training",
    ),
    "a predicate for each element": (lambda y: torch.cond(y > 0, squared, halved, (y,)), "has 6 elements"),
    "while_loop": (
        lambda y: untyped.while_loop(lambda x: x.sum() < 9, lambda x: (x * 2,), (y,)),
        "test_control_flow.py:.*fixed number of turns",
    ),
    "another operator": (lambda y: strict(squared, (y,)), "strict_mode.*is given Python functions"),
    "flex_attention": (
        lambda y: flex_attention(y[None, None], y[None, None], y[None, None]),
        "scaled_dot_product_attention",
    ),
    "export": (
        lambda y: torch.export.export(nn.Linear(3, 3), (y.detach(),)),
        "test_control_flow.py:.*Export the model before, on the CPU",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_the_way_out(name: str) -> None:
    step, message = REFUSED[name]
    with pytest.raises(TraceError, match=message):
        trace_behind_linear(step)


@pytest.mark.filterwarnings("ignore::UserWarning")  # dynamo's
def test_export_on_the_device() -> None:
    with device_scope():
        model, x = nn.Linear(3, 3), torch.ones(2, 3)
        with pytest.raises(TraceError, match=r"outside of `with backend\.device:`"):
            torch.export.export(model, (x,))
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    assert torch.equal(compiled(x).cpu(), torch.full((2, 3), 2.0))
