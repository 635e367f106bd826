"""Gradients that a step leaves for the next one to add to are named; those that it clears, in any way, are not."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from traced_steps import X, states_of, trace

from cstorch._internal.session.execution.traced_step import check_step
from cstorch._internal.tracing import Trace, move_module
from cstorch.optim import SGD, Optimizer


def zero_one_by_one(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach_()
            parameter.grad.zero_()


def drop_one_by_one(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def delete_one_by_one(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        del parameter.grad


def zero_at_once(model: nn.Module, optimizer: Optimizer) -> None:
    if gradients := [parameter.grad for parameter in model.parameters() if parameter.grad is not None]:
        torch._foreach_zero_(gradients)


Way = Callable[[nn.Module, Optimizer], None]
WAYS: dict[str, Way] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "zeros of the optimizer": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "zeros of the model": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "zeros": zero_one_by_one,
    "none": drop_one_by_one,
    "deleted": delete_one_by_one,
    "at once": zero_at_once,
}


def nothing(model: nn.Module, optimizer: Optimizer) -> None:
    pass


def traced(
    before: Way = nothing,
    after: Way = nothing,
    steps: bool = True,
    of: Callable[[nn.Sequential], Iterable[nn.Parameter]] = nn.Module.parameters,
) -> Trace:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    move_module(model)
    optimizer = SGD(of(model), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        before(model, optimizer)
        loss.backward()
        if steps:
            optimizer.step()
        after(model, optimizer)
        return loss

    return trace(step, X, states_of(model=model), model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["before", "after"])
def test_cleared(way: str, place: str) -> None:
    made = traced(before=WAYS[way]) if place == "before" else traced(after=WAYS[way])
    assert made.kept_gradients == ()


@pytest.mark.parametrize("steps", [True, False])
def test_not_cleared(steps: bool) -> None:
    made = traced(steps=steps)
    assert made.kept_gradients == tuple(f"state.model.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias"))
    with pytest.warns(
        UserWarning, match=r"gradients of 0.weight, 0.bias, 1.weight and 1 more: .*zero_grad\(\)"
    ) as warned:
        check_step(made, None, made.optimizers)
    assert [each.filename for each in warned] == [__file__]  # the script's line, not one of the library


def test_cleared_and_filled_again() -> None:
    def again(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)
        model(X.to("lazy")).sum().backward()

    assert len(traced(after=again).kept_gradients) == 4


def test_gradients_that_no_optimizer_uses_are_not_named() -> None:
    def head(model: nn.Sequential) -> Iterable[nn.Parameter]:
        return model[1].parameters()

    assert traced(before=WAYS["optimizer"], of=head).kept_gradients == ()
    assert traced(of=head).kept_gradients == ("state.model.1.weight", "state.model.1.bias")


def test_cleared_before_the_pass_whose_gradients_the_optimizer_takes() -> None:
    def earlier_pass(model: nn.Module, optimizer: Optimizer) -> None:
        model(X.to("lazy")).sum().backward()
        optimizer.zero_grad()

    assert traced(before=earlier_pass).kept_gradients == ()
