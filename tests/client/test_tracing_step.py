"""What a traced step means: the functional graph, run with plain torch, equals the step run eagerly."""

import copy
import gc
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from traced_steps import Getter, Runner, Step, X, linear, states_of, trace

from cstorch._internal.tracing import DEVICE, device_scope, move_module


class AdamW:
    """As a user would write it: state made before the step, in-place updates."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr
        self.state = {p: {"m": torch.zeros_like(p), "v": torch.zeros_like(p)} for p in self.parameters}
        self.count = torch.zeros((), device=self.parameters[0].device)

    def step(self) -> None:
        with torch.no_grad():
            self.count.add_(1)
            for p in self.parameters:
                assert p.grad is not None
                m, v = self.state[p]["m"], self.state[p]["v"]
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                scale = torch.sqrt(1 - 0.999**self.count) / (1 - 0.9**self.count)
                p.mul_(1 - self.lr * 0.01).sub_(self.lr * scale * m / (v.sqrt() + 1e-6))

    def getters(self) -> dict[str, Getter]:
        found: dict[str, Getter] = {"count": lambda: self.count}
        for i, p in enumerate(self.parameters):
            found |= {f"optimizer.{i}.{key}": partial(self.state[p].__getitem__, key) for key in ("m", "v")}
        return found


class Momentum(AdamW):
    def step(self) -> None:
        with torch.no_grad():
            for p in self.parameters:
                assert p.grad is not None
                m = self.state[p]["m"].mul_(0.9).add_(p.grad)
                p.sub_(m * self.lr)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.last = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 10)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(F.relu(self.fc1(torch.flatten(x, 1))))
        return self.last(self.drop(F.relu(self.fc2(x))))


def training_step(
    optimizer_class: type[AdamW], model: nn.Module
) -> tuple[Callable[[tuple[torch.Tensor, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]], AdamW]:
    optimizer = optimizer_class(model.parameters(), 0.05)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = batch
        loss = F.cross_entropy(model(images), labels)
        model.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach(), norm

    return step, optimizer


@pytest.mark.parametrize("optimizer_class", [AdamW, Momentum])
def test_three_training_steps_equal_eager(optimizer_class: type[AdamW]) -> None:
    torch.manual_seed(1)
    model = Network()
    reference = copy.deepcopy(model)
    move_module(model)
    step, optimizer = training_step(optimizer_class, model)
    eager_step, _ = training_step(optimizer_class, reference)
    batches = [(torch.randn(6, 4, 5), torch.randint(10, (6,))) for _ in range(3)]
    traced = trace(step, batches[0], states_of(model=model, **optimizer.getters()), model)
    runner = Runner(traced)
    for batch in batches:
        results, expected = runner.step(batch), eager_step(batch)
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(runner.state[f"state.model.{name}"], parameter.detach())
    assert [info.name for info in traced.inputs] == ["input_0", "input_1"]
    modules = {node.meta["source"].module for node in traced.graph.nodes if "source" in node.meta}
    assert {"fc1", "fc2", "last"} <= modules
    backward = {node.meta["source"].module for node in traced.graph.nodes if str(node.target) == "aten.mm.default"}
    assert backward == {"fc1", "fc2", "last"}


def test_gradients_accumulate_over_two_backward_passes() -> None:
    def make(model: nn.Linear) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor | None:
            model(x).sum().backward()
            (model(x) ** 2).sum().backward()
            return model.weight.grad

        return step

    model, reference = linear()
    (gradient,) = Runner(trace(make(model), X, states_of(model=model))).step(X)
    torch.testing.assert_close(gradient, make(reference)(X))
    assert model.weight.grad is None  # a traced step leaves no gradient behind


@pytest.mark.parametrize("foreach", [None, False])
def test_clip_grad_norm_and_value(foreach: bool | None) -> None:
    def make(model: nn.Linear) -> Step:
        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            (model(x) ** 2).sum().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            return norm, model.weight.grad

        return step

    model, reference = linear()
    results = Runner(trace(make(model), X, states_of(model=model))).step(X)
    for result, expected in zip(results, make(reference)(X), strict=True):
        torch.testing.assert_close(result, expected)


def test_custom_autograd_function() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    def make(model: nn.Linear) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor | None:
            Square.apply(model(x)).sum().backward()  # type: ignore[no-untyped-call]  # torch has no types of it
            return model.weight.grad

        return step

    model, reference = linear()
    (gradient,) = Runner(trace(make(model), X, states_of(model=model))).step(X)
    torch.testing.assert_close(gradient, make(reference)(X))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    def make(model: nn.Linear) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor | None:
            x = x.clone().requires_grad_()
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).pow(2).sum().backward()
            return model.weight.grad

        return step

    model, reference = linear()
    (gradient,) = Runner(trace(make(model), X, states_of(model=model))).step(X)
    torch.testing.assert_close(gradient, make(reference)(X))


def test_parameter_data_changed_in_the_step() -> None:
    model, reference = linear()

    def step(x: torch.Tensor) -> torch.Tensor:
        model.weight.data.mul_(2)
        return model(x)

    runner = Runner(trace(step, X, states_of(model=model)))
    (result,) = runner.step(X)
    torch.testing.assert_close(runner.state["state.model.weight"], reference.weight.detach() * 2)
    torch.testing.assert_close(result, F.linear(X, reference.weight * 2, reference.bias).detach())


def test_outputs_see_the_last_value() -> None:
    seen: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        seen.append(y)
        y.add_(1)
        return y, seen[0]

    for result in Runner(trace(step, X)).step(X):
        torch.testing.assert_close(result, X * 2 + 1)


def test_views_and_bases_change_each_other() -> None:
    with device_scope():
        w = torch.zeros(4, 4)

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        view = w[1:3]
        view.add_(1)
        w.mul_(3)
        w[0].copy_(x[0])
        w.t()[3].fill_(9)
        return view

    runner = Runner(trace(lambda x: step(x, w), X, states_of(w=lambda: w)))
    (result,) = runner.step(X)
    expected = torch.zeros(4, 4)
    view = step(X, expected)
    assert torch.equal(runner.state["state.w"], expected)
    assert torch.equal(result, view)


def test_views_made_before_the_step() -> None:
    with device_scope():
        w = torch.zeros(6)
        head, transposed = w[2:4], w.view(2, 3).t()

    def step(x: torch.Tensor) -> torch.Tensor:
        head.add_(1)
        w.add_(1)
        return transposed

    runner = Runner(trace(step, X, states_of(w=lambda: w)))
    (result,) = runner.step(X)
    expected = torch.tensor([1.0, 1, 2, 2, 1, 1])
    assert torch.equal(runner.state["state.w"], expected)
    assert torch.equal(result, expected.view(2, 3).t())


def test_shape_changed_in_place() -> None:
    shapes: list[torch.Size] = []

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, z = x * 1, x * 1
        y.t_()
        z.unsqueeze_(0)
        shapes.extend([y.shape, z.shape])
        return y + 0, z + 0

    y, z = Runner(trace(step, X)).step(X)
    assert y.shape == shapes[0] == (4, 2)
    assert z.shape == shapes[1] == (1, 2, 4)


def test_a_schedule_counts_its_own_steps() -> None:
    with device_scope():
        count, w = torch.tensor(0), torch.ones(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        rate = torch.where(count < 2, count.float() * 0.1, 0.5)
        w.sub_(rate * x)
        count.add_(1)
        return rate

    runner = Runner(trace(step, torch.ones(3), states_of(count=lambda: count, w=lambda: w)))
    rates = [round(float(runner.step(torch.ones(3))[0]), 3) for _ in range(4)]
    assert rates == [0.0, 0.1, 0.5, 0.5]


def test_constants() -> None:
    with device_scope():
        outside = torch.tensor(3.0)
    on_cpu = torch.tensor(3.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        # A constant from outside may be used as a scalar.
        y = torch.addcdiv(x, x, x, value=outside) + on_cpu  # type: ignore[call-overload]
        y = y + torch.tensor([1.0, 2.0, 3.0, 4.0], device=DEVICE)
        return y * torch.tensor(2.0) + torch.full((), 5.0, device=x.device) + outside.clone()

    traced = trace(step, X)
    (result,) = Runner(traced).step(X)
    torch.testing.assert_close(result, (X + 6 + torch.tensor([1.0, 2, 3, 4])) * 2 + 8)
    assert [state.name for state in traced.states] == ["state.tensors.0"]


@pytest.mark.parametrize("elements", [2, 2000])
def test_constants_that_the_step_writes_to_between_uses(elements: int) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        position, total = torch.zeros(elements), x.sum()
        with torch.inference_mode():
            frozen = torch.ones(elements)
        for index in range(2):
            position[index] = index + 1
            total = total + (position.to(x.device) * frozen.to(x.device)).sum()
        return total

    torch.testing.assert_close(Runner(trace(step, X)).step(X)[0], step(X))


class Evaluated(nn.Module):
    """Has many operations that torch takes apart before the device sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv1d(1, 4, 3, padding="same"), nn.LayerNorm(4), nn.Linear(4, 3)
        self.attention, self.rnn = nn.MultiheadAttention(4, 2, batch_first=True), nn.GRU(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.norm(self.conv(x[:, None]).transpose(1, 2).contiguous())
        h = self.rnn(h + self.attention(h, h, h)[0])[0]
        mask = torch.tensor([1.0, 0.0, 1.0, 1.0]).to(x.device)
        mask[2] = 0.5
        h = (F.dropout(h, 0.5, training=False) * mask[:, None].to(h)).reshape(-1, 4)
        out = self.linear(h)
        return F.cross_entropy(out, out.argmax(-1)), out.norm(), F.kl_div(out.log_softmax(-1), out.softmax(-1))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_in_inference_mode(context: type[torch.no_grad | torch.inference_mode]) -> None:
    model = Evaluated().eval()
    reference = copy.deepcopy(model)
    move_module(model)

    @context()  # type: ignore[untyped-decorator]  # one of two types, for mypy
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    results = Runner(trace(step, X, states_of(model=model), model)).step(X)
    for result, expected in zip(results, reference(X), strict=True):
        torch.testing.assert_close(result, expected.detach())


def test_nothing_of_a_trace_stays_alive() -> None:
    model, _ = linear()
    gc.collect()
    before = sum(type(item).__name__ == "Call" for item in gc.get_objects())
    traced = trace(lambda x: model(x), X, states_of(model=model), model)
    del traced
    gc.collect()
    assert sum(type(item).__name__ == "Call" for item in gc.get_objects()) == before


def test_modules_of_many_kinds() -> None:
    makers: list[tuple[Callable[[], nn.Module], torch.Tensor]] = [
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), torch.randn(2, 5, 8)),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4)),
            torch.randn(2, 3, 8, 8),
        ),
        (lambda: nn.LSTM(4, 3, batch_first=True), torch.randn(2, 5, 4)),
        (lambda: nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.GELU()), torch.randint(5, (2, 3))),
    ]

    def make(model: nn.Module) -> Step:
        def step(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
            y = model(x)
            y = y[0] if isinstance(y, tuple) else y
            y.pow(2).mean().backward()
            return y, [p.grad for p in model.parameters()]

        return step

    for maker, x in makers:
        torch.manual_seed(0)
        model = maker()
        reference = copy.deepcopy(model)
        move_module(model)
        results = Runner(trace(make(model), x, states_of(model=model), model)).step(x)
        expected = torch.utils._pytree.tree_leaves(make(reference)(x))
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value.detach(), atol=1e-5, rtol=1e-4)


def test_device_tensors_may_be_arguments_of_the_step() -> None:
    with device_scope():
        scale = torch.tensor(2.0)
    traced = trace(lambda batch: batch["x"] * batch["scale"], {"x": X, "scale": scale, "other": 3})
    assert [info.name for info in traced.inputs] == ["input_0"]
    assert [info.name for info in traced.states] == ["state.tensors.0"]
