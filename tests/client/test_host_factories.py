"""Tensors made on another device in the form of a device tensor: those of torch, wherever a script makes them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cluster import FakeCluster
from torch import nn
from traced_steps import X, states_of, trace
from user_script import Script

import cstorch
from cstorch._internal.tracing import cell_of, from_cpu, move_module
from cstorch._internal.tracing.cell import RAM_BYTES
from cstorch.errors import TraceError

Factory = Callable[..., torch.Tensor]

UNINITIALISED: dict[str, Factory] = {
    "empty_like": torch.empty_like,
    "new_empty": lambda t, **named: t.new_empty((2, 3), **named),
    "new_empty_strided": lambda t, **named: t.new_empty_strided((2, 3), (1, 2), **named),
}
RANDOM: dict[str, Factory] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randn_like with a generator": lambda t, **named: torch.randn_like(
        t, generator=torch.Generator().manual_seed(3) if named.get("device") != "meta" else None, **named
    ),
    "randint_like": lambda t, **named: torch.randint_like(t, 9, **named),
    "randint_like from low": lambda t, **named: torch.randint_like(t, 5, 9, **named),
}
CONSTANT: dict[str, Factory] = {
    "zeros_like": torch.zeros_like,
    "zeros_like of a type": lambda t, **named: torch.zeros_like(t, dtype=torch.int64, **named),
    "zeros_like of a layout": lambda t, **named: torch.zeros_like(t, memory_format=torch.contiguous_format, **named),
    "zeros_like with a gradient": lambda t, **named: torch.zeros_like(t, requires_grad=True, **named),
    "ones_like": torch.ones_like,
    "full_like": lambda t, **named: torch.full_like(t, 2.5, **named),
    "new_zeros": lambda t, **named: t.new_zeros((2, 3), **named),
    "new_ones": lambda t, **named: t.new_ones(4, **named),
    "new_full": lambda t, **named: t.new_full((2, 3), 2.5, **named),
    "new_tensor": lambda t, **named: t.new_tensor([1.5, 2.0], **named),
    "of no tensor": lambda t, **named: torch.zeros(3, **named),
}
FACTORIES = UNINITIALISED | RANDOM | CONSTANT

FORMS: dict[str, torch.Tensor] = {
    "small": X,
    "large": torch.ones(RAM_BYTES // 8, 3),
    "transposed": X.t(),
    "strided": torch.ones(4, 6)[:, ::2],
    "scalar": torch.tensor(3.0),
    "half": X.bfloat16(),
}


def check(name: str, made: torch.Tensor, reference: torch.Tensor, device: str, seed: int = 5) -> None:
    """Compares a tensor that was made after `seed` with that of torch for a CPU tensor of the same form."""
    torch.manual_seed(seed)
    expected = FACTORIES[name](reference, device=device)
    assert type(made) is type(expected) is torch.Tensor
    assert made.device == expected.device
    assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert (made.is_leaf, made.requires_grad) == (expected.is_leaf, expected.requires_grad)
    if device == "cpu" and name not in UNINITIALISED:
        assert torch.equal(made, expected)


def make(name: str, tensor: torch.Tensor, device: str) -> torch.Tensor:
    torch.manual_seed(5)
    return FACTORIES[name](tensor, device=device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FACTORIES)
def test_outside_of_a_step(name: str, form: str, device: str) -> None:
    reference = FORMS[form]
    whole = from_cpu(torch.zeros(reference.untyped_storage().size() // reference.itemsize, dtype=reference.dtype))
    tensor = whole.as_strided(reference.shape, reference.stride())
    made = make(name, tensor, device)
    after = torch.get_rng_state()
    check(name, made, reference, device)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", FACTORIES)
def test_a_value_on_the_cluster_is_not_fetched(name: str, device: str) -> None:
    def fetch() -> Iterator[torch.Tensor]:
        raise AssertionError

    weight = nn.Parameter(from_cpu(X))
    cell_of(weight).set_remote(fetch)
    check(name, make(name, weight, device), nn.Parameter(X), device)
    assert torch.zeros_like(weight).device.type == "lazy"
    assert torch.zeros_like(weight, device=weight.device).device.type == "lazy"
    assert weight.detach().to("meta").stride() == X.stride()
    assert nn.ParameterList([weight]).to("meta")[0].device.type == "meta"


@pytest.mark.parametrize(
    "function",
    [
        lambda t, **named: torch.linspace(t[0, 0], 3.0, 4, **named),
        lambda t, **named: torch.logspace(0.0, t[0, 1], 4, **named),
        lambda t, **named: torch.randint_like(t, t[1, 0].abs() + 9, **named),
    ],
    ids=["linspace", "logspace", "randint_like"],
)
def test_a_tensor_of_the_host_that_depends_on_values(function: Factory) -> None:
    torch.manual_seed(5)
    made = function(from_cpu(X), device="cpu")
    torch.manual_seed(5)
    assert type(made) is torch.Tensor
    assert torch.equal(made, function(X, device="cpu"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", FACTORIES)
def test_in_a_step(name: str, device: str) -> None:
    """As a tensor that is made of no other: it is the host's, and enters the step as a constant."""
    model = nn.Linear(4, 3)
    move_module(model)
    made: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        made.extend(make(name, tensor, device) for tensor in (x, model.weight))
        return model(x)

    trace(step, X, states_of(model=model))
    check(name, made[0], X, device)
    check(name, made[1], torch.empty(3, 4), device)


@pytest.mark.parametrize("name", CONSTANT)
def test_a_constant_enters_a_step(name: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sum() + make(name, x, "cpu").to(x.device).sum()

    traced = trace(step, X)
    assert [argument.kind for argument in traced.arguments] == ["input", "constant"]


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_of_the_host_do_not_enter_a_step(name: str) -> None:
    with pytest.raises(TraceError, match=r"drawn on the CPU .* at \S*test_host_factories.py:\d+, enters"):
        trace(lambda x: x + make(name, x, "cpu").to(x.device), X)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_around_executions(cluster: FakeCluster, tmp_path: Path, device: str) -> None:
    """Before, between and after executions, in the body of the loop, and in closures."""
    script = Script(tmp_path, cluster)
    made: list[tuple[str, str, torch.Tensor, tuple[int, ...]]] = []

    def note(place: str, *tensors: Any) -> None:
        for tensor in tensors:
            made.extend((place, name, make(name, tensor, device), tuple(tensor.shape)) for name in FACTORIES)

    @cstorch.step_closure
    def in_step_closure(loss: torch.Tensor) -> None:
        note("step closure", script.model.weight, loss)

    @cstorch.checkpoint_closure
    def in_checkpoint_closure() -> None:
        note("checkpoint closure", script.model.weight)

    def body(batch: Any) -> None:
        loss = script.step(batch)
        note("body", script.model.weight, loss, batch)
        in_step_closure(loss)
        in_checkpoint_closure()

    note("before", script.model.weight)
    for place in ("between", "after"):
        script.loop(body, [torch.ones(4, 2)] * 2, 2, checkpoint_steps=1)
        note(place, script.model.weight)
    places = {"before", "body", "step closure", "checkpoint closure", "between", "after"}
    assert {place for place, *_ in made} == places
    for _, name, tensor, shape in made:
        check(name, tensor, torch.empty(shape), device)
