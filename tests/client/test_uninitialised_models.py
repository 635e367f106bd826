"""Models whose first call sets the shapes of their parameters (nn.LazyLinear)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_cluster import FakeCluster
from torch import nn
from torch.nn.parameter import is_lazy
from traced_steps import states_of, trace

import cerebras.pytorch as cstorch
from cstorch._internal.tracing import DEVICE, LazyTensor, device_scope
from cstorch.errors import TraceError, UsageError

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def model() -> nn.Sequential:
    return nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(3))


def in_scope() -> nn.Sequential:
    with device_scope():
        return model()


def moved_and_back() -> nn.Sequential:
    made = model().to(DEVICE).to("cpu")
    made(X)
    assert not any(isinstance(tensor, LazyTensor) for tensor in made.state_dict().values())
    return made.to(DEVICE)


MAKES: dict[str, Callable[[], nn.Sequential]] = {
    "in the scope of the device": in_scope,
    "moved": lambda: model().to(DEVICE),
    "moved with a type": lambda: model().to(DEVICE, torch.float64).to(torch.float32),
    "for the device by name": lambda: nn.Sequential(
        nn.LazyLinear(5, device=DEVICE),
        nn.LazyBatchNorm1d(device=DEVICE),
        nn.Tanh(),
        nn.LazyLinear(3, device="lazy"),
    ),
}


@pytest.mark.parametrize("name", MAKES)
def test_the_first_call_makes_them_on_the_device(name: str) -> None:
    made, reference = MAKES[name](), model()
    parameters = list(made.parameters())
    torch.manual_seed(0)
    result = made(X.to(DEVICE))
    torch.manual_seed(0)
    torch.testing.assert_close(result.cpu(), reference(X))
    assert all(one is other for one, other in zip(made.parameters(), parameters, strict=True))
    assert all(isinstance(tensor, LazyTensor) for tensor in made.state_dict().values())
    assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in parameters)
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(made.state_dict()[key].cpu(), value)
    trace(lambda x: made(x).sum(), X, states_of(model=made), made)


def test_there_and_back() -> None:
    made = moved_and_back()
    assert all(isinstance(tensor, LazyTensor) for tensor in made.state_dict().values())


def test_loaded_before_the_first_call() -> None:
    reference = model()
    reference(X)
    made = in_scope()
    made.load_state_dict(reference.state_dict())
    weight = made[0].get_parameter("weight")
    assert torch.equal(weight.cpu(), reference[0].get_parameter("weight"))
    assert isinstance(weight, LazyTensor)


def test_not_in_a_step() -> None:
    made = in_scope()
    assert all(is_lazy(parameter) for parameter in made.parameters())
    with pytest.raises(TraceError, match=r"test_uninitialised_models.py:\d+ .*Call the model once before"):
        trace(lambda x: made(x).sum(), X)


def test_not_compiled(cluster: FakeCluster) -> None:
    backend: Any = cstorch.backend("CSX")
    with pytest.raises(UsageError, match=r"call it once with a batch of zeros"):
        cstorch.compile(in_scope(), backend)
