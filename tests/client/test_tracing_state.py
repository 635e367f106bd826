"""What a traced step takes for state, carries from step to step, or refuses."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from traced_steps import Runner, X, linear, states_of, trace

from cstorch._internal.tracing import DEVICE, cell_of, device_scope, move_module
from cstorch.errors import TraceError


def test_a_large_constant_travels_as_state() -> None:
    table = torch.randn(2000)
    traced = trace(lambda x: table.to(DEVICE) * 2, X)
    assert [(state.name, state.changed) for state in traced.states] == [("state.constants.0", False)]
    torch.testing.assert_close(Runner(traced).step(X)[0], table * 2)


def test_state_that_is_not_touched_is_left_out() -> None:
    model, _ = linear()
    with device_scope():
        unused, counter = torch.zeros(3), torch.zeros(())

    def step(x: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        return F.linear(x, model.weight)

    states = states_of(unused=lambda: unused, model=model, counter=lambda: counter)
    traced = trace(step, X, states)
    assert [(s.name, s.changed) for s in traced.states] == [("state.model.weight", False), ("state.counter", True)]
    assert len([node for node in traced.graph.nodes if node.op == "placeholder"]) == 3


def test_tied_weights_are_one_state() -> None:
    model, _ = linear()
    traced = trace(lambda x: model(x), X, states_of(model=model, tied=lambda: model.weight))
    assert [state.name for state in traced.states] == ["state.model.weight", "state.model.bias"]


def test_replaced_state_is_carried() -> None:
    class Total(nn.Module):
        total: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

    metric = Total()
    move_module(metric)
    before = metric.total

    def step(x: torch.Tensor) -> torch.Tensor:
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


def test_state_may_not_change_its_type() -> None:
    with device_scope():
        holder = {"t": torch.zeros(3)}

    def step(x: torch.Tensor) -> None:
        holder["t"] = x.sum()

    with pytest.raises(TraceError, match="keeps its shape"):
        trace(step, X, states_of(t=lambda: holder["t"]))


def test_state_created_in_the_step_is_refused() -> None:
    model, _ = linear()
    state: dict[nn.Parameter, torch.Tensor] = {}

    def step(x: torch.Tensor) -> None:
        model.zero_grad()
        model(x).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                if p not in state:
                    state[p] = torch.zeros_like(p)
                assert p.grad is not None
                state[p].mul_(0.9).add_(p.grad)
                p.sub_(state[p] * 0.1)

    with pytest.raises(TraceError, match=r"(?s)test_tracing_state.py:\d+.*before the step.*`__init__` of a module"):
        trace(step, X, states_of(model=model))


def test_optimizer_state_created_in_the_step_is_refused() -> None:
    model, _ = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    with pytest.raises(TraceError, match=r"'momentum_buffer' in the state of SGD"):
        trace(step, X, states_of(model=model))


def test_replaced_tensor_that_is_no_state_is_refused() -> None:
    with device_scope():
        holder = {"total": torch.zeros(())}

    def step(x: torch.Tensor) -> None:
        holder["total"] = holder["total"] + x.sum()

    with pytest.raises(TraceError, match="not registered as state"):
        trace(step, X)


def test_tensor_that_is_no_state_but_changes_in_place_is_carried() -> None:
    with device_scope():
        total = torch.zeros(())
    traced = trace(lambda x: total.add_(x.sum()) * 1, X)
    assert [(state.name, state.changed) for state in traced.states] == [("state.tensors.0", True)]
    runner = Runner(traced)
    runner.step(X)
    torch.testing.assert_close(runner.step(X)[0], X.sum() * 2)


def test_results_kept_by_the_user_are_no_state() -> None:
    kept: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return x + 1

    trace(step, X)
    with pytest.raises(TraceError, match="step_closure"):
        kept[0] + 1
    with pytest.raises(TraceError, match=r"computed in another one.*register_buffer"):
        trace(lambda x: x + kept[0], X)


def test_state_must_be_on_the_device() -> None:
    with pytest.raises(TraceError, match="not on the device"):
        trace(lambda x: x, X, states_of(t=lambda: torch.zeros(3)))


def test_what_only_a_graph_of_gradients_holds_is_no_state() -> None:
    model, _ = linear()
    kept: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        scaled = x.clone()
        scaled.mul_(2)
        kept.append(model(scaled).sum())
        return kept[0]

    trace(step, X, states_of(model=model))


def test_state_that_is_a_view() -> None:
    with device_scope():
        holder = {"grid": torch.arange(6.0).view(2, 3), "transposed": torch.zeros(3, 3).t()}
    grid = states_of(grid=lambda: holder["grid"])
    traced = trace(lambda x: holder["grid"].add_(1) * 1, X, grid)
    assert traced.states[0].cell.shape == (2, 3)

    def replace(x: torch.Tensor) -> None:
        holder["transposed"] = holder["transposed"] + 1

    with pytest.raises(TraceError, match="view of another"):
        trace(replace, X, states_of(transposed=lambda: holder["transposed"]))


class Recurrent(nn.Module):
    """Keeps its last two values, each a state of its own."""

    last: torch.Tensor
    before: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(4))
        self.register_buffer("before", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = (self.last - self.before).sum()
        self.before = self.last
        self.last = self.last * 0.5 + x.sum(0)
        return change

    def swap(self, x: torch.Tensor) -> torch.Tensor:
        self.before, self.last = self.last, self.before
        self.last.add_(x.sum(0))
        return (self.last - self.before).sum()


@pytest.mark.parametrize("method", ["forward", "swap"])
def test_a_state_that_becomes_another(method: str) -> None:
    model, plain = Recurrent(), Recurrent()
    move_module(model)
    cells = {name: cell_of(buffer) for name, buffer in model.named_buffers()}
    runner = Runner(trace(getattr(model, method), X, states_of(model=model)))
    for _ in range(4):
        torch.testing.assert_close(runner.step(X)[0], getattr(plain, method)(X))
    for name, buffer in model.named_buffers():
        assert cell_of(buffer) is cells[name]
        torch.testing.assert_close(runner.state[f"state.model.{name}"], plain.get_buffer(name))


def test_states_of_one_storage_that_become_different() -> None:
    with device_scope():
        zeros = torch.zeros(4)
    held = {"hidden": zeros, "cell": zeros}
    states = states_of(hidden=lambda: held["hidden"], cell=lambda: held["cell"])

    def both(x: torch.Tensor) -> None:
        held["hidden"], held["cell"] = held["hidden"] + x.sum(0), held["cell"] - x.sum(0)

    with pytest.raises(TraceError, match=r"'state.cell' and 'state.hidden' share one storage"):
        trace(both, X, states)
    held = {"hidden": zeros, "cell": zeros}
    with pytest.raises(TraceError, match="share one storage"):
        trace(lambda x: held.update(hidden=held["hidden"] + x.sum(0)), X, states)


def test_states_that_are_parts_of_one_tensor() -> None:
    class Layers(nn.Module):
        mask_0: torch.Tensor
        mask_1: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.arange(12.0).view(3, 4).unbind())
            for number, mask in enumerate(torch.eye(4)[:2]):
                self.register_buffer(f"mask_{number}", mask)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = (x * self.weights[0] * self.mask_1 + self.weights[2] * self.weights[1]).sum()
            loss.backward()
            with torch.no_grad():
                self.mask_0.mul_(0.9)
                for weight in self.weights:
                    weight -= 0.1 * weight.grad
                    weight.grad = None
            return loss.detach()

    with device_scope():
        model = Layers()
    plain = Layers()
    runner = Runner(trace(model, X, states_of(model=model)))
    for _ in range(3):
        torch.testing.assert_close(runner.step(X)[0], plain(X))
    torch.testing.assert_close(
        runner.state["state.model.weights.0"].view(3, 4), torch.stack(list(plain.weights)).detach()
    )
    torch.testing.assert_close(
        runner.state["state.model.mask_0"].view(4, 4)[:2], torch.stack([plain.mask_0, plain.mask_1])
    )


def keep_and_restore(model: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    kept = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.1
    inside = model(x).sum()
    for parameter, before in zip(model.parameters(), kept, strict=True):
        parameter.data = before
    return inside, model(x).sum()


def share_with_a_tensor(model: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    table = torch.ones(3, 4, device=x.device) * x.mean()
    model.weight.data = table
    table.add_(1)
    with torch.no_grad():
        model.weight.mul_(0.5)
    return model(x).sum(), table * 1


def take_from_a_vector(model: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    vector = nn.utils.parameters_to_vector(model.parameters()) * 0.5
    nn.utils.vector_to_parameters(vector, model.parameters())
    with torch.no_grad():
        model.bias.add_(1)
    return model(x).sum(), vector * 1


def take_transposed(model: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    model.weight.data = torch.arange(12.0, device=x.device).view(4, 3).t() * model.bias.mean()
    return (model(x).sum(),)


def take_and_train(model: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    loss = model(x).pow(2).sum()
    model.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.data - 0.1 * parameter.grad.data
    return loss, model(x).sum()


@pytest.mark.parametrize(
    "function", [keep_and_restore, share_with_a_tensor, take_from_a_vector, take_transposed, take_and_train]
)
def test_data_that_is_replaced_is_shared(
    function: Callable[[nn.Linear, torch.Tensor], tuple[torch.Tensor, ...]],
) -> None:
    model, plain = linear()
    runner = Runner(trace(lambda x: function(model, x), X, states_of(model=model)))
    for number in range(3):
        results, expected = runner.step(X + number), function(plain, X + number)
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value.detach())
    for name, parameter in plain.named_parameters():
        state = runner.state.get(f"state.model.{name}", model.get_parameter(name).cpu())
        torch.testing.assert_close(state, parameter.detach())


def test_weights_that_the_script_keeps_and_puts_back() -> None:
    """As in sharpness aware minimisation: what is kept shares the storage of the weight when that is updated."""
    model, plain = linear()
    kept: dict[str, torch.Tensor] = {}

    def step(m: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        kept.update({name: parameter.data.clone() for name, parameter in m.named_parameters()})
        for parameter in m.parameters():
            parameter.data = parameter.data * 2
        m(x).pow(2).sum().backward()
        for name, parameter in m.named_parameters():
            parameter.data = kept[name]
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad * 0.01)
        m.zero_grad()
        return m(x).sum()

    runner = Runner(trace(lambda x: step(model, x), X, states_of(model=model)))
    for _ in range(3):
        torch.testing.assert_close(runner.step(X)[0], step(plain, X).detach())


def test_data_of_another_parameter() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    model = Two()
    plain = copy.deepcopy(model)
    move_module(model)

    def step(m: Two, x: torch.Tensor) -> torch.Tensor:
        m.first(x).sum().backward()
        assert m.first.weight.grad is not None
        with torch.no_grad():
            m.first.weight.sub_(m.first.weight.grad * 0.1)
        m.zero_grad()
        m.second.weight.data = m.first.weight.data
        return m.second(x).sum()

    runner = Runner(trace(lambda x: step(model, x), X, states_of(model=model)))
    for _ in range(3):
        torch.testing.assert_close(runner.step(X)[0], step(plain, X).detach())
    torch.testing.assert_close(runner.state["state.model.second.weight"], plain.second.weight.detach())


def test_a_step_that_fails_leaves_parameters_as_they_were() -> None:
    model, plain = linear()

    def step(x: torch.Tensor) -> float:
        model.weight.data = model.weight.data * 2
        return model(x).sum().item()

    with pytest.raises(TraceError):
        trace(step, X, states_of(model=model))
    torch.testing.assert_close(model.weight.detach().cpu(), plain.weight.detach())
