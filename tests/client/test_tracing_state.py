"""What a traced step takes for state, carries from step to step, or refuses."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from traced_steps import Runner, X, linear, states_of, trace

from cstorch.errors import TraceError
from cstorch.tracing import DEVICE, device_scope, move_module


def test_a_large_constant_travels_as_state():
    table = torch.randn(2000)
    traced = trace(lambda x: table.to(DEVICE) * 2, X)
    assert [(state.name, state.changed) for state in traced.states] == [("state.constants.0", False)]
    torch.testing.assert_close(Runner(traced).step(X)[0], table * 2)


def test_state_that_is_not_touched_is_left_out():
    model, _ = linear()
    with device_scope():
        unused, counter = torch.zeros(3), torch.zeros(())

    def step(x):
        counter.add_(1)
        return F.linear(x, model.weight)

    states = states_of(unused=lambda: unused, model=model, counter=lambda: counter)
    traced = trace(step, X, states)
    assert [(s.name, s.changed) for s in traced.states] == [("state.model.weight", False), ("state.counter", True)]
    assert len([node for node in traced.graph.nodes if node.op == "placeholder"]) == 3


def test_tied_weights_are_one_state():
    model, _ = linear()
    traced = trace(lambda x: model(x), X, states_of(model=model, tied=lambda: model.weight))
    assert [state.name for state in traced.states] == ["state.model.weight", "state.model.bias"]


def test_replaced_state_is_carried():
    class Total(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

    metric = Total()
    move_module(metric)
    before = metric.total

    def step(x):
        metric.total = metric.total + x.sum()
        return metric.total * 1

    traced = trace(step, X, states_of(metric=metric))
    runner = Runner(traced)
    runner.step(X)
    (result,) = runner.step(X)
    torch.testing.assert_close(result, X.sum() * 2)
    assert metric.total is not before
    traced.states[0].cell.write(torch.tensor(7.0))
    assert metric.total.item() == 7  # the new tensor stands for the state now


def test_state_may_not_change_its_type():
    with device_scope():
        holder = {"t": torch.zeros(3)}

    def step(x):
        holder["t"] = x.sum()

    with pytest.raises(TraceError, match="keeps its shape"):
        trace(step, X, states_of(t=lambda: holder["t"]))


def test_state_created_in_the_step_is_refused():
    model, _ = linear()
    state = {}

    def step(x):
        model.zero_grad()
        model(x).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                if p not in state:
                    state[p] = torch.zeros_like(p)
                state[p].mul_(0.9).add_(p.grad)
                p.sub_(state[p] * 0.1)

    with pytest.raises(TraceError, match=r"(?s)test_tracing_state.py:\d+.*before the step.*preinitialize"):
        trace(step, X, states_of(model=model))


def test_optimizer_state_created_in_the_step_is_refused():
    model, _ = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    with pytest.raises(TraceError, match=r"'momentum_buffer' in the state of SGD"):
        trace(step, X, states_of(model=model))


def test_replaced_tensor_that_is_no_state_is_refused():
    with device_scope():
        holder = {"total": torch.zeros(())}

    def step(x):
        holder["total"] = holder["total"] + x.sum()

    with pytest.raises(TraceError, match="not registered as state"):
        trace(step, X)


def test_tensor_that_is_no_state_but_changes_in_place_is_carried():
    with device_scope():
        total = torch.zeros(())
    traced = trace(lambda x: total.add_(x.sum()) * 1, X)
    assert [(state.name, state.changed) for state in traced.states] == [("state.tensors.0", True)]
    runner = Runner(traced)
    runner.step(X)
    torch.testing.assert_close(runner.step(X)[0], X.sum() * 2)


def test_results_kept_by_the_user_are_no_state():
    kept = []

    def step(x):
        kept.append(x * 2)
        return x + 1

    trace(step, X)
    with pytest.raises(TraceError, match="step_closure"):
        kept[0] + 1
    with pytest.raises(TraceError, match=r"computed in another one.*register_buffer"):
        trace(lambda x: x + kept[0], X)


def test_state_must_be_on_the_device():
    with pytest.raises(TraceError, match="not on the device"):
        trace(lambda x: x, X, states_of(t=lambda: torch.zeros(3)))


def test_what_only_a_graph_of_gradients_holds_is_no_state():
    model, _ = linear()
    kept = []

    def step(x):
        scaled = x.clone()
        scaled.mul_(2)
        kept.append(model(scaled).sum())
        return kept[0]

    trace(step, X, states_of(model=model))


def test_state_that_is_a_view():
    with device_scope():
        holder = {"grid": torch.arange(6.0).view(2, 3), "transposed": torch.zeros(3, 3).t()}
    grid = states_of(grid=lambda: holder["grid"])
    traced = trace(lambda x: holder["grid"].add_(1) * 1, X, grid)
    assert traced.states[0].cell.shape == (2, 3)

    def replace(x):
        holder["transposed"] = holder["transposed"] + 1

    with pytest.raises(TraceError, match="view of another"):
        trace(replace, X, states_of(transposed=lambda: holder["transposed"]))
